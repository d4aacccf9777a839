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
	// argInfoOption makes the vendor keep the description of kernel arguments.
	argInfoOption = "-cl-kernel-arg-info"
	// noOptimizing makes a build faster. It is for builds that are never run.
	noOptimizing = "-cl-opt-disable"
)

var (
	errArgInfo = errors.New("the runtime does not describe the kernel's arguments")
	errDiffers = errors.New("the kernel that runs and its description differ")
)

// argument is what a compiler reports about an argument of a kernel.
type argument struct {
	Space, Access uint32
	Qual          uint64
	Type, Name    string
}

// signature has the arguments of a program's kernels, by kernel name.
type signature map[string][]argument

// info returns what the argument means to the executor.
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

// argumentCount returns how many arguments a kernel has.
func argumentCount(k cl.Kernel) (uint32, error) {
	b, st := cl.GetKernelInfo(k, cl.KernelNumArgs)
	if st != cl.Success || len(b) < 4 {
		return 0, fmt.Errorf("number of arguments: %w", st)
	}
	return cl.Uint32(b), nil
}

// argumentsOf returns a kernel's arguments. If the runtime does not describe them, the
// error is errArgInfo.
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

// signatureOf returns the arguments of the kernels of a built program.
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

// check compares the description with the kernel that runs. They come from two builds, and
// sources can include files that change in between. A number from the application must never
// be used as the vendor's pointer. So each argument that is described as a number is set to
// NULL: a runtime permits that for a pointer, and not for a number.
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

// description is the result of a build that is never run. It describes the kernels of a
// program. The build that runs has exactly the application's options, because options
// change code.
type description struct {
	done chan struct{} // closed when the other fields are set
	sig  signature
	err  error
	sure bool // it was kept together with the build that runs
}

func (d *description) find(w *describer) {
	d.sig, d.err = w.run()
	close(d.done)
}

// describer makes a description, without the session's lock.
type describer struct {
	ctx     *clContext
	vendor  cl.Program // the build that runs
	content portable.Program
	devices []*device
}

// describer takes what it needs from the program, which may be released in the meantime.
// The caller holds s.mu. run and release let go of what it has taken.
func (p *program) describer() *describer {
	cl.RetainProgram(p.vendor)
	cl.RetainContext(p.ctx.vendor)
	return &describer{ctx: p.ctx, vendor: p.vendor, content: p.content, devices: p.builtFor()}
}

func (d *describer) release() {
	cl.ReleaseProgram(d.vendor)
	cl.ReleaseContext(d.ctx.vendor)
}

// run asks the program itself for its arguments. If that does not describe them, run builds
// it once more.
func (d *describer) run() (signature, error) {
	defer d.release()
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

// withoutArguments lists the kernels without arguments.
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

// variants returns the forms of the program's source that are built to describe it, in the
// order in which they are tried. NVIDIA's compiler (driver 580) cannot describe a program
// with a kernel that has no arguments, so such a kernel gets one.
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

// prefixed returns a program with lines before each of its sources.
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

// build builds a program that describes its arguments.
func (d *describer) build(x *portable.Program) (cl.Program, error) {
	how := describing
	for {
		v, st := d.ctx.vendorProgram(x, d.devices, how)
		if st == cl.Success && len(x.Inputs) == 0 {
			if st = cl.BuildProgram(v, vendorIDs(d.devices), how(x.Options)); st != cl.Success {
				cl.ReleaseProgram(v)
			}
		}
		if st == cl.Success {
			return v, nil
		}
		if how("") == argInfoOption {
			return 0, fmt.Errorf("build to describe the arguments: %w", st)
		}
		how = describingOptimized // some programs cannot be built without the optimizer
	}
}

// arguments returns the arguments of a kernel of the program: as the kernel describes them
// itself, or else from another build, if the kernel does not contradict it. It may wait for
// a long time.
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

// ready reports whether arguments returns at once.
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

// describeAside finds the program's signature in another goroutine. The caller holds s.mu.
func (s *session) describeAside(p *program) {
	d := &description{done: make(chan struct{})}
	p.desc = d
	w := p.describer()
	go d.find(w)
}

// optioner returns the options of a build.
type optioner func(options string) string

// options returns those of builds that run: the application's own.
func (q quirk) options(o string) string {
	if q.sameCode {
		return describingOptimized(o)
	}
	return o
}

// asksToTell reports whether the application has requested descriptions of its kernels'
// arguments.
func asksToTell(x *portable.Program) bool {
	return strings.Contains(x.Options, argInfoOption) || strings.Contains(x.LinkOptions, argInfoOption) ||
		slices.ContainsFunc(x.Inputs, func(in portable.Program) bool { return asksToTell(&in) })
}

// describing adds the options of a build that only describes.
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
