package executor

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// oclgrind is the path of Oclgrind's library in its Debian package.
const oclgrind = "/usr/lib/oclgrind/liboclgrind-rt-icd.so"

const addSource = "kernel void add(global uint *a, uint n) { a[get_global_id(0)] += n; }"

// program creates a program that is not built yet.
func (c *client) program(ctx uint32, source string) uint32 {
	p := c.id()
	c.call(&wire.CreateProgramSource{ID: p, Context: ctx, Mode: wire.DataInline, Source: []byte(source)})
	return p
}

// inside calls f with one of the session's objects, and with the session's lock locked.
func inside[T any](s *session, id uint32, f func(*T)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(lookup[T](s, id))
}

// The kernel that runs is built with the application's options and no others. The executor
// can still describe its arguments.
func TestProgramsAreBuiltWithTheApplicationsOptionsAlone(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.quirk.sameCode = false
	s.activate()
	_, _, k := c.setup(0)
	inside(s, k, func(k *kernel) {
		b, st := cl.GetProgramBuildInfo(k.prog.vendor, s.devices[0].vendor, cl.ProgramBuildOptions)
		if st != cl.Success || cl.CString(b) != "" {
			t.Errorf("built with %q (%v)", cl.CString(b), st)
		}
		if _, st := cl.GetKernelArgInfo(k.vendor, 0, cl.KernelArgTypeName); st != cl.KernelArgInfoNotAvailable {
			t.Errorf("the kernel that runs describes its arguments: %v", st)
		}
		if k.info[0].kind != wire.ArgMem || k.info[1].kind != wire.ArgPlain {
			t.Errorf("kinds %v", k.info)
		}
	})
	if st, _ := c.answer(c.start(&wire.KernelArgInfo{Kernel: k, Param: cl.KernelArgName})); st != cl.KernelArgInfoNotAvailable {
		t.Errorf("argument info without the option: %v", st)
	}
}

// NVIDIA's compiler cannot describe a program that has a kernel without arguments. The
// executor can still describe the other kernels of such a program.
func TestProgramsWithKernelsWithoutArgumentsAreDescribed(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.quirk.sameCode = false
	s.activate()
	ctx, q, _ := c.setup(0)
	p := c.program(ctx, "kernel void g() {}\nkernel void h ( void ) {}\nkernel void f(global uint *a, ulong n) { a[0] = (uint)n; }")
	c.call(&wire.BuildProgram{Program: p})
	inside(s, p, func(p *program) {
		<-p.desc.done
		if p.desc.err != nil {
			t.Fatal(p.desc.err)
		}
		none := withoutArguments(p.vendor)
		slices.Sort(none)
		if !slices.Equal(none, []string{"g", "h"}) {
			t.Errorf("without arguments: %q", none)
		}
		// The variant that is tried first can be compiled.
		d := p.describer()
		v, err := d.build(d.variants(none)[0])
		if err != nil {
			t.Fatal(err)
		}
		defer cl.ReleaseProgram(v)
		if left := withoutArguments(v); len(left) > 0 {
			t.Errorf("described without arguments: %q", left)
		}
	})
	for name, n := range map[string]int{"f": 2, "g": 0, "h": 0} {
		k := c.id()
		if b := c.call(&wire.CreateKernel{ID: k, Program: p, Name: []byte(name)}); int(cl.Uint32(b)) != n {
			t.Errorf("kernel %s has %d arguments, not %d", name, cl.Uint32(b), n)
		}
		if n == 0 {
			c.call(&wire.Ndrange{Queue: q, Kernel: k, Dims: 1, Glob0: 1})
		}
	}
	c.call(&wire.Finish{Queue: q})
}

// What an application reads about a kernel's arguments does not change in a swap.
func TestArgumentInfoStaysAsItWasOverASwap(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, _, quiet := c.setup(0)
	p, told := c.program(ctx, addSource), c.id()
	c.call(&wire.BuildProgram{Program: p, Options: []byte("-cl-kernel-arg-info")})
	c.call(&wire.CreateKernel{ID: told, Program: p, Name: []byte("add")})
	ask := func() {
		t.Helper()
		if st, _ := c.answer(c.start(&wire.KernelArgInfo{Kernel: quiet, Param: cl.KernelArgName})); st != cl.KernelArgInfoNotAvailable {
			t.Error(st)
		}
		if b := c.call(&wire.KernelArgInfo{Kernel: told, Index: 1, Param: cl.KernelArgName}); cl.CString(b) != "n" {
			t.Errorf("argument 1 is named %q", b)
		}
	}
	ask()
	for gen := uint32(2); gen < 4; gen++ { // with and without a runtime that needs no second build to describe arguments
		to := c.executor(gen)
		to.quirk.sameCode = gen%2 == 0
		c.swap(s, to)
		ask()
		s = to
	}
}

// If a description had a number where the kernel that runs has a pointer, the application
// could pass any bytes as the vendor's handle. Such a description is refused.
func TestDescriptionThatHidesAPointerIsRefused(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.quirk.sameCode = false
	s.activate()
	ctx, _, _ := c.setup(0)
	p := c.program(ctx, "kernel void f(global uint *a, ulong b, local int *l) { a[0] = (uint)b + l[0]; }")
	c.call(&wire.BuildProgram{Program: p})
	inside(s, p, func(p *program) {
		<-p.desc.done
		honest := p.desc.sig["f"]
		k, st := cl.CreateKernel(p.vendor, "f")
		if st != cl.Success {
			t.Fatal(st)
		}
		defer cl.ReleaseKernel(k)
		if err := p.desc.check(k, honest); err != nil {
			t.Errorf("the honest description: %v", err)
		}
		if err := p.desc.check(k, honest[:2]); err == nil {
			t.Error("a description of too few arguments passes")
		}
		lie := append([]argument(nil), honest...)
		lie[0] = lie[1]
		p.desc = &description{done: p.desc.done, sig: signature{"f": lie}}
	})
	if st, _ := c.answer(c.start(&wire.CreateKernel{ID: c.id(), Program: p, Name: []byte("f")})); st != cl.InvalidKernelDefinition {
		t.Errorf("a kernel whose description differs: %v", st)
	}
}

// A graph comes from another executor, and the application may have taken control of that.
// The graph cannot change an argument that is a memory object here into a number.
func TestGraphCannotPassANumberForAMemoryObject(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, k := c.setup(0)
	b := c.buffer(ctx, 4096)
	c.launch(q, k, b, 1, 16, 0)
	c.call(&wire.Finish{Queue: q})
	s.mu.Lock()
	g := s.graph(false)
	s.mu.Unlock()
	g.Kernels[0].Args[0] = gArg{Set: true, Kind: wire.ArgPlain, Size: 8, Value: make([]byte, 8)}
	to := c.executor(2)
	to.mu.Lock()
	defer to.mu.Unlock()
	if err := to.restore(g, noProgress); err == nil {
		t.Error("the target took it")
	}
}

// An application without kernels may build its program again. Neither the description of the
// former build nor the storing of that build may prevent this.
func TestProgramIsBuiltAgainWhileItIsDescribedAndKept(t *testing.T) {
	dir := t.TempDir()
	c := newClient(t)
	s := c.cached(1, dir, "here")
	s.activate()
	ctx, q, _ := c.setup(0)
	p := c.program(ctx, "kernel void f(global uint *a, ulong n) { a[get_global_id(0)] = N + (uint)n; }\nkernel void g(global uint *a) { }")
	for i := range 8 {
		s.mu.Lock()
		s.quirk.sameCode = i%2 == 0
		s.built = time.Time{} // so that the build is kept at once
		s.mu.Unlock()
		if st, _ := c.answer(c.start(&wire.BuildProgram{Program: p, Options: fmt.Appendf(nil, "-DN=%d", i%3)})); st != cl.Success {
			t.Fatalf("build %d: %v", i, st)
		}
	}
	// A description that takes long has kernels of the program until it ends.
	var k0 cl.Kernel
	d := &description{done: make(chan struct{})}
	inside(s, p, func(p *program) {
		<-p.desc.done
		var st cl.Status
		if k0, st = cl.CreateKernel(p.vendor, "f"); st != cl.Success {
			t.Fatal(st)
		}
		p.desc = d
	})
	again := c.start(&wire.BuildProgram{Program: p, Options: []byte("-DN=1")})
	for range 100 {
		c.call(&wire.Finish{Queue: q})
	}
	cl.ReleaseKernel(k0)
	close(d.done)
	if st, _ := c.answer(again); st != cl.Success {
		t.Fatalf("build while a description has kernels: %v", st)
	}
	settled(t, s)
	// The build that is kept is the last one.
	to := c.cached(2, dir, "here")
	c.swap(s, to)
	if !recalled(to, p) {
		t.Error("built again")
	}
	k, b := c.id(), c.buffer(ctx, 64)
	c.call(&wire.CreateKernel{ID: k, Program: p, Name: []byte("f")})
	c.post(&wire.SetArg{Kernel: k, Index: 0, Kind: wire.ArgMem, Object: b, Size: 8})
	c.post(&wire.SetArg{Kernel: k, Index: 1, Kind: wire.ArgPlain, Size: 8, Value: make([]byte, 8)})
	c.post(&wire.Ndrange{Queue: q, Kernel: k, Dims: 1, Glob0: 16})
	equal(t, c.read(q, b, 64), 7%3)
}

// A program may be released while it is built, compiled or linked, and its id may be used
// again. The build keeps what it needs.
func TestProgramReleasedWhileItIsBuilt(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, _, k := c.setup(0)
	_ = k
	object := c.program(ctx, addSource)
	c.call(&wire.CompileProgram{Program: object})
	for i := range 6 {
		p := c.id()
		var slot uint16
		switch i % 3 {
		case 0:
			c.call(&wire.CreateProgramSource{ID: p, Context: ctx, Mode: wire.DataInline, Source: []byte(addSource)})
			slot = c.start(&wire.BuildProgram{Program: p, Options: []byte{'-', 'D', 'X', '0' + byte(i)}})
		case 1:
			c.call(&wire.CreateProgramSource{ID: p, Context: ctx, Mode: wire.DataInline, Source: []byte(addSource)})
			slot = c.start(&wire.CompileProgram{Program: p, Options: []byte{'-', 'D', 'X', '0' + byte(i)}})
		case 2:
			slot = c.start(&wire.LinkProgram{ID: p, Context: ctx, Inputs: []uint32{object}})
		}
		c.post(&wire.Release{ID: p})
		c.call(&wire.CreateBuffer{ID: p, Context: ctx, Flags: cl.MemReadWrite, Size: 64})
		serial := func() uint64 { s.mu.Lock(); defer s.mu.Unlock(); return s.serials[p] }
		before := serial()
		if st, _ := c.answer(slot); st != cl.Success {
			t.Fatalf("build %d: %v", i, st)
		}
		inside(s, p, func(m *mem) {
			if m == nil || m.size != 64 {
				t.Errorf("build %d has changed the object that its id was used for", i)
			}
		})
		if serial() != before {
			t.Errorf("build %d has made another object of the one that its id was used for", i)
		}
		c.post(&wire.Release{ID: p})
	}
}

// While a program is linked, its build status is CL_BUILD_IN_PROGRESS.
func TestProgramBeingLinkedIsInProgress(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, _, _ := c.setup(0)
	object, p := c.program(ctx, addSource), c.id()
	c.call(&wire.CompileProgram{Program: object})
	s.mu.Lock()
	o, err := s.linkProgram(call{op: wire.OpLinkProgram, slot: wire.NoSlot}, &wire.LinkProgram{ID: p, Context: ctx, Inputs: []uint32{object}})
	if err != nil || o.after == nil {
		t.Fatalf("link: %+v, %v", o, err)
	}
	b, err := s.buildInfo(&wire.BuildInfo{Program: p, Device: 1, Param: cl.ProgramBuildStatus})
	s.mu.Unlock()
	if err != nil || int32(cl.Uint32(b.data)) != cl.BuildInProgress {
		t.Errorf("status %v, %v", b, err)
	}
	o.after(func() {})
	if b := c.call(&wire.BuildInfo{Program: p, Device: 1, Param: cl.ProgramBuildStatus}); int32(cl.Uint32(b)) != cl.BuildSuccess {
		t.Errorf("status %v", b)
	}
}

// cached opens an executor that keeps built programs at once, as if to ask for their binaries were
// cheap.
func (c *client) cached(generation uint32, dir, key string) *session {
	s := c.executor(generation)
	s.cache, s.quirk.dearBinaries = newProgramCache(dir, []byte(key)), false
	return s
}

// When PoCL is asked for a program's binaries, it compiles all kernels for any group size, and
// meanwhile none that is launched: programs took three times as long. Kernels with a fixed group size
// must not run meanwhile at all.
func TestPoCLIsNotAskedForBinariesWhileAProgramBegins(t *testing.T) {
	if os.Getenv("GPUCTL_TEST_CARDS") != "" {
		t.Skip("PoCL's own")
	}
	c := newClient(t)
	s := c.executor(1)
	s.cache = newProgramCache(t.TempDir(), []byte("here"))
	s.activate()
	ctx, _, _ := c.setup(0)
	fixed := c.program(ctx, "kernel __attribute__((reqd_work_group_size(16, 1, 1))) void f(global uint *a) { a[get_global_id(0)]++; }")
	c.call(&wire.BuildProgram{Program: fixed})
	time.Sleep(2 * cacheRest)
	kept := func() int {
		names, err := filepath.Glob(filepath.Join(s.cache.dir, "*"))
		if err != nil {
			t.Fatal(err)
		}
		return len(names)
	}
	s.mu.Lock()
	if n := len(s.unkept); n != 2 || kept() != 0 {
		t.Errorf("soon after the builds %d programs are to be kept, and %d are", n, kept())
	}
	s.built = time.Now().Add(-dearRest)
	s.mu.Unlock()
	settled(t, s)
	if kept() != 1 {
		t.Errorf("%d programs are kept, not the one without a fixed group size", kept())
	}
}

// A program that builds one kernel after the other, and releases each, did so faster than PoCL was asked for
// their binaries. They stayed in memory all the while, for the binaries of programs that nobody has any more.
func TestReleasedProgramsDoNotWaitToBeKept(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.cache, s.quirk.dearBinaries = newProgramCache(t.TempDir(), []byte("here")), true
	s.activate()
	ctx, _, _ := c.setup(0)
	for range 5 {
		p := c.program(ctx, "kernel void f(global uint *a) { a[get_global_id(0)]++; }")
		c.call(&wire.BuildProgram{Program: p})
		c.post(&wire.Release{ID: p})
	}
	c.call(&wire.DeviceTimer{Device: 1}) // all earlier requests have run when it returns
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.unkept) != 1 {
		t.Errorf("%d programs wait, not the one that the application has", len(s.unkept))
	}
}

// settled waits until the executor has no more builds to keep.
func settled(t *testing.T, s *session) {
	t.Helper()
	testkit.Until(t, "built programs are kept", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		return testkit.Want(!s.keeping)
	})
}

func recalled(s *session, id uint32) (yes bool) {
	inside(s, id, func(p *program) { yes = p.recalled })
	return yes
}

// A session that comes back to a device builds none of its programs again there. The
// application may still build them again.
func TestProgramsAreNotBuiltAgainOnADeviceWhereTheSessionWas(t *testing.T) {
	dir := t.TempDir()
	c := newClient(t)
	a := c.cached(1, dir, "here")
	a.activate()
	ctx, q, k := c.setup(0)
	p, k2 := c.program(ctx, "// includes vary\nkernel void mul(global uint *a, uint n) { a[get_global_id(0)] *= n; }"), c.id()
	c.call(&wire.BuildProgram{Program: p, Options: []byte("-DX=1")})
	c.call(&wire.CreateKernel{ID: k2, Program: p, Name: []byte("mul")})
	idle := c.program(ctx, "#ifndef N\n#define N 1\n#endif\nkernel void set(global uint *a) { a[get_global_id(0)] = N; }")
	c.call(&wire.BuildProgram{Program: idle})
	b := c.buffer(ctx, 64)
	c.fill(q, b, 64, 1)
	settled(t, a)

	elsewhere := c.cached(2, dir, "elsewhere")
	c.swap(a, elsewhere)
	for _, id := range []uint32{p, idle} {
		if recalled(elsewhere, id) {
			t.Fatal("an entry of another device is taken for this one's")
		}
	}
	c.launch(q, k, b, 5, 16, 0)
	settled(t, elsewhere)

	back := c.cached(3, dir, "here")
	c.swap(elsewhere, back)
	for _, id := range []uint32{p, idle} {
		if !recalled(back, id) {
			t.Errorf("program %d was built again", id)
		}
	}
	c.launch(q, k2, b, 7, 16, 0)
	equal(t, c.read(q, b, 64), 42)

	c.call(&wire.BuildProgram{Program: idle, Options: []byte("-DN=9")})
	k3 := c.id()
	c.call(&wire.CreateKernel{ID: k3, Program: idle, Name: []byte("set")})
	c.post(&wire.SetArg{Kernel: k3, Index: 0, Kind: wire.ArgMem, Object: b, Size: 8})
	c.post(&wire.Ndrange{Queue: q, Kernel: k3, Dims: 1, Glob0: 16})
	equal(t, c.read(q, b, 64), 9)
}

// A program that was loaded from the cache can be included by others, and it is still built
// after that.
func TestKeptProgramThatIsIncludedStaysBuilt(t *testing.T) {
	dir := t.TempDir()
	c := newClient(t)
	a := c.cached(1, dir, "here")
	a.activate()
	ctx, q, _ := c.setup(0)
	h := c.program(ctx, "#ifndef H\n#define H 3\nkernel void f(global uint *a) { a[get_global_id(0)] = H; }\n#endif")
	c.call(&wire.BuildProgram{Program: h})
	settled(t, a)
	s := c.cached(2, dir, "here")
	c.swap(a, s)
	if !recalled(s, h) {
		t.Fatal("built again")
	}
	object, p, k, b := c.program(ctx, "#include \"h\"\n"), c.id(), c.id(), c.buffer(ctx, 64)
	c.call(&wire.CompileProgram{Program: object, Headers: []uint32{h}, Names: []byte("h")})
	c.call(&wire.LinkProgram{ID: p, Context: ctx, Inputs: []uint32{object}})
	for _, program := range []uint32{p, h} {
		c.call(&wire.CreateKernel{ID: k, Program: program, Name: []byte("f")})
		c.post(&wire.SetArg{Kernel: k, Index: 0, Kind: wire.ArgMem, Object: b, Size: 8})
		c.post(&wire.Ndrange{Queue: q, Kernel: k, Dims: 1, Glob0: 16})
		equal(t, c.read(q, b, 64), 3)
		c.post(&wire.Release{ID: k})
		k = c.id()
	}
}

// If a program is loaded from the cache and its kernels may print, the executor takes that
// into account, as for a program that it has built: the text is delivered before the
// application is told that the kernel has ended.
func TestKeptProgramIsKnownToPrint(t *testing.T) {
	dir := t.TempDir()
	c := newClient(t)
	a := c.cached(1, dir, "here")
	a.activate()
	ctx, _, _ := c.setup(0)
	p := c.program(ctx, `kernel void say(int n) { printf("%d\n", n); }`)
	c.call(&wire.BuildProgram{Program: p})
	settled(t, a)
	back := c.cached(2, dir, "here")
	a.mu.Lock()
	g := a.graph(false)
	a.mu.Unlock()
	back.mu.Lock()
	defer back.mu.Unlock()
	back.out = &output{}
	defer func() { back.out = nil }()
	if err := back.restore(g, noProgress); err != nil {
		t.Fatal(err)
	}
	if x := lookup[program](back, p); x == nil || !x.recalled || !back.out.prints.Load() {
		t.Errorf("%v; known to print: %v", x, back.out.prints.Load())
	}
}

// Kept programs are loaded and run after swaps between runtimes of two vendors, in several
// contexts.
func TestKeptProgramsRunAfterSwapsBetweenVendors(t *testing.T) {
	dir := t.TempDir()
	c := newClient(t)
	open := func(gen uint32, library string) *session {
		s := c.executorOf(gen, library)
		s.cache, s.quirk.dearBinaries = newProgramCache(dir, []byte(library)), false
		return s
	}
	libraries := []string{pocl(t), oclgrind}
	s := open(1, libraries[0])
	s.activate()
	var ps, qs, ks, bs []uint32
	for i := range 12 {
		ctx, q, k := c.setup(0)
		p := c.program(ctx, fmt.Sprintf("kernel void f%d(global uint *a, ulong n) { a[get_global_id(0)] = %d + (uint)n; }", i, i))
		c.call(&wire.BuildProgram{Program: p})
		f := c.id()
		c.call(&wire.CreateKernel{ID: f, Program: p, Name: fmt.Appendf(nil, "f%d", i)})
		b := c.buffer(ctx, 64)
		c.launch(q, k, b, 1, 16, 0)
		ps, qs, ks, bs = append(ps, p), append(qs, q), append(ks, f), append(bs, b)
	}
	settled(t, s)
	for gen := uint32(2); gen < 8; gen++ {
		to := open(gen, libraries[(gen+1)%2])
		c.swap(s, to)
		s = to
		for i, p := range ps {
			if gen > 2 && gen%2 == 1 && !recalled(s, p) {
				t.Errorf("generation %d: program %d was built again", gen, p)
			}
			c.post(&wire.SetArg{Kernel: ks[i], Index: 0, Kind: wire.ArgMem, Object: bs[i], Size: 8})
			c.post(&wire.SetArg{Kernel: ks[i], Index: 1, Kind: wire.ArgPlain, Size: 8, Value: []byte{5, 0, 0, 0, 0, 0, 0, 0}})
			c.post(&wire.Ndrange{Queue: qs[i], Kernel: ks[i], Dims: 1, Glob0: 16})
			equal(t, c.read(qs[i], bs[i], 64), uint32(i)+5)
		}
	}
}

// A process that can write to the folder, but does not have the key, cannot make another
// device's executor run its code.
func TestForgedProgramsAreNotLoaded(t *testing.T) {
	dir := t.TempDir()
	c := newProgramCache(dir, []byte("key"))
	k := programKey{1}
	x := &builtProgram{Binaries: [][]byte{[]byte("code")}, Kernels: []string{"f"}}
	if err := c.put(k, x); err != nil {
		t.Fatal(err)
	}
	if got := c.get(k); got == nil || string(got.Binaries[0]) != "code" {
		t.Fatalf("%+v", got)
	}
	other := newProgramCache(dir, []byte("another key"))
	if other.get(k) != nil {
		t.Error("signed with another key")
	}
	file := func(k programKey) string { return filepath.Join(c.dir, c.file(k)) }
	b, err := os.ReadFile(file(k))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file(programKey{2}), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if c.get(programKey{2}) != nil {
		t.Error("the entry of another program")
	}
	for i := range b {
		d := append([]byte(nil), b...)
		d[i] ^= 1
		if err := os.WriteFile(file(k), d, 0o600); err != nil {
			t.Fatal(err)
		}
		if c.get(k) != nil {
			t.Errorf("byte %d changed", i)
		}
	}
}

// The size of the folder is limited, whatever it already contains.
func TestKeptProgramsAreBounded(t *testing.T) {
	c := newProgramCache(t.TempDir(), []byte("key"))
	code := make([]byte, maxEntry/2)
	for i := range 3 * maxCache / len(code) {
		if err := c.put(programKey{byte(i)}, &builtProgram{Binaries: [][]byte{code}}); err != nil {
			t.Fatal(err)
		}
	}
	es, err := os.ReadDir(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	var n int64
	for _, e := range es {
		fi, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		n += fi.Size()
	}
	if n > maxCache || n < maxCache/2 {
		t.Errorf("%d bytes in %d files", n, len(es))
	}
	if err := c.put(programKey{}, &builtProgram{Binaries: [][]byte{make([]byte, maxEntry)}}); err == nil {
		t.Error("an entry as large as that is kept")
	}
}

// Where pointers have a generic address space, a cast that removes const need not name one.
func TestConstIsNotBelievedWhereACastNeedNotNameTheAddressSpace(t *testing.T) {
	const reads, writes = "kernel void f(const global uint *a) { vload4(0, (const uint *)a); }", "kernel void f(const global uint *a) { *(uint *)a = 7; }"
	for _, x := range []struct {
		source, options string
		want            bool
	}{
		{reads, "-cl-std=CL3.0", true},
		{writes, "-cl-std=CL3.0", false},
		{writes, "-cl-std=CL2.0", false},
		{writes, "-cl-std=CL1.2", true}, // no compiler takes it
		{writes, "", false},             // some compilers take it
		{reads, "-cl-std=CLC++2021", false},
	} {
		if got := exactConst(&portable.Program{Source: []byte(x.source), Options: x.options}); got != x.want {
			t.Errorf("%s with %s: %v", x.source, x.options, got)
		}
	}
}

// An application that is told of a link's end by a callback has the program already. It can read its
// state and release it, also if the runtime makes no program.
func TestProgramWhoseLinkIsToldByACallbackLivesUntilItIsReleased(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	object, linked := c.program(ctx, addSource), c.id()
	c.call(&wire.CompileProgram{Program: object})
	c.call(&wire.LinkProgram{ID: linked, Context: ctx, Inputs: []uint32{object}, Options: []byte("-no-such-option"), Callback: 5})
	testkit.Until(t, "the callback has come", func() error {
		n := c.ring.Load32(wire.HdrCbTail)
		return testkit.Want(n == 1, n)
	})
	if st, b := c.answer(c.start(&wire.BuildInfo{Program: linked, Device: 1, Param: cl.ProgramBuildStatus})); st != cl.Success || int32(cl.Uint32(b)) != cl.BuildError {
		t.Errorf("its status: %v, %v", st, b)
	}
	c.post(&wire.Release{ID: linked})
	finish := c.start(&wire.Finish{Queue: q})
	testkit.Until(t, "the session goes on", func() error { return testkit.Want(c.answered(finish), c.ring.Load32(wire.HdrState)) })
}

// A program whose link has failed is kept by many an application. It does not keep the session from
// going to another device.
func TestSessionWithAProgramThatDidNotLinkIsMoved(t *testing.T) {
	c := newClient(t)
	from, to := c.executor(1), c.executor(2)
	from.activate()
	ctx, q, k := c.setup(0)
	b := c.buffer(ctx, 4096)
	c.fill(q, b, 4096, 1)
	object, linked := c.program(ctx, "uint g(uint); kernel void f(global uint *a) { a[0] = g(a[0]); }"), c.id()
	c.call(&wire.CompileProgram{Program: object})
	if st, _ := c.answer(c.start(&wire.LinkProgram{ID: linked, Context: ctx, Inputs: []uint32{object}})); st != cl.LinkProgramFailure {
		t.Fatal(st)
	}
	ask := func() string {
		return string(c.call(&wire.BuildInfo{Program: linked, Device: 1, Param: cl.ProgramBuildStatus})) +
			string(c.call(&wire.BuildInfo{Program: linked, Device: 1, Param: cl.ProgramBuildLog}))
	}
	before := ask()
	c.swap(from, to)
	if got := ask(); got != before {
		t.Errorf("status and log are %q, and were %q", got, before)
	}
	c.post(&wire.Release{ID: linked})
	c.launch(q, k, b, 1, 1024, 0)
	equal(t, c.read(q, b, 4096), 2)
}
