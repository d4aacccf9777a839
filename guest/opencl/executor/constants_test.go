package executor

import (
	"encoding/binary"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// withIL builds the runtime of testdata/il.c, and returns its path.
func withIL(t testing.TB) string {
	t.Helper()
	lib := filepath.Join(t.TempDir(), "il.so")
	out, err := exec.Command("cc", "-O1", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-o", lib, filepath.Join("testdata", "il.c"), "-ldl", "-lpthread").CombinedOutput()
	if err != nil {
		t.Fatalf("build the runtime: %v\n%s", err, out)
	}
	return lib
}

const constantKernel = "#ifndef CONSTANT1\n#define CONSTANT1 7\n#endif\nkernel void f(global uint *a) { a[get_global_id(0)] = CONSTANT1; }"

func (c *client) programIL(ctx uint32, text string) uint32 {
	p := c.id()
	c.call(&wire.CreateProgramIL{ID: p, Context: ctx, Mode: wire.DataInline, IL: []byte(text)})
	return p
}

func (c *client) constant(p, value uint32) {
	c.t.Helper()
	c.call(&wire.SpecConstant{Program: p, Spec: 1, Value: binary.LittleEndian.AppendUint32(nil, value)})
}

// ran returns what a new kernel of a program writes.
func (c *client) ran(ctx, q, p uint32) uint32 {
	c.t.Helper()
	k := c.id()
	c.call(&wire.CreateKernel{ID: k, Program: p, Name: []byte("f")})
	defer c.call(&wire.Release{ID: k})
	return c.writes(ctx, q, k)
}

// writes returns what a kernel writes.
func (c *client) writes(ctx, q, k uint32) uint32 {
	c.t.Helper()
	b := c.buffer(ctx, 64)
	c.post(&wire.SetArg{Kernel: k, Index: 0, Kind: wire.ArgMem, Object: b, Size: 8})
	c.post(&wire.Ndrange{Queue: q, Kernel: k, Dims: 1, Glob0: 16})
	v := c.read(q, b, 64)[3]
	c.post(&wire.Release{ID: b})
	return v
}

// A constant that was set after a build is for the next one. What runs after a swap is what ran before,
// whether it is built again there or loaded.
func TestKernelsKeepTheConstantsOfTheirBuild(t *testing.T) {
	for _, name := range []string{"built again", "loaded"} {
		t.Run(name, func(t *testing.T) {
			c, library, dir := newClient(t), withIL(t), t.TempDir()
			s := c.executorOf(1, library)
			s.activate()
			ctx, q, _ := c.setup(0)
			p, k := c.programIL(ctx, constantKernel), c.id()
			c.constant(p, 11)
			c.call(&wire.BuildProgram{Program: p})
			c.call(&wire.CreateKernel{ID: k, Program: p, Name: []byte("f")})
			c.constant(p, 22)
			for gen := range uint32(2) {
				to := c.executorOf(2+gen, library)
				if name == "loaded" {
					to.cache, to.quirk.dearBinaries = newProgramCache(dir, []byte("key")), false
				}
				c.swap(s, to)
				s = to
			}
			if got := c.writes(ctx, q, k); got != 11 {
				t.Errorf("the kernel writes %d after a swap, and was built with 11", got)
			}
			c.constant(p, 33)
			if got := c.ran(ctx, q, p); got != 11 {
				t.Errorf("a new kernel writes %d, and the program was built with 11", got)
			}
			x, err := portable.Unmarshal(c.call(&wire.ProgramInfo{Program: p, Param: cl.ProgramBinaries}))
			if err != nil || len(x.SpecConstants) != 1 || x.SpecConstants[0].Value[0] != 11 {
				t.Errorf("the program's binary has the constants %v: %v", x, err)
			}
			c.call(&wire.Release{ID: k})
			c.call(&wire.BuildProgram{Program: p})
			if got := c.ran(ctx, q, p); got != 33 {
				t.Errorf("built again, the program writes %d, not 33", got)
			}
		})
	}
}

// A constant that is set while a swap is prepared goes along, too.
func TestConstantSetWhileASwapIsPreparedGoesAlong(t *testing.T) {
	c, library := newClient(t), withIL(t)
	s := c.executorOf(1, library)
	s.activate()
	ctx, q, _ := c.setup(0)
	p := c.programIL(ctx, constantKernel)
	s.mu.Lock()
	g := s.graph(false)
	s.mu.Unlock()
	to := c.prepared(2, library, g)
	c.constant(p, 11)
	c.swap(s, to)
	c.call(&wire.BuildProgram{Program: p})
	if got := c.ran(ctx, q, p); got != 11 {
		t.Errorf("the program writes %d, with a constant of 11", got)
	}
}

// What was linked was compiled with constants.
func TestLinkedProgramsKeepTheConstantsOfTheirInputs(t *testing.T) {
	c, library := newClient(t), withIL(t)
	s := c.executorOf(1, library)
	s.activate()
	ctx, q, _ := c.setup(0)
	object, p := c.programIL(ctx, constantKernel), c.id()
	c.constant(object, 11)
	c.call(&wire.CompileProgram{Program: object})
	c.call(&wire.LinkProgram{ID: p, Context: ctx, Inputs: []uint32{object}})
	to := c.executorOf(2, library)
	c.swap(s, to)
	if got := c.ran(ctx, q, p); got != 11 {
		t.Errorf("the linked program writes %d after a swap, with a constant of 11", got)
	}
	again := c.id()
	c.call(&wire.LinkProgram{ID: again, Context: ctx, Inputs: []uint32{object}})
	if got := c.ran(ctx, q, again); got != 11 {
		t.Errorf("linked again, it writes %d, with a constant of 11", got)
	}
}
