package executor

import (
	"strings"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/internal/random"
)

// discarded is what compilers say when const is lost without a cast.
const discarded = "discards qualifiers"

// check is a look at a program by its compiler.
type check struct {
	done  chan struct{} // closed when clean is set
	clean bool          // it warns of nothing
}

func (c *check) passed() bool {
	if c == nil {
		return false
	}
	select {
	case <-c.done:
		return c.clean
	default:
		return false
	}
}

// believes reports whether a launch leaves out what its kernel declares const when it marks what
// may be written. The caller holds s.mu.
func (s *session) believes(p *program) bool {
	return p.exact && (s.quirk.warns || p.checked.passed())
}

// checkConst asks the compiler about programs whose const could be believed, where logs of builds
// do not have all warnings: NVIDIA's driver says nothing of a program that it has in its cache. It
// is called when a session is about to be moved, and waits for nothing. What const says does not
// matter before: the first copy is of everything. The caller holds s.mu.
func (s *session) checkConst() {
	if s.quirk.warns || s.frozen {
		return
	}
	ask := func(o any) {
		p, ok := o.(*program)
		if !ok || !p.exact || p.building || p.checked != nil || p.vendor == 0 || !p.executable() {
			return
		}
		c, d := &check{done: make(chan struct{})}, p.describer()
		p.checked = c
		go func() {
			defer d.release()
			defer close(c.done)
			c.clean = d.clean()
		}()
	}
	s.each(func(_ uint32, _ uint64, o any) { ask(o) })
	for _, o := range s.ghosts { // released, and their kernels go on
		ask(o)
	}
}

// clean compiles the program anew and reports whether the compiler warns of no const that is lost.
// After that it must warn of one that is lost for certain, with the same options: NVIDIA's compiler
// warns of nothing any more once a program was built with -w in the process.
func (d *describer) clean() bool {
	log, ok := d.warnings(&d.content)
	if !ok || strings.Contains(log, discarded) {
		return false
	}
	log, _ = d.warnings(&portable.Program{
		Source:  []byte("kernel void gpuctl_lost(const global uint *a) { global uint *b = a; b[0] = 7; }\n"),
		Options: d.content.Options,
	})
	return strings.Contains(log, discarded)
}

// warnings compiles a source that no cache has, and returns the log.
func (d *describer) warnings(x *portable.Program) (log string, ok bool) {
	y := prefixed(x, "#define gpuctl_"+random.Hex(16)+"\n")
	v, st := cl.CreateProgramWithSource(d.ctx.vendor, y.Source)
	if st != cl.Success {
		return "", false
	}
	defer cl.ReleaseProgram(v)
	if d.ctx.vendorCompile(v, &y, d.devices, func(o string) string { return o }) != cl.Success {
		return "", false
	}
	for _, dev := range d.devices {
		b, st := cl.GetProgramBuildInfo(v, dev.vendor, cl.ProgramBuildLog)
		if st != cl.Success {
			return "", false
		}
		log += cl.CString(b)
	}
	return log, true
}
