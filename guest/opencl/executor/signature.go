package executor

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

const (
	// argInfoOption makes the vendor tell what the arguments of a kernel are.
	argInfoOption = "-cl-kernel-arg-info"
	// noOptimizing makes a build that is never run cheaper.
	noOptimizing = "-cl-opt-disable"
)

var (
	errArgInfo = errors.New("the runtime does not describe the kernel's arguments")
	errDiffers = errors.New("the kernel that runs and its description differ")
)

// argument is what a compiler says of an argument of a kernel.
type argument struct {
	Space, Access uint32
	Qual          uint64
	Type, Name    string
}

// signature has the arguments of a program's kernels by the kernels' names.
type signature map[string][]argument

// info is what the argument means to the executor.
func (a *argument) info() argInfo {
	var in argInfo
	switch {
	case strings.HasPrefix(a.Type, "image") && strings.HasSuffix(a.Type, "_t") && !strings.Contains(a.Type, "*"):
		in.kind = wire.ArgImage
		switch a.Access {
		case cl.KernelArgAccessReadOnly:
			in.flags |= argReadOnly
		case cl.KernelArgAccessWriteOnly:
			in.flags |= argWriteOnly
		case cl.KernelArgAccessNone:
			in.flags |= argReadOnly // read_only is the default
		}
	case a.Type == "sampler_t":
		in.kind = wire.ArgSampler
	case a.Qual&cl.KernelArgTypePipe != 0 || strings.HasPrefix(a.Type, "pipe"), a.Type == "queue_t":
		in.kind = wire.ArgOther
	case a.Space == cl.KernelArgAddressGlobal:
		in.kind = wire.ArgMem
		if a.Qual&cl.KernelArgTypeConst != 0 {
			in.flags |= argConst
		}
	case a.Space == cl.KernelArgAddressConstant:
		in.kind = wire.ArgMem
		in.flags |= argConst | argConstSpace
	case a.Space == cl.KernelArgAddressLocal:
		in.kind = wire.ArgLocal
	default:
		in.kind = wire.ArgPlain
	}
	return in
}

// argumentCount asks a kernel how many arguments it has.
func argumentCount(k cl.Kernel) (uint32, error) {
	b, st := cl.GetKernelInfo(k, cl.KernelNumArgs)
	if st != cl.Success || len(b) < 4 {
		return 0, fmt.Errorf("number of arguments: %w", st)
	}
	return cl.Uint32(b), nil
}

// argumentsOf asks a kernel for its arguments. Where the runtime does not
// describe them, the error is errArgInfo.
func argumentsOf(k cl.Kernel) ([]argument, error) {
	n, err := argumentCount(k)
	if err != nil {
		return nil, err
	}
	as := make([]argument, n)
	for i := range as {
		a := &as[i]
		get := func(param uint32) []byte {
			b, st := cl.GetKernelArgInfo(k, uint32(i), param)
			if st != cl.Success {
				return nil
			}
			return b
		}
		space := get(cl.KernelArgAddressQualifier)
		if len(space) < 4 {
			return nil, fmt.Errorf("argument %d: %w", i, errArgInfo)
		}
		a.Space = cl.Uint32(space)
		a.Access = cl.Uint32(get(cl.KernelArgAccessQualifier))
		a.Qual = cl.Uint64(get(cl.KernelArgTypeQualifier))
		a.Type, a.Name = cl.CString(get(cl.KernelArgTypeName)), cl.CString(get(cl.KernelArgName))
	}
	return as, nil
}

// kernelNames lists the kernels of a built program.
func kernelNames(v cl.Program) []string {
	b, st := cl.GetProgramInfo(v, cl.ProgramKernelNames)
	if st != cl.Success {
		return nil
	}
	return strings.FieldsFunc(cl.CString(b), func(r rune) bool { return r == ';' })
}

// signatureOf asks a built program for the arguments of its kernels.
func signatureOf(v cl.Program) (signature, error) {
	sig := signature{}
	for _, name := range kernelNames(v) {
		k, st := cl.CreateKernel(v, name)
		if st != cl.Success {
			return nil, fmt.Errorf("kernel %s: %w", name, st)
		}
		as, err := argumentsOf(k)
		cl.ReleaseKernel(k)
		if err != nil {
			return nil, fmt.Errorf("kernel %s: %w", name, err)
		}
		sig[name] = as
	}
	return sig, nil
}

// check compares what the description says with the kernel that runs. They come
// from two builds, and sources can include files that change in between: bytes
// must not pass for the vendor's pointer. A pointer may be set to NULL, a
// number may not.
func (d *description) check(k cl.Kernel, as []argument) error {
	n, err := argumentCount(k)
	if err != nil {
		return err
	}
	if int(n) != len(as) {
		return fmt.Errorf("%d arguments, not %d: %w", n, len(as), errDiffers)
	}
	if d.sure {
		return nil
	}
	for i := range as {
		if as[i].info().kind == wire.ArgPlain && cl.SetKernelArg(k, uint32(i), 8, nil) == cl.Success {
			return fmt.Errorf("argument %d is a pointer: %w", i, errDiffers)
		}
	}
	return nil
}

// description is the outcome of a build that is never run, made to describe
// the kernels of a program. Options change code, and applications get the code
// that their own options make.
type description struct {
	done chan struct{} // closed when the rest is set
	sig  signature
	err  error
	sure bool // it was kept with the very code that runs
}

func (d *description) find(w *describer) {
	d.sig, d.err = w.run()
	close(d.done)
}

// describer does the work of a description, without the session's lock.
type describer struct {
	ctx     *clContext
	vendor  cl.Program // the build that runs
	content portable.Program
	devices []*device
}

// describer takes what it needs from the program, which may be released
// meanwhile. The caller holds s.mu; run lets go of the rest.
func (p *program) describer() *describer {
	cl.RetainProgram(p.vendor)
	cl.RetainContext(p.ctx.vendor)
	x := p.content
	x.SpecConstants = append([]portable.SpecConstant(nil), p.spec...)
	return &describer{ctx: p.ctx, vendor: p.vendor, content: x, devices: p.builtFor()}
}

// run asks the program itself, and where it does not tell, another build of it.
func (d *describer) run() (signature, error) {
	defer func() {
		cl.ReleaseProgram(d.vendor)
		cl.ReleaseContext(d.ctx.vendor)
	}()
	sig, err := signatureOf(d.vendor)
	if !errors.Is(err, errArgInfo) {
		return sig, err
	}
	none := withoutArguments(d.vendor)
	var v cl.Program
	for _, x := range d.variants(none) {
		if v, err = d.build(x); err == nil {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	defer cl.ReleaseProgram(v)
	if sig, err = signatureOf(v); err != nil {
		return nil, err
	}
	for _, name := range none {
		sig[name] = nil
	}
	return sig, nil
}

// withoutArguments lists the kernels that have none.
func withoutArguments(v cl.Program) []string {
	var names []string
	for _, name := range kernelNames(v) {
		k, st := cl.CreateKernel(v, name)
		if st != cl.Success {
			continue
		}
		if n, err := argumentCount(k); err == nil && n == 0 {
			names = append(names, name)
		}
		cl.ReleaseKernel(k)
	}
	return names
}

// variants are texts that describe the program, to be tried in turn. NVIDIA's
// compiler (driver 580) can't describe a program with a kernel that has no
// arguments, so those get one.
func (d *describer) variants(none []string) []*portable.Program {
	vs := []*portable.Program{&d.content}
	if len(none) > 0 {
		var define strings.Builder
		for _, name := range none {
			fmt.Fprintf(&define, "#define %s(gpuctl_none) %s(int gpuctl_one)\n", name, name)
		}
		x := prefixed(&d.content, define.String())
		vs = []*portable.Program{&x, &d.content}
	}
	return vs
}

// prefixed is a program with lines before each of its sources.
func prefixed(x *portable.Program, lines string) portable.Program {
	y := *x
	if len(x.Source) > 0 {
		y.Source = append([]byte(lines), x.Source...)
	}
	y.Inputs = nil
	for i := range x.Inputs {
		y.Inputs = append(y.Inputs, prefixed(&x.Inputs[i], lines))
	}
	return y
}

// build makes a program that describes itself.
func (d *describer) build(x *portable.Program) (cl.Program, error) {
	how := describing
	for {
		v, st := d.ctx.vendorProgram(x, d.devices, how)
		if st == cl.Success && len(x.Inputs) == 0 {
			if st = setConstants(v, x.SpecConstants); st == cl.Success {
				st = cl.BuildProgram(v, vendorIDs(d.devices), how(x.Options))
			}
			if st != cl.Success {
				cl.ReleaseProgram(v)
			}
		}
		if st == cl.Success {
			return v, nil
		}
		if how("") == argInfoOption {
			return 0, fmt.Errorf("build to describe the arguments: %w", st)
		}
		how = describingOptimized // some programs need the optimizer
	}
}

// arguments are those of a kernel of the program: as the kernel itself tells,
// or else as another build told and this kernel does not deny. They may be long
// in coming.
func (d *description) arguments(k cl.Kernel, name string) ([]argument, error) {
	if d == nil || !d.sure {
		if as, err := argumentsOf(k); !errors.Is(err, errArgInfo) || d == nil {
			return as, err
		}
	}
	<-d.done
	if d.err != nil {
		return nil, d.err
	}
	as, ok := d.sig[name]
	if !ok {
		return nil, fmt.Errorf("kernel %s is not described: %w", name, errDiffers)
	}
	return as, d.check(k, as)
}

// ready reports whether arguments answers at once.
func (d *description) ready() bool {
	if d == nil {
		return true
	}
	select {
	case <-d.done:
		return true
	default:
		return false
	}
}

// describeAside finds the program's signature while the application goes on.
// The caller holds s.mu.
func (s *session) describeAside(p *program) {
	d := &description{done: make(chan struct{})}
	p.desc = d
	w := p.describer()
	go d.find(w)
}

// optioner gives the options of a build.
type optioner func(options string) string

// options are those of builds that run: the application's own.
func (q quirk) options(o string) string {
	if q.sameCode {
		return describingOptimized(o)
	}
	return o
}

// asksToTell reports whether the application has asked for its kernels' arguments
// to be described.
func asksToTell(x *portable.Program) bool {
	return strings.Contains(x.Options, argInfoOption) || strings.Contains(x.LinkOptions, argInfoOption) ||
		slices.ContainsFunc(x.Inputs, func(in portable.Program) bool { return asksToTell(&in) })
}

// describing adds to them what a build that only describes needs.
func describing(o string) string {
	o = describingOptimized(o)
	if !strings.Contains(o, noOptimizing) {
		o += " " + noOptimizing
	}
	return o
}

func describingOptimized(o string) string {
	if strings.Contains(o, argInfoOption) {
		return o
	}
	return strings.TrimSpace(o + " " + argInfoOption)
}
