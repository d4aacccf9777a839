package virttest

import (
	"cmp"
	"encoding/binary"
	"errors"
	"io"
	"strings"
)

// procedures returns the names of the known procedures, in virsh's terms, by their number
// in src/remote/remote_protocol.x.
func procedures() map[uint32]string {
	return map[uint32]string{
		1: "open", 2: "close", 3: "type", 4: "hypervisor version", 7: "capabilities", 14: "dumpxml", 23: "lookup name", 24: "lookup uuid",
		28: "resume", 34: "suspend", 59: "hostname", 66: "auth list", 102: "free memory", 151: "is persistent", 157: "version", 160: "attach-device",
		161: "detach-device", 164: "domjobabort", 196: "start", 212: "domstate", 231: "undefine", 234: "destroy", 258: "shutdown",
		273: "list", 298: "domjobinfo", 305: "migrate", 306: "finish", 316: "register", 350: "define",
		15: "autostart?", 29: "autostart", 187: "snapshots", 413: "checkpoints",
	}
}

const (
	headerLen    = 28
	program      = 0x20008086
	kindReply    = 1
	kindMessage  = 2
	procEvent    = 318
	statusOK     = 0
	statusError  = 1
	largestFrame = 32 << 20
)

// request is a call that has arrived.
type request struct {
	procedure, serial uint32
	body              reader
}

func readRequest(r io.Reader) (request, error) {
	head := make([]byte, headerLen)
	if _, err := io.ReadFull(r, head); err != nil {
		return request{}, err
	}
	length := binary.BigEndian.Uint32(head)
	if length < headerLen || length > largestFrame || binary.BigEndian.Uint32(head[4:]) != program {
		return request{}, errors.New("not a call of libvirt")
	}
	body := make([]byte, length-headerLen)
	if _, err := io.ReadFull(r, body); err != nil {
		return request{}, err
	}
	return request{binary.BigEndian.Uint32(head[12:]), binary.BigEndian.Uint32(head[20:]), reader{b: body}}, nil
}

func frame(procedure, kind, serial, status uint32, body []byte) []byte {
	var out []byte
	for _, w := range []uint32{uint32(headerLen + len(body)), program, 1, procedure, kind, serial, status} {
		out = binary.BigEndian.AppendUint32(out, w)
	}
	return append(out, body...)
}

// reader reads XDR. If bytes are missing, it returns zeros and sets bad.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) take(n int) []byte {
	if n < 0 || n > len(r.b) {
		r.bad = true
		return make([]byte, min(max(n, 0), 64))
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) u32() uint32 { return binary.BigEndian.Uint32(r.take(4)) }

func (r *reader) str() string {
	n := int(r.u32())
	s := string(r.take(n))
	r.take(-n & 3)
	return s
}

func (r *reader) opt() string {
	if r.u32() == 0 {
		return ""
	}
	return r.str()
}

func (r *reader) domain() (name string, uuid [16]byte) {
	name = r.str()
	copy(uuid[:], r.take(16))
	r.u32()
	return name, uuid
}

// writer writes XDR.
type writer []byte

func (w *writer) u32(v uint32) { *w = binary.BigEndian.AppendUint32(*w, v) }
func (w *writer) u64(v uint64) { *w = binary.BigEndian.AppendUint64(*w, v) }

func (w *writer) str(s string) {
	w.u32(uint32(len(s)))
	*w = append(*w, s...)
	*w = append(*w, make([]byte, -len(s)&3)...)
}

func (w *writer) domain(d *domain) {
	w.str(d.name)
	*w = append(*w, d.uuid[:]...)
	w.u32(uint32(int32(d.id)))
}

// saved writes how many snapshots or checkpoints a domain has: those that its definition mentions.
func (w *writer) saved(call string, d *domain) {
	if call == "checkpoints" {
		w.u32(0) // they are only counted
	}
	w.u32(uint32(strings.Count(d.config, "<!-- "+strings.TrimSuffix(call, "s")+" -->")))
}

// fromQEMU is the part of libvirt that errors are from if nothing is said (virErrorDomain).
const fromQEMU = 10

// failure encodes an error as libvirt does.
func failure(code, from uint32, message string) []byte {
	var w writer
	w.u32(code)
	w.u32(cmp.Or(from, fromQEMU))
	w.u32(1)
	w.str(message)
	w.u32(2) // VIR_ERR_ERROR
	w.u32(0) // domain
	w.u32(1)
	w.str("%s")
	w.u32(1)
	w.str(message)
	w.u32(0)
	w.u32(^uint32(0))
	w.u32(^uint32(0))
	w.u32(0) // network
	return w
}
