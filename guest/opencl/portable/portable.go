package portable

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

const (
	magic   = "GPUCLBIN"
	version = 1
	prefix  = 24 // magic, version, zero, length
	header  = prefix + sha256.Size

	// MaxSize is the size of the largest container in bytes.
	MaxSize = 64 << 20
	// MaxDepth is how deep programs nest.
	MaxDepth = 16
	// MaxPrograms is how many programs a container holds, headers and inputs included.
	MaxPrograms = 4096
)

// Errors of Marshal and Unmarshal.
var (
	// ErrNotPortable is returned for bytes that are no container, perhaps a vendor's
	// binary.
	ErrNotPortable = errors.New("not a portable program")
	// ErrVersion is returned for a container of an unknown version.
	ErrVersion = errors.New("unknown version of portable program")
	// ErrCorrupt is returned for a damaged container.
	ErrCorrupt = errors.New("portable program corrupt")
	// ErrLimit is returned for a program beyond MaxSize, MaxDepth or MaxPrograms.
	ErrLimit = errors.New("portable program too large")
	// ErrInvalid is returned for a program without a valid kind, or with a NUL in a text.
	ErrInvalid = errors.New("portable program invalid")
)

// Kind is the state of a program when it was stored.
type Kind uint32

// The kinds of programs.
const (
	Source     Kind = iota + 1 // OpenCL C, not compiled
	IL                         // IL, not compiled
	Object                     // compiled with Options and Headers
	Library                    // linked from Inputs with LinkOptions
	Executable                 // built from Source or IL, or linked from Inputs
)

// String returns the kind's name.
func (k Kind) String() string {
	switch k {
	case Source:
		return "source"
	case IL:
		return "IL"
	case Object:
		return "object"
	case Library:
		return "library"
	case Executable:
		return "executable"
	}
	return fmt.Sprintf("kind(%d)", uint32(k))
}

// Program contains what is needed to build a program again on any device.
type Program struct {
	Kind          Kind
	Source        []byte // OpenCL C
	IL            []byte // SPIR-V, or another IL that the platform accepted
	Options       string // options of the build or compilation
	LinkOptions   string
	Headers       []Header
	Inputs        []Program // the programs that it was linked from
	SpecConstants []SpecConstant
	Kernels       []string // names, as far as known
}

// Header is a program that others include, with its name.
type Header struct {
	Name    string
	Program Program
}

// SpecConstant is a specialization constant of IL.
type SpecConstant struct {
	ID    uint32
	Value []byte
}

// IsPortable reports whether the bytes begin as a container does.
func IsPortable(b []byte) bool { return bytes.HasPrefix(b, []byte(magic)) }

// Marshal encodes a program. Equal programs have equal encodings.
func (p *Program) Marshal() ([]byte, error) {
	e := encoder{b: make([]byte, header, header+256+len(p.Source)+len(p.IL))}
	e.program(p, 0)
	if e.err != nil {
		return nil, e.err
	}
	copy(e.b, magic)
	binary.LittleEndian.PutUint32(e.b[8:], version)
	binary.LittleEndian.PutUint64(e.b[16:], uint64(len(e.b)-header))
	sum := checksum(e.b)
	copy(e.b[prefix:], sum[:])
	return e.b, nil
}

func checksum(container []byte) (sum [sha256.Size]byte) {
	h := sha256.New()
	h.Write(container[:prefix])
	h.Write(container[header:])
	h.Sum(sum[:0])
	return sum
}

// Unmarshal decodes a container. The program shares no memory with b.
func Unmarshal(b []byte) (*Program, error) {
	if !IsPortable(b) {
		return nil, ErrNotPortable
	}
	if len(b) < header {
		return nil, fmt.Errorf("%d bytes: %w", len(b), ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != version {
		return nil, fmt.Errorf("version %d: %w", v, ErrVersion)
	}
	if len(b) > MaxSize {
		return nil, fmt.Errorf("%d bytes: %w", len(b), ErrLimit)
	}
	if n := binary.LittleEndian.Uint64(b[16:]); n != uint64(len(b)-header) {
		return nil, fmt.Errorf("length %d, not %d: %w", len(b)-header, n, ErrCorrupt)
	}
	if sum := checksum(b); !bytes.Equal(sum[:], b[prefix:header]) || binary.LittleEndian.Uint32(b[12:]) != 0 {
		return nil, fmt.Errorf("checksum: %w", ErrCorrupt)
	}
	d := decoder{b: b[header:]}
	var p Program
	d.program(&p, 0)
	if d.err == nil && len(d.b) != 0 {
		d.err = fmt.Errorf("%d bytes too many: %w", len(d.b), ErrCorrupt)
	}
	if d.err != nil {
		return nil, d.err
	}
	return &p, nil
}

// The encoder and the decoder store their first error and do nothing after it.

type encoder struct {
	b        []byte
	programs int
	err      error
}

func (e *encoder) u32(v uint32) { e.b = binary.LittleEndian.AppendUint32(e.b, v) }

func (e *encoder) bytes(v []byte) {
	if e.err == nil && len(v) > MaxSize-4-len(e.b) {
		e.err = fmt.Errorf("more than %d bytes: %w", MaxSize, ErrLimit)
	}
	if e.err == nil {
		e.u32(uint32(len(v)))
		e.b = append(e.b, v...)
	}
}

func (e *encoder) text(s string) {
	if e.err == nil {
		e.err = checkText(s)
	}
	e.bytes([]byte(s))
}

func (e *encoder) program(p *Program, depth int) {
	if e.programs++; e.err == nil {
		e.err = checkProgram(p.Kind, depth, e.programs)
	}
	if e.err != nil {
		return
	}
	e.u32(uint32(p.Kind))
	e.bytes(p.Source)
	e.bytes(p.IL)
	e.text(p.Options)
	e.text(p.LinkOptions)
	e.u32(uint32(len(p.Headers)))
	for i := range p.Headers {
		e.text(p.Headers[i].Name)
		e.program(&p.Headers[i].Program, depth+1)
	}
	e.u32(uint32(len(p.Inputs)))
	for i := range p.Inputs {
		e.program(&p.Inputs[i], depth+1)
	}
	e.u32(uint32(len(p.SpecConstants)))
	for _, c := range p.SpecConstants {
		if e.err != nil {
			return
		}
		e.u32(c.ID)
		e.bytes(c.Value)
	}
	e.u32(uint32(len(p.Kernels)))
	for _, k := range p.Kernels {
		e.text(k)
	}
	if e.err == nil && len(e.b) > MaxSize {
		e.err = fmt.Errorf("more than %d bytes: %w", MaxSize, ErrLimit)
	}
}

type decoder struct {
	b        []byte
	programs int
	err      error
}

func (d *decoder) u32() uint32 {
	if d.err == nil && len(d.b) < 4 {
		d.err = fmt.Errorf("ends early: %w", ErrCorrupt)
	}
	if d.err != nil {
		return 0
	}
	v := binary.LittleEndian.Uint32(d.b)
	d.b = d.b[4:]
	return v
}

// count reads a number of elements that have at least size bytes each.
func (d *decoder) count(size int) int {
	n := d.u32()
	if d.err == nil && uint64(n)*uint64(size) > uint64(len(d.b)) {
		d.err = fmt.Errorf("%d elements in %d bytes: %w", n, len(d.b), ErrCorrupt)
	}
	if d.err != nil {
		return 0
	}
	return int(n)
}

// nested reads a number of programs.
func (d *decoder) nested(size int) int {
	n := d.count(size)
	if d.programs+n > MaxPrograms {
		d.err = fmt.Errorf("more than %d programs: %w", MaxPrograms, ErrLimit)
		return 0
	}
	return n
}

func (d *decoder) bytes() []byte {
	n := d.count(1)
	if n == 0 {
		return nil
	}
	v := bytes.Clone(d.b[:n])
	d.b = d.b[n:]
	return v
}

func (d *decoder) text() string {
	n := d.count(1)
	s := string(d.b[:n])
	d.b = d.b[n:]
	if d.err == nil {
		d.err = checkText(s)
	}
	return s
}

// minProgram is the size of the smallest program's encoding.
const minProgram = 9 * 4

func (d *decoder) program(p *Program, depth int) {
	p.Kind = Kind(d.u32())
	if d.programs++; d.err == nil {
		d.err = checkProgram(p.Kind, depth, d.programs)
	}
	if d.err != nil {
		return
	}
	p.Source = d.bytes()
	p.IL = d.bytes()
	p.Options = d.text()
	p.LinkOptions = d.text()
	if n := d.nested(4 + minProgram); n > 0 {
		p.Headers = make([]Header, n)
		for i := 0; i < n && d.err == nil; i++ {
			p.Headers[i].Name = d.text()
			d.program(&p.Headers[i].Program, depth+1)
		}
	}
	if n := d.nested(minProgram); n > 0 {
		p.Inputs = make([]Program, n)
		for i := 0; i < n && d.err == nil; i++ {
			d.program(&p.Inputs[i], depth+1)
		}
	}
	if n := d.count(8); n > 0 {
		p.SpecConstants = make([]SpecConstant, n)
		for i := 0; i < n && d.err == nil; i++ {
			p.SpecConstants[i] = SpecConstant{d.u32(), d.bytes()}
		}
	}
	if n := d.count(4); n > 0 {
		p.Kernels = make([]string, n)
		for i := 0; i < n && d.err == nil; i++ {
			p.Kernels[i] = d.text()
		}
	}
}

func checkProgram(k Kind, depth, programs int) error {
	switch {
	case k < Source || k > Executable:
		return fmt.Errorf("%s: %w", k, ErrInvalid)
	case depth >= MaxDepth:
		return fmt.Errorf("nested deeper than %d: %w", MaxDepth, ErrLimit)
	case programs > MaxPrograms:
		return fmt.Errorf("more than %d programs: %w", MaxPrograms, ErrLimit)
	}
	return nil
}

func checkText(s string) error {
	if strings.IndexByte(s, 0) >= 0 {
		return fmt.Errorf("NUL in %q: %w", s[:min(len(s), 64)], ErrInvalid)
	}
	return nil
}
