package executor

import (
	"bytes"
	"encoding/binary"
	"regexp"
	"slices"
	"strings"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

type programOrigin int

const (
	programSource programOrigin = iota
	programIL
	programBinary
)

func (s *session) createProgram(id, ctx uint32, from programOrigin, mode uint32, inline []byte, off, n uint64) (outcome, error) {
	c := lookup[clContext](s, ctx)
	if c == nil {
		return done(cl.InvalidContext), nil
	}
	data, err := s.content(mode, inline, off, n)
	if err != nil {
		return outcome{}, err
	}
	p := &program{id: id, ctx: c, devices: c.devices, built: map[uint32]*build{}}
	switch from {
	case programSource:
		p.content = portable.Program{Kind: portable.Source, Source: data}
	case programIL:
		if len(s.limits.IlVersions) == 0 {
			return done(cl.InvalidOperation), nil
		}
		p.content = portable.Program{Kind: portable.IL, IL: data}
	case programBinary:
		x, err := portable.Unmarshal(data)
		if err != nil {
			// This is a binary of a vendor, or a damaged one. The error that the
			// specification names makes the application build from its source.
			s.log.Info("binary refused", "program", id, "err", err)
			return done(cl.InvalidBinary), nil
		}
		p.content = *x
		p.spec, p.loaded = x.SpecConstants, true
		if st := s.laid(x); st != cl.Success {
			return done(st), nil
		}
	}
	if st := s.makeProgram(p); st != cl.Success {
		return done(st), nil
	}
	if from == programBinary {
		for _, d := range p.devices {
			p.built[d.id] = &build{Status: cl.BuildNone, Type: binaryType(p.content.Kind)}
		}
	}
	return done(cl.Success), s.put(id, p)
}

func binaryType(k portable.Kind) uint32 {
	switch k {
	case portable.Object:
		return cl.ProgramBinaryTypeCompiledObject
	case portable.Library:
		return cl.ProgramBinaryTypeLibrary
	case portable.Executable:
		return cl.ProgramBinaryTypeExecutable
	}
	return cl.ProgramBinaryTypeNone
}

// makeProgram creates the vendor's program from portable content: source, IL, or a program
// that was compiled and linked from them.
func (s *session) makeProgram(p *program) cl.Status {
	v, st := p.ctx.vendorProgram(&p.content, p.devices, s.quirk.options)
	if st != cl.Success {
		return st
	}
	p.vendor = v
	p.exact = p.isExact()
	s.out.expect(mayPrint(&p.content))
	return cl.Success
}

// ready sets the constants that the next build takes. Those of the last build are in the content.
func (p *program) ready() cl.Status {
	if len(p.content.IL) == 0 || p.recalled {
		return cl.Success
	}
	return setConstants(p.vendor, p.spec)
}

func setConstants(v cl.Program, cs []portable.SpecConstant) cl.Status {
	for _, c := range cs {
		if st := cl.SetProgramSpecializationConstant(v, c.ID, uint64(len(c.Value)), unsafe.Pointer(unsafe.SliceData(c.Value))); st != cl.Success {
			return st
		}
	}
	return cl.Success
}

func vendorIDs(ds []*device) []cl.Device {
	vs := make([]cl.Device, len(ds))
	for i, d := range ds {
		vs[i] = d.vendor
	}
	return vs
}

// vendorProgram creates the vendor's program from content, in the state of that content: an
// object is compiled, a library or an executable is linked.
func (c *clContext) vendorProgram(x *portable.Program, ds []*device, how optioner) (cl.Program, cl.Status) {
	switch x.Kind {
	case portable.Source:
		return cl.CreateProgramWithSource(c.vendor, x.Source)
	case portable.IL:
		v, st := cl.CreateProgramWithIL(c.vendor, x.IL)
		if st != cl.Success {
			return 0, st
		}
		if st := setConstants(v, x.SpecConstants); st != cl.Success {
			cl.ReleaseProgram(v)
			return 0, st
		}
		return v, st
	case portable.Object:
		v, st := c.vendorProgram(unbuilt(x), ds, how)
		if st != cl.Success {
			return 0, st
		}
		if st := c.vendorCompile(v, x, ds, how); st != cl.Success {
			cl.ReleaseProgram(v)
			return 0, st
		}
		return v, st
	}
	if len(x.Inputs) == 0 { // compiled and linked in one call
		return c.vendorProgram(unbuilt(x), ds, how)
	}
	var in []cl.Program
	defer func() { releasePrograms(in) }()
	for i := range x.Inputs {
		v, st := c.vendorProgram(&x.Inputs[i], ds, how)
		if st != cl.Success {
			return 0, st
		}
		in = append(in, v)
	}
	v, st := c.link(ds, x.LinkOptions, in, how)
	if st != cl.Success && v != 0 { // it has a log, but nobody can read it
		cl.ReleaseProgram(v)
		v = 0
	}
	return v, st
}

// unbuilt returns the content from which x was built or compiled.
func unbuilt(x *portable.Program) *portable.Program {
	if len(x.IL) > 0 {
		return &portable.Program{Kind: portable.IL, IL: x.IL, SpecConstants: x.SpecConstants}
	}
	return &portable.Program{Kind: portable.Source, Source: x.Source}
}

func releasePrograms(vs []cl.Program) {
	for _, v := range vs {
		cl.ReleaseProgram(v)
	}
}

// link links programs. Some runtimes describe arguments only if the linker gets the option
// for that, too; others refuse that option.
func (c *clContext) link(ds []*device, options string, in []cl.Program, how optioner) (cl.Program, cl.Status) {
	v, st := cl.LinkProgram(c.vendor, vendorIDs(ds), how(options), in)
	if how(options) != options && (st == cl.InvalidLinkerOptions || st == cl.InvalidBuildOptions || st == cl.InvalidCompilerOptions) {
		if v != 0 {
			cl.ReleaseProgram(v)
		}
		return cl.LinkProgram(c.vendor, vendorIDs(ds), options, in)
	}
	return v, st
}

func (c *clContext) vendorCompile(v cl.Program, x *portable.Program, ds []*device, how optioner) cl.Status {
	var hs []cl.Program
	var names []string
	defer func() { releasePrograms(hs) }()
	for i := range x.Headers {
		if isFile(x.Headers[i].Name) {
			continue
		}
		h, st := c.vendorProgram(&x.Headers[i].Program, ds, how)
		if st != cl.Success {
			return st
		}
		hs, names = append(hs, h), append(names, x.Headers[i].Name)
	}
	return cl.CompileProgram(v, vendorIDs(ds), how(x.Options), hs, names)
}

func cstring(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// finishBuild reads the result of a build for the devices ds from the vendor, and records
// it. A build for a device also counts for its sub-devices. The program has its new content:
// its options tell what to believe of its text.
func (p *program) finishBuild(ds []*device, options string) {
	for _, d := range p.devices {
		b := &build{Options: options, Status: cl.BuildError}
		if v, st := cl.GetProgramBuildInfo(p.vendor, d.vendor, cl.ProgramBuildStatus); st == cl.Success && len(v) >= 4 {
			b.Status = int32(binary.LittleEndian.Uint32(v))
		}
		if !slices.Contains(ds, d) && b.Status != cl.BuildSuccess {
			continue
		}
		if v, st := cl.GetProgramBuildInfo(p.vendor, d.vendor, cl.ProgramBuildLog); st == cl.Success {
			b.Log = readable(cl.CString(v))
		}
		if v, st := cl.GetProgramBuildInfo(p.vendor, d.vendor, cl.ProgramBinaryType); st == cl.Success && len(v) >= 4 {
			b.Type = cl.Uint32(v)
		}
		if b.Status == cl.BuildSuccess && b.Type == cl.ProgramBinaryTypeNone {
			b.Type = binaryType(p.content.Kind)
		}
		p.built[d.id] = b
	}
	p.exact, p.checked = p.exact && p.isExact(), nil
}

// isExact reports whether the program never writes through kernel arguments that are
// declared const. Its text and the logs of its builds decide that.
func (p *program) isExact() bool {
	for _, b := range p.built {
		if strings.Contains(b.Log, discarded) {
			return false
		}
	}
	return exactConst(&p.content)
}

// builtFor returns the devices for which the program is built.
func (p *program) builtFor() []*device {
	var ds []*device
	for _, d := range p.devices {
		if b := p.built[d.id]; b != nil && b.Status == cl.BuildSuccess {
			ds = append(ds, d)
		}
	}
	return ds
}

func (s *session) programDevices(p *program, ids []uint32) ([]*device, bool) {
	if len(ids) == 0 {
		return p.devices, true
	}
	ds, _, ok := s.vendorDevices(ids)
	if !ok {
		return nil, false
	}
	for _, d := range ds {
		found := false
		for _, x := range p.devices {
			found = found || x == d
		}
		if !found {
			return nil, false
		}
	}
	return ds, true
}

// building runs a build in a goroutine of its own, so that a compiler does not block other
// requests. The application may release the program in the meantime: the build keeps the
// vendor's objects until record was called.
func (s *session) building(c call, p *program, callback uint32, f func() cl.Status, record func(cl.Status) cl.Status) outcome {
	p.building = true
	s.builds.Add(1)
	over := s.unused(p)
	vendor, ctx := p.vendor, p.ctx.vendor
	if vendor != 0 {
		cl.RetainProgram(vendor)
	}
	cl.RetainContext(ctx)
	run := func() cl.Status {
		for _, c := range over {
			<-c
		}
		st := f()
		s.builds.Add(-1)
		s.mu.Lock()
		defer s.mu.Unlock()
		p.building = false
		st = record(st)
		switch {
		case !p.dead:
			s.serial++
			s.serials[p.id] = s.serial
			if st == cl.Success && p.executable() {
				p.told = toldUnknown
				s.describeAside(p)
				s.keep(p, s.serial)
			}
		case p.vendor != vendor && p.vendor != 0: // it was created after the release
			cl.ReleaseProgram(p.vendor)
		}
		if vendor != 0 {
			cl.ReleaseProgram(vendor)
		}
		cl.ReleaseContext(ctx)
		if callback == 0 {
			s.reply(c.slot, st, nil)
		}
		return st
	}
	if callback != 0 {
		s.reply(c.slot, cl.Success, nil)
		s.spawn(func() { s.callback(callback, int32(run()), wire.CbBuild) })
		return held()
	}
	return later(func(func()) { run() })
}

// buildable returns the program and the devices of a build, if the program may be built or
// compiled now.
func (s *session) buildable(id uint32, devices []uint32) (*program, []*device, cl.Status) {
	p := lookup[program](s, id)
	if p == nil {
		return nil, nil, cl.InvalidProgram
	}
	ds, ok := s.programDevices(p, devices)
	switch {
	case !ok:
		return nil, nil, cl.InvalidDevice
	case p.kernels > 0 || p.building:
		return nil, nil, cl.InvalidOperation
	}
	return p, ds, cl.Success
}

func (s *session) build(c call, m *wire.BuildProgram, in inclusion) (outcome, error) {
	p, ds, st := s.buildable(m.Program, m.Devices)
	if st != cl.Success {
		return done(st), nil
	}
	options := cstring(m.Options)
	k := p.content.Kind
	linked := len(p.content.Inputs) > 0
	if linked || k == portable.Object || k == portable.Library {
		if k == portable.Executable { // a linked executable from a container is ready
			return s.building(c, p, m.Callback, func() cl.Status { return cl.Success }, func(st cl.Status) cl.Status {
				p.finishBuild(ds, options)
				return st
			}), nil
		}
		return done(cl.InvalidBinary), nil
	}
	if st := s.original(p); st != cl.Success {
		return done(st), nil
	}
	use := in.options(options)
	if p.loaded {
		use, in.files = again(&p.content, options)
	}
	if st := s.laid(&portable.Program{Headers: in.files, Options: use}); st != cl.Success {
		return done(st), nil
	}
	s.out.expect(mayPrintText([]byte(use)))
	for _, d := range ds {
		p.built[d.id] = &build{Status: cl.BuildInProgress, Options: options}
	}
	v, spec := p.vendor, p.spec
	return s.building(c, p, m.Callback, func() cl.Status {
		return cl.BuildProgram(v, vendorIDs(ds), s.quirk.options(use))
	}, func(st cl.Status) cl.Status {
		if st == cl.Success {
			p.content.Kind, p.content.Options = portable.Executable, use
			p.content.Inputs, p.content.Headers, p.content.SpecConstants = nil, in.files, spec
		}
		p.finishBuild(ds, options)
		return st
	}), nil
}

func (s *session) compile(c call, m *wire.CompileProgram, in inclusion) (outcome, error) {
	p, ds, st := s.buildable(m.Program, m.Devices)
	if st != cl.Success {
		return done(st), nil
	}
	if p.loaded || len(p.content.Inputs) > 0 { // its container has a source, but to the application it is a binary
		return done(cl.InvalidOperation), nil
	}
	if st := s.original(p); st != cl.Success {
		return done(st), nil
	}
	options := cstring(m.Options)
	names := strings.Split(string(m.Names), "\x00")
	use := in.options(options)
	x := portable.Program{Kind: portable.Object, Source: p.content.Source, IL: p.content.IL, Options: use, SpecConstants: p.spec, Headers: in.files}
	if st := s.laid(&x); st != cl.Success {
		return done(st), nil
	}
	var hs []cl.Program
	var hn []string
	for i, id := range m.Headers {
		h := lookup[program](s, id)
		if h == nil || h.vendor == 0 || i >= len(names) {
			releasePrograms(hs)
			return done(cl.InvalidProgram), nil
		}
		if isFile(names[i]) { // a swap would take it for a file of the application's
			releasePrograms(hs)
			return done(cl.InvalidValue), nil
		}
		v, st := h.included()
		if st != cl.Success {
			releasePrograms(hs)
			return done(st), nil
		}
		x.Headers = append(x.Headers, portable.Header{Name: names[i], Program: h.content})
		hs, hn = append(hs, v), append(hn, names[i])
	}
	s.out.expect(mayPrintText([]byte(options)))
	for _, d := range ds {
		p.built[d.id] = &build{Status: cl.BuildInProgress, Options: options}
	}
	v := p.vendor
	return s.building(c, p, m.Callback, func() cl.Status {
		return cl.CompileProgram(v, vendorIDs(ds), s.quirk.options(use), hs, hn)
	}, func(st cl.Status) cl.Status {
		releasePrograms(hs)
		if st == cl.BuildProgramFailure { // some runtimes return this instead
			st = cl.CompileProgramFailure
		}
		if st == cl.Success {
			p.content = x
		}
		p.finishBuild(ds, options)
		return st
	}), nil
}

func (s *session) linkProgram(c call, m *wire.LinkProgram) (outcome, error) {
	ctx := lookup[clContext](s, m.Context)
	if ctx == nil {
		return done(cl.InvalidContext), nil
	}
	p := &program{id: m.ID, ctx: ctx, devices: ctx.devices, built: map[uint32]*build{}}
	if len(m.Devices) > 0 {
		ds, _, ok := s.vendorDevices(m.Devices)
		if !ok {
			return done(cl.InvalidDevice), nil
		}
		p.devices = ds
	}
	options := cstring(m.Options)
	p.content = portable.Program{Kind: portable.Executable, LinkOptions: options}
	if strings.Contains(options, "-create-library") {
		p.content.Kind = portable.Library
	}
	var in []cl.Program
	for _, id := range m.Inputs {
		x := lookup[program](s, id)
		if x == nil {
			releasePrograms(in)
			return done(cl.InvalidProgram), nil
		}
		if !x.linkable() || x.building { // some runtimes would accept it
			releasePrograms(in)
			return done(cl.InvalidOperation), nil
		}
		cl.RetainProgram(x.vendor)
		in = append(in, x.vendor)
		p.content.Inputs = append(p.content.Inputs, x.content)
	}
	if err := s.put(m.ID, p); err != nil {
		releasePrograms(in)
		return outcome{}, err
	}
	p.exact = p.isExact()
	for _, d := range p.devices {
		p.built[d.id] = &build{Status: cl.BuildInProgress, Options: options}
	}
	var v cl.Program
	told := m.Callback != 0 // a callback tells of the end
	return s.building(c, p, m.Callback, func() (st cl.Status) {
		v, st = ctx.link(p.devices, options, in, s.quirk.options)
		return st
	}, func(st cl.Status) cl.Status {
		releasePrograms(in)
		p.vendor = v
		if p.vendor != 0 {
			p.finishBuild(p.devices, options)
			return st
		}
		if st == cl.LinkProgramFailure || told {
			// This vendor returns no program. The application must get one, because it
			// reads the log from it, or has it already.
			p.hollow()
			for _, d := range p.devices {
				p.built[d.id] = &build{Status: cl.BuildError, Options: options, Log: "link failed"}
			}
			return st
		}
		if !p.dead {
			s.objs[p.id] = nil
			p.dead = true
		}
		return st
	}), nil
}

// hollow creates the vendor's program of one whose link has failed: there is nothing in it, and
// nobody can link it again.
func (p *program) hollow() (st cl.Status) {
	p.vendor, st = cl.CreateProgramWithSource(p.ctx.vendor, []byte(" "))
	return st
}

// container returns the portable form of the program that is built for d; nil if there is
// none.
func (p *program) container(d *device) []byte {
	b := p.built[d.id]
	if b == nil || b.Status != cl.BuildSuccess && p.content.Kind == portable.Source {
		return nil
	}
	x := p.content
	x.SpecConstants = p.constants()
	data, err := x.Marshal()
	if err != nil {
		return nil
	}
	return data
}

func (s *session) programInfo(m *wire.ProgramInfo) (outcome, error) {
	p := lookup[program](s, m.Program)
	if p == nil {
		return done(cl.InvalidProgram), nil
	}
	switch m.Param {
	case cl.ProgramBinarySizes:
		var b []byte
		for _, d := range p.devices {
			b = binary.LittleEndian.AppendUint64(b, uint64(len(p.container(d))))
		}
		return answer(b), nil
	case cl.ProgramBinaries:
		var b []byte
		for _, d := range p.devices {
			b = append(b, p.container(d)...)
		}
		return answer(b), nil
	case cl.ProgramIl:
		return answer(append([]byte(nil), p.content.IL...)), nil
	case cl.ProgramNumKernels, cl.ProgramKernelNames:
		if p.vendor == 0 || p.building {
			return done(cl.InvalidProgramExecutable), nil
		}
		b, st := cl.GetProgramInfo(p.vendor, m.Param)
		return outcome{status: st, data: b}, nil
	case cl.ProgramScopeGlobalCtorsPresent, cl.ProgramScopeGlobalDtorsPresent:
		b, st := cl.GetProgramInfo(p.vendor, m.Param)
		if st == cl.InvalidValue {
			b, st = pair(nil, 0, 0)[:4], cl.Success
		}
		return outcome{status: st, data: b}, nil
	}
	return done(cl.InvalidValue), nil
}

func (s *session) buildInfo(m *wire.BuildInfo) (outcome, error) {
	p, d := lookup[program](s, m.Program), lookup[device](s, m.Device)
	if p == nil {
		return done(cl.InvalidProgram), nil
	}
	if d == nil {
		return done(cl.InvalidDevice), nil
	}
	b := p.built[d.id]
	if b == nil {
		b = &build{Status: cl.BuildNone, Type: cl.ProgramBinaryTypeNone}
	}
	switch m.Param {
	case cl.ProgramBuildStatus:
		return answer(binary.LittleEndian.AppendUint32(nil, uint32(b.Status))), nil
	case cl.ProgramBuildOptions:
		return answer(append([]byte(b.Options), 0)), nil
	case cl.ProgramBuildLog:
		return answer(append([]byte(b.Log), 0)), nil
	case cl.ProgramBinaryType:
		return answer(binary.LittleEndian.AppendUint32(nil, b.Type)), nil
	case cl.ProgramBuildGlobalVariableTotalSize:
		v, st := cl.GetProgramBuildInfo(p.vendor, d.vendor, m.Param)
		if st == cl.InvalidValue {
			return answer(u64s(0)), nil
		}
		return outcome{status: st, data: v}, nil
	}
	return done(cl.InvalidValue), nil
}

func (s *session) specConstant(m *wire.SpecConstant) (outcome, error) {
	p := lookup[program](s, m.Program)
	if p == nil {
		return done(cl.InvalidProgram), nil
	}
	if len(p.content.IL) == 0 {
		return done(cl.InvalidProgram), nil
	}
	v := p.vendor
	if p.recalled { // it has no IL in the runtime, and may get more kernels of its build
		var st cl.Status
		if v, st = p.ctx.vendorProgram(unbuilt(&p.content), nil, nil); st != cl.Success {
			return done(st), nil
		}
		defer cl.ReleaseProgram(v)
	}
	x := portable.SpecConstant{ID: m.Spec, Value: append([]byte(nil), m.Value...)}
	st := setConstants(v, []portable.SpecConstant{x})
	if st == cl.Success { // builds have the list as it was
		p.spec = append(slices.DeleteFunc(slices.Clone(p.spec), func(y portable.SpecConstant) bool { return y.ID == x.ID }), x)
	}
	return done(st), nil
}

// constants returns those of the program's build, or, of one that is not built, of its next build.
func (p *program) constants() []portable.SpecConstant {
	if p.content.Kind == portable.IL {
		return p.spec
	}
	return p.content.SpecConstants
}

// castsAway matches text that could remove const from a pointer to global memory: a cast to
// a pointer type that names the address space, types that hide it, and unions. A macro that
// names the address space may be a part of a cast. Pragmas and system headers silence the
// warning of the compiler that isExact looks for.
var castsAway = regexp.MustCompile(strings.Join([]string{
	`\(\s*(?:volatile\s+|restrict\s+|unsigned\s+|struct\s+)*_{0,2}(?:global|generic)\b[^()]*\*`,
	`\(\s*\w+(?:\s+\w+){0,3}\s+_{0,2}global(?:\s+(?:const|volatile|restrict))*\s*\*`,
	`typedef[^;]*\*`, `\bunion\b`, `typeof`, `astype`, `opencl_g`, `address_space`,
	`#\s*include`, `#\s*define(?:\\\r?\n|.)*\b_{0,2}(?:global|generic)\b`, `_Pragma`, `#\s*pragma.*\b(?:diagnostic|system_header)\b`,
	`\(\s*u?intptr_t\s*\)`, `\(\s*u?(?:long|size_t)\s*\)\s*\(?\s*[A-Za-z_]`, `atomic_`, `##`,
}, "|"))

// toPointer matches a cast to a pointer type. Where the generic address space exists, as it may unless
// the options ask for OpenCL C 1, its name need not be in the cast.
var toPointer = regexp.MustCompile(`\(\s*(?:\w+\s+)*\w+\s*\*[\s*]*\)`)

// exactConst reports whether a const on a kernel's pointer argument can be trusted, so that
// a launch does not mark that buffer as written. C allows a cast that removes const. In
// doubt, the answer is no. Nobody has the log of the compiler for the inputs of a linked
// program any more.
func exactConst(x *portable.Program) bool {
	if x.Kind == portable.IL || len(x.IL) > 0 || len(x.Inputs) > 0 {
		return false
	}
	for _, o := range strings.Fields(x.Options) {
		if o == "-w" || strings.HasPrefix(o, "-Wno") || strings.Contains(o, "*") || strings.Contains(o, "global") || strings.Contains(o, "CLC++") {
			return false
		}
	}
	if castsAway.Match(x.Source) {
		return false
	}
	if !strings.Contains(x.Options, "-cl-std=CL1") {
		for _, to := range toPointer.FindAll(x.Source, -1) {
			if !bytes.Contains(to, []byte("const")) {
				return false
			}
		}
	}
	for i := range x.Headers {
		if !exactConst(&x.Headers[i].Program) {
			return false
		}
	}
	return true
}

// executable reports whether kernels can be created from the program.
func (p *program) executable() bool {
	for _, b := range p.built {
		if b.Status == cl.BuildSuccess && b.Type == cl.ProgramBinaryTypeExecutable {
			return true
		}
	}
	return false
}

// linkable reports whether the program is compiled for a device, or is a library.
func (p *program) linkable() bool {
	for _, b := range p.built {
		if b.Type == cl.ProgramBinaryTypeCompiledObject || b.Type == cl.ProgramBinaryTypeLibrary {
			return true
		}
	}
	return false
}
