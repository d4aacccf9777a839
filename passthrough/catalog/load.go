package catalog

import (
	"bytes"
	_ "embed" // the data file
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/passthrough/reset"
)

// Version is the only version of the file format.
const Version = 1

// Limits for the files and lists that are read.
const (
	maxFile   = 1 << 20
	maxModels = 10000
	maxList   = 256
	maxText   = 255
)

//go:embed data.yaml
var builtin string

// builtinName is the name of the embedded file in messages.
const builtinName = "built-in catalogue"

// File is a catalogue file.
type File struct {
	Name string // for messages
	Data []byte
}

func readFile(name string) (File, error) {
	f, err := os.Open(name)
	if err != nil {
		return File{}, fmt.Errorf("catalogue: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return File{}, fmt.Errorf("catalogue %s: %w", name, err)
	}
	return File{name, data}, nil // Load refuses a file that is too large
}

// Open loads the operator's files.
func Open(paths ...string) (*Catalog, error) {
	var files []File
	for _, p := range paths {
		f, err := readFile(p)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	return Load(files...)
}

// Load makes a catalogue from the program's own file and further files. Later files
// override earlier ones. Errors name the file and line; all errors of a file are joined.
// They wrap ErrInvalid.
func Load(extra ...File) (*Catalog, error) {
	l := newLoader()
	for _, f := range append([]File{{builtinName, []byte(builtin)}}, extra...) {
		if err := l.file(f); err != nil {
			return nil, err
		}
	}
	return &l.Catalog, nil
}

// fileYAML is the form of a file.
type fileYAML struct {
	Version  int          `yaml:"version"`
	Families []familyYAML `yaml:"families"`
	Models   []modelYAML  `yaml:"models"`
}

type familyYAML struct {
	Name     string         `yaml:"name"`
	Limits   map[string]any `yaml:"limits"`
	Resets   []resetYAML    `yaml:"resets"`
	Emulated bool           `yaml:"emulated"`
}

type modelYAML struct {
	Model     string         `yaml:"model"`
	IDs       []string       `yaml:"ids"`
	Family    string         `yaml:"family"`
	Memory    string         `yaml:"memory"`
	Rank      *uint32        `yaml:"rank"`
	Bandwidth float64        `yaml:"bandwidth"`
	FP32      float64        `yaml:"fp32"`
	Limits    map[string]any `yaml:"limits"`
	VGPU      []vgpuYAML     `yaml:"vgpu"`
	Resets    []resetYAML    `yaml:"resets"`
	Emulated  *bool          `yaml:"emulated"`
	AnyClass  *bool          `yaml:"anyClass"`
}

type vgpuYAML struct {
	Type   string `yaml:"type"`
	Memory string `yaml:"memory"`
	Max    uint32 `yaml:"max"`
	Mixed  uint32 `yaml:"mixed"`
	MIG    string `yaml:"mig"`
}

type resetYAML struct {
	Method  string `yaml:"method"`
	Verdict string `yaml:"verdict"`
	Reason  string `yaml:"reason"`
}

type family struct {
	limits   *gpuctlv1.Limits
	resets   []BadReset
	emulated bool
}

// facts are the values from which a rank is computed.
type facts struct{ bandwidth, fp32 float64 }

type loader struct {
	Catalog
	families map[string]*family
	facts    map[string]*facts
}

func newLoader() *loader {
	return &loader{
		Catalog:  Catalog{models: map[string]*Entry{}, byID: map[ID]string{}},
		families: map[string]*family{}, facts: map[string]*facts{},
	}
}

// file adds one file.
func (l *loader) file(f File) error {
	p := &parser{loader: l, name: f.Name, data: f.Data}
	if len(f.Data) > maxFile {
		return fmt.Errorf("%w: %s: larger than %d bytes", ErrInvalid, f.Name, maxFile)
	}
	var y fileYAML
	dec := yaml.NewDecoder(bytes.NewReader(f.Data))
	dec.KnownFields(true)
	if err := dec.Decode(&y); err != nil {
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("%w: %s: empty; it needs at least \"version: %d\"", ErrInvalid, f.Name, Version)
		}
		return fmt.Errorf("%w: %s: %s", ErrInvalid, f.Name, plain(err))
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: %s: more than one document", ErrInvalid, f.Name)
	}
	p.all(&y)
	return errors.Join(p.errs...)
}

// plain removes the names of Go types from a message.
func plain(err error) string {
	s := err.Error()
	for _, t := range []string{"fileYAML", "familyYAML", "modelYAML", "vgpuYAML", "resetYAML"} {
		s = strings.ReplaceAll(s, " in type catalog."+t, "")
	}
	return strings.TrimPrefix(s, "yaml: ")
}

type parser struct {
	*loader
	name string
	data []byte
	root *yaml.Node // parsed when needed
	errs []error
}

// bad records an error at a place: names of fields and indexes.
func (p *parser) bad(at []any, format string, args ...any) {
	if len(p.errs) < 100 {
		p.errs = append(p.errs, fmt.Errorf("%w: %s:%d: %s", ErrInvalid, p.name, p.line(at), fmt.Sprintf(format, args...)))
	}
}

// line returns the line of a place, or of the last part of it that exists.
func (p *parser) line(at []any) int {
	if p.root == nil { // parse the file again, for the lines
		p.root = &yaml.Node{}
		if err := yaml.Unmarshal(p.data, p.root); err != nil {
			return 1 // impossible: it was decoded before
		}
	}
	n := p.root
	if n.Kind == yaml.DocumentNode && len(n.Content) > 0 {
		n = n.Content[0]
	}
	for _, step := range at {
		var next *yaml.Node
		switch step := step.(type) {
		case int:
			if n.Kind == yaml.SequenceNode && step < len(n.Content) {
				next = n.Content[step]
			}
		case string:
			for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
				if n.Content[i].Value == step {
					next = n.Content[i+1]
				}
			}
		}
		if next == nil {
			break
		}
		n = next
	}
	return max(n.Line, 1)
}

func (p *parser) all(y *fileYAML) {
	if y.Version != Version {
		p.bad([]any{"version"}, "version %d is not known (want %d)", y.Version, Version)
		return
	}
	if len(y.Models) > maxModels || len(y.Families) > maxList {
		p.bad([]any{"models"}, "more than %d models or %d families", maxModels, maxList)
		return
	}
	families := map[string]bool{}
	for i, f := range y.Families {
		at := []any{"families", i}
		if !isName(f.Name) || families[f.Name] {
			p.bad(at, "family %.40q: missing, twice, longer than %d bytes or not printable", f.Name, maxText)
			continue
		}
		families[f.Name] = true
		// If a later file describes a family again, that applies to the models of that
		// file.
		p.families[f.Name] = &family{p.limits(at, f.Limits), p.resets(at, f.Resets), f.Emulated}
	}
	models := map[string]bool{}
	ids := map[ID][]any{}
	for i := range y.Models {
		m := &y.Models[i]
		at := []any{"models", i}
		if !isName(m.Model) {
			p.bad(at, "model %.40q: missing, longer than %d bytes or not printable", m.Model, maxText)
			continue
		}
		if models[m.Model] {
			p.bad(at, "model %q twice", m.Model)
			continue
		}
		models[m.Model] = true
		p.model(at, m, ids)
	}
}

func isName(s string) bool {
	return s != "" && len(s) <= maxText && utf8.ValidString(s) && strings.TrimSpace(s) == s && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

func (p *parser) model(at []any, m *modelYAML, ids map[ID][]any) {
	e, known := p.models[m.Model], true
	if e == nil {
		e, known = &Entry{Model: m.Model, Limits: &gpuctlv1.Limits{}}, false
		if len(m.IDs) == 0 {
			p.bad(at, "model %q is new and has no ids", m.Model)
		}
	}
	e.File = p.name
	if m.Family != "" {
		f := p.families[m.Family]
		if f == nil {
			p.bad(append(at, "family"), "family %.40q is not described", m.Family)
			return
		}
		merge(e.Limits, f.limits)
		e.Resets, e.Emulated = slices.Clone(f.resets), f.emulated
	}
	if m.Emulated != nil {
		e.Emulated = *m.Emulated
	}
	if m.AnyClass != nil {
		e.AnyClass = *m.AnyClass
	}
	if m.Memory != "" {
		e.Memory = p.bytes(append(at, "memory"), m.Memory)
	}
	merge(e.Limits, p.limits(at, m.Limits))
	if e.Memory != 0 {
		e.Limits.GlobalMemory = e.Memory
	} else if e.Limits.GlobalMemory != 0 {
		p.bad(append(at, "limits"), "globalMemory without memory: say memory")
	}
	p.rank(at, m, e, known)
	if m.VGPU != nil {
		e.VGPU = p.vgpu(at, m.VGPU, e.Memory)
	}
	if m.Resets != nil {
		e.Resets = p.resets(at, m.Resets)
	}
	p.ids(at, m, ids)
	p.models[m.Model] = e
}

func (p *parser) ids(at []any, m *modelYAML, ids map[ID][]any) {
	if len(m.IDs) > maxList {
		p.bad(append(at, "ids"), "more than %d ids", maxList)
		return
	}
	for i, s := range m.IDs {
		at := append(slices.Clone(at), "ids", i)
		id, err := ParseID(s)
		if err != nil {
			p.bad(at, "%v", err)
			continue
		}
		if first, twice := ids[id]; twice {
			p.bad(at, "id %s is already in line %d", id, p.line(first))
			continue
		}
		ids[id] = at
		p.byID[id] = m.Model
	}
}

// rank returns the file's value, or ten times the square root of bandwidth (GB/s) times
// arithmetic performance (TFLOPS), because neither alone makes a GPU fast.
func (p *parser) rank(at []any, m *modelYAML, e *Entry, known bool) {
	f := p.facts[m.Model]
	if f == nil {
		f = &facts{}
		p.facts[m.Model] = f
	}
	for field, v := range map[string]float64{"bandwidth": m.Bandwidth, "fp32": m.FP32} {
		if !(v >= 0 && v <= 1e6) {
			p.bad(append(slices.Clone(at), field), "%s %v is not from 0 to 1000000", field, v)
			return
		}
	}
	if m.Bandwidth != 0 {
		f.bandwidth = m.Bandwidth
	}
	if m.FP32 != 0 {
		f.fp32 = m.FP32
	}
	switch {
	case m.Rank != nil:
		e.Rank = *m.Rank
	case m.Bandwidth == 0 && m.FP32 == 0 && known:
	case f.bandwidth != 0 && f.fp32 != 0:
		e.Rank = uint32(math.Round(10 * math.Sqrt(f.bandwidth*f.fp32)))
	default:
		p.bad(at, "model %q needs a rank, or bandwidth and fp32 to make it of", m.Model)
	}
}

func (p *parser) bytes(at []any, s string) uint64 {
	n, err := size.Parse(s)
	if err != nil || n == 0 || n > 1<<50 {
		p.bad(at, "memory %.40q is not an amount such as 48GiB", s)
	}
	return n
}

func (p *parser) vgpu(at []any, list []vgpuYAML, memory uint64) []VGPUType {
	if len(list) > maxList {
		p.bad(append(at, "vgpu"), "more than %d vGPU types", maxList)
		return nil
	}
	var out []VGPUType
	for i, v := range list {
		at := append(slices.Clone(at), "vgpu", i)
		t := VGPUType{v.Type, p.bytes(append(at, "memory"), v.Memory), v.Max, v.Mixed, v.MIG}
		switch {
		case !isName(t.Name) || t.MIG != "" && !isName(t.MIG):
			p.bad(at, "vGPU type %.40q: missing, longer than %d bytes or not printable", t.Name, maxText)
		case slices.ContainsFunc(out, func(o VGPUType) bool { return o.Name == t.Name }):
			p.bad(at, "vGPU type %s twice", t.Name)
		case t.Max == 0 || t.Max > 4096:
			p.bad(at, "vGPU type %s: max %d is not from 1 to 4096", t.Name, t.Max)
		case t.Mixed > t.Max:
			p.bad(at, "vGPU type %s: more fit when sizes differ (%d) than when they do not (%d)", t.Name, t.Mixed, t.Max)
		case memory != 0 && t.MIG == "" && t.Memory*uint64(t.Max) > memory:
			p.bad(at, "vGPU type %s: %d of %s are more than the model's %s", t.Name, t.Max, size.Format(t.Memory), size.Format(memory))
		default:
			out = append(out, t)
		}
	}
	return out
}

func (p *parser) resets(at []any, list []resetYAML) []BadReset {
	if len(list) > maxList {
		p.bad(append(at, "resets"), "more than %d resets", maxList)
		return nil
	}
	out := make([]BadReset, 0, len(list))
	for i, r := range list {
		at := append(slices.Clone(at), "resets", i)
		b := BadReset{reset.Method(r.Method), Verdict(r.Verdict), r.Reason}
		switch {
		case !slices.Contains(reset.Methods(), b.Method):
			p.bad(at, "method %.40q is not one of %v", r.Method, reset.Methods())
		case b.Verdict != Hangs && b.Verdict != NoEffect:
			p.bad(at, "verdict %.40q is not %s or %s", r.Verdict, Hangs, NoEffect)
		case !isName(b.Reason):
			p.bad(at, "%s %s: the reason is missing, longer than %d bytes or not printable", b.Method, b.Verdict, maxText)
		case slices.ContainsFunc(out, func(o BadReset) bool { return o.Method == b.Method }):
			p.bad(at, "method %s twice", b.Method)
		default:
			out = append(out, b)
		}
	}
	return out
}

// limits decodes the fields as JSON of gpuctl.v1.Limits.
func (p *parser) limits(at []any, m map[string]any) *gpuctlv1.Limits {
	out := &gpuctlv1.Limits{}
	at = append(slices.Clone(at), "limits")
	for name, v := range m {
		text, err := json.Marshal(map[string]any{name: v})
		one := &gpuctlv1.Limits{}
		if err == nil {
			err = protojson.Unmarshal(text, one)
		}
		if err != nil {
			p.bad(append(at, name), "limit %.40q: not a field of Limits, or not of its kind", name)
			continue
		}
		merge(out, one)
	}
	return out
}

// merge copies the fields that are set in from. Lists are replaced as a whole.
func merge(to, from *gpuctlv1.Limits) {
	src, dst := from.ProtoReflect(), to.ProtoReflect()
	fields := src.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if src.Has(f) {
			dst.Clear(f)
			part := &gpuctlv1.Limits{}
			part.ProtoReflect().Set(f, src.Get(f))
			proto.Merge(to, part)
		}
	}
}
