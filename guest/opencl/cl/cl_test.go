package cl

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"
)

// Two runtimes in one process may clash over LLVM, so every test that needs
// one runs itself again, in a process that opens just that one.
// The variable names another one, such as libnvidia-opencl.so.1.
const runtimeEnv = "GPUCTL_CL_TEST_RUNTIME"

func eachRuntime(t *testing.T, f func(t *testing.T, l *Library)) {
	t.Helper()
	if lib := os.Getenv(runtimeEnv); lib != "" {
		l, err := Open(lib)
		if err != nil {
			t.Fatal(err)
		}
		f(t, l)
		return
	}
	for _, glob := range []string{"/usr/lib*/*/libpocl.so.2", "/usr/lib/oclgrind/liboclgrind-rt-icd.so"} {
		t.Run(filepath.Base(glob), func(t *testing.T) {
			found, _ := filepath.Glob(glob)
			if len(found) == 0 {
				t.Fatal("not installed: make setup")
			}
			parent, _, _ := strings.Cut(t.Name(), "/")
			c := exec.Command(os.Args[0], "-test.run=^"+parent+"$", "-test.v")
			c.Env = append(os.Environ(), runtimeEnv+"="+found[0])
			out, err := c.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			t.Logf("%s", out)
		})
	}
}

func must(t testing.TB, s Status) {
	t.Helper()
	if s != Success {
		t.Fatal(s)
	}
}

const vadd = `kernel void vadd(global const float *a, global float *b, const float f) {
	size_t i = get_global_id(0);
	b[i] += f * a[i];
}`

type rig struct {
	l   *Library
	dev Device
	ctx Context
	q   Queue
}

func newRig(t testing.TB, l *Library) rig {
	t.Helper()
	if len(l.Platforms()) == 0 {
		t.Fatal("no platform")
	}
	devs, s := GetDeviceIDs(l.Platforms()[0], DeviceTypeAll)
	must(t, s)
	ctx, s := CreateContext(devs[:1])
	must(t, s)
	q, s := CreateCommandQueue(ctx, devs[0], QueueProfilingEnable)
	must(t, s)
	t.Cleanup(func() {
		must(t, Finish(q))
		must(t, ReleaseCommandQueue(q))
		must(t, ReleaseContext(ctx))
	})
	return rig{l, devs[0], ctx, q}
}

func (r rig) kernel(t testing.TB, src, name string) (Program, Kernel) {
	t.Helper()
	p, s := CreateProgramWithSource(r.ctx, []byte(src))
	must(t, s)
	must(t, BuildProgram(p, nil, "-cl-kernel-arg-info"))
	k, s := CreateKernel(p, name)
	must(t, s)
	t.Cleanup(func() {
		must(t, ReleaseKernel(k))
		must(t, ReleaseProgram(p))
	})
	return p, k
}

func bytesOf[E any](s []E) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(s)) }

func TestRunKernel(t *testing.T) {
	eachRuntime(t, func(t *testing.T, l *Library) {
		r := newRig(t, l)
		name, s := GetDeviceInfo(r.dev, DeviceName)
		must(t, s)
		ver, s := GetPlatformInfo(l.Platforms()[0], PlatformVersion)
		must(t, s)
		t.Logf("%s, %s", CString(name), CString(ver))
		p, k := r.kernel(t, vadd, "vadd")

		const n = 256
		a, b := make([]float32, n), make([]float32, n)
		for i := range a {
			a[i], b[i] = float32(i), 1
		}
		ma, s := CreateBuffer(r.ctx, MemReadOnly|MemCopyHostPtr, 4*n, bytesOf(a))
		must(t, s)
		mb, s := CreateBuffer(r.ctx, MemReadWrite, 4*n, nil)
		must(t, s)
		var wrote, ran Event
		must(t, EnqueueWriteBuffer(r.q, mb, true, 0, 4*n, bytesOf(b), nil, &wrote))
		f := float32(2)
		must(t, SetKernelArg(k, 0, 8, unsafe.Pointer(&ma)))
		must(t, SetKernelArg(k, 1, 8, unsafe.Pointer(&mb)))
		must(t, SetKernelArg(k, 2, 4, unsafe.Pointer(&f)))
		must(t, EnqueueNDRangeKernel(r.q, k, 1, nil, &[3]uint64{n}, nil, []Event{wrote}, &ran))
		must(t, EnqueueReadBuffer(r.q, mb, true, 0, 4*n, bytesOf(b), []Event{ran}, nil))
		for i := range b {
			if want := 1 + 2*float32(i); b[i] != want {
				t.Fatalf("b[%d] = %v, want %v", i, b[i], want)
			}
		}
		must(t, WaitForEvents([]Event{wrote, ran}))
		if st, s := EventStatus(ran); s != Success || st != Complete {
			t.Errorf("event: %d, %v", st, s)
		}
		from, s := EventTime(ran, ProfilingCommandStart)
		must(t, s)
		to, s := EventTime(ran, ProfilingCommandEnd)
		must(t, s)
		if to < from {
			t.Errorf("ran from %d to %d", from, to)
		}
		for _, e := range []Event{wrote, ran} {
			must(t, ReleaseEvent(e))
		}

		args, s := GetKernelInfo(k, KernelNumArgs)
		must(t, s)
		if Uint32(args) != 3 {
			t.Errorf("%d arguments, want 3", Uint32(args))
		}
		arg, s := GetKernelArgInfo(k, 1, KernelArgName)
		must(t, s)
		if CString(arg) != "b" {
			t.Errorf("argument 1 is %q, want b", CString(arg))
		}
		wg, s := GetKernelWorkGroupInfo(k, r.dev, KernelWorkGroupSize)
		must(t, s)
		if Uint64(wg) == 0 {
			t.Error("work-group size 0")
		}
		st, s := GetProgramBuildInfo(p, r.dev, ProgramBuildStatus)
		must(t, s)
		if Uint32(st) != BuildSuccess {
			t.Errorf("build status %d", int32(Uint32(st)))
		}
		bins, s := GetProgramBinaries(p)
		must(t, s)
		if len(bins) != 1 || len(bins[0]) == 0 {
			t.Fatalf("%d binaries", len(bins))
		}
		p2, each, s := CreateProgramWithBinary(r.ctx, []Device{r.dev}, bins)
		must(t, s)
		must(t, each[0])
		must(t, BuildProgram(p2, nil, ""))
		must(t, ReleaseProgram(p2))
		must(t, ReleaseMemObject(ma))
		must(t, ReleaseMemObject(mb))
	})
}

func TestTransfers(t *testing.T) {
	eachRuntime(t, func(t *testing.T, l *Library) {
		r := newRig(t, l)
		m, s := CreateBuffer(r.ctx, MemReadWrite, 64, nil)
		must(t, s)
		pattern := uint32(0x01020304)
		must(t, EnqueueFillBuffer(r.q, m, unsafe.Pointer(&pattern), 4, 0, 64, nil, nil))
		host := make([]byte, 16)
		for i := range host {
			host[i] = byte(0xf0 + i)
		}
		// A box of 4 by 4 bytes at (4, 1) of rows of 8 bytes.
		must(t, EnqueueWriteBufferRect(r.q, m, true, &[3]uint64{4, 1, 0}, &[3]uint64{}, &[3]uint64{4, 4, 1}, 8, 0, 4, 0, bytesOf(host), nil, nil))
		got := make([]byte, 64)
		must(t, EnqueueReadBuffer(r.q, m, true, 0, 64, bytesOf(got), nil, nil))
		for i, b := range got {
			x, y := i%8, i/8
			want := byte(4 - i%4)
			if x >= 4 && y >= 1 && y < 5 {
				want = host[4*(y-1)+x-4]
			}
			if b != want {
				t.Fatalf("byte %d is %#x, want %#x", i, b, want)
			}
		}
		sub, s := CreateSubBuffer(m, MemReadWrite, 0, 32)
		must(t, s)
		must(t, EnqueueCopyBuffer(r.q, m, m, 0, 32, 32, nil, nil))
		p, s := EnqueueMapBuffer(r.q, m, true, MapRead, 32, 32, nil, nil)
		must(t, s)
		if string(unsafe.Slice((*byte)(p), 32)) != string(got[:32]) {
			t.Error("mapped bytes are not those copied")
		}
		must(t, EnqueueUnmapMemObject(r.q, m, p, nil, nil))
		var ev Event
		must(t, EnqueueMarkerWithWaitList(r.q, nil, &ev))
		must(t, EnqueueBarrierWithWaitList(r.q, []Event{ev}, nil))
		must(t, EnqueueMigrateMemObjects(r.q, []Mem{m}, 0, nil, nil))
		must(t, Finish(r.q))
		must(t, ReleaseEvent(ev))
		must(t, ReleaseMemObject(sub))
		must(t, ReleaseMemObject(m))
	})
}

func TestImages(t *testing.T) {
	eachRuntime(t, func(t *testing.T, l *Library) {
		r := newRig(t, l)
		if b, _ := GetDeviceInfo(r.dev, DeviceImageSupport); Uint32(b) == 0 {
			t.Skip("no images")
		}
		formats, s := GetSupportedImageFormats(r.ctx, MemReadWrite, MemObjectImage2d)
		must(t, s)
		if len(formats) == 0 || formats[0].ChannelOrder == 0 {
			t.Fatalf("formats: %v", formats)
		}
		img, s := CreateImage(r.ctx, MemReadWrite, &ImageFormat{Rgba, UnsignedInt8},
			&ImageDesc{Type: MemObjectImage2d, Width: 8, Height: 4}, nil)
		must(t, s)
		w, s := GetImageInfo(img, ImageWidth)
		must(t, s)
		if Uint64(w) != 8 {
			t.Errorf("width %d, want 8", Uint64(w))
		}
		in, out := make([]byte, 8*4*4), make([]byte, 8*4*4)
		for i := range in {
			in[i] = byte(i)
		}
		full := &[3]uint64{8, 4, 1}
		must(t, EnqueueWriteImage(r.q, img, true, &[3]uint64{}, full, 0, 0, bytesOf(in), nil, nil))
		must(t, EnqueueReadImage(r.q, img, true, &[3]uint64{}, full, 0, 0, bytesOf(out), nil, nil))
		if string(in) != string(out) {
			t.Error("read back other pixels")
		}
		smp, s := CreateSampler(r.ctx, false, AddressClamp, FilterNearest)
		must(t, s)
		must(t, ReleaseSampler(smp))
		must(t, ReleaseMemObject(img))
	})
}

func TestCompileAndLink(t *testing.T) {
	eachRuntime(t, func(t *testing.T, l *Library) {
		r := newRig(t, l)
		header, s := CreateProgramWithSource(r.ctx, []byte("#define ANSWER 42\n"))
		must(t, s)
		p, s := CreateProgramWithSource(r.ctx, []byte("#include \"answer.h\"\nkernel void f(global int *a) { *a = ANSWER; }"))
		must(t, s)
		must(t, CompileProgram(p, nil, "", []Program{header}, []string{"answer.h"}))
		linked, s := LinkProgram(r.ctx, nil, "", []Program{p})
		must(t, s)
		k, s := CreateKernel(linked, "f")
		must(t, s)
		m, s := CreateBuffer(r.ctx, MemReadWrite, 4, nil)
		must(t, s)
		must(t, SetKernelArg(k, 0, 8, unsafe.Pointer(&m)))
		must(t, EnqueueNDRangeKernel(r.q, k, 1, nil, &[3]uint64{1}, nil, nil, nil))
		var v int32
		must(t, EnqueueReadBuffer(r.q, m, true, 0, 4, unsafe.Pointer(&v), nil, nil))
		if v != 42 {
			t.Errorf("got %d, want 42", v)
		}
		must(t, ReleaseMemObject(m))
		must(t, ReleaseKernel(k))
		for _, p := range []Program{header, p, linked} {
			must(t, ReleaseProgram(p))
		}
	})
}

func TestErrorsNotCrashes(t *testing.T) {
	eachRuntime(t, func(t *testing.T, l *Library) {
		r := newRig(t, l)
		p, s := CreateProgramWithSource(r.ctx, []byte("kernel void f( {"))
		must(t, s)
		if s := BuildProgram(p, nil, ""); s != BuildProgramFailure {
			t.Errorf("build: %v", s)
		}
		if log, s := GetProgramBuildInfo(p, r.dev, ProgramBuildLog); s != Success || CString(log) == "" {
			t.Errorf("log %q, %v", log, s)
		}
		must(t, ReleaseProgram(p))
		if _, s := CreateBuffer(r.ctx, MemReadWrite, 0, nil); s != InvalidBufferSize {
			t.Errorf("empty buffer: %v", s)
		}
		// What a runtime may lack: whatever comes back, it is no crash.
		_, s = CreateProgramWithIL(r.ctx, []byte{1, 2, 3, 4})
		t.Logf("CreateProgramWithIL: %v", s)
		_, k := r.kernel(t, vadd, "vadd")
		_, s = GetKernelSubGroupInfo(k, r.dev, KernelMaxSubGroupSizeForNdrange, []byte{8, 0, 0, 0, 0, 0, 0, 0})
		t.Logf("GetKernelSubGroupInfo: %v", s)
		n, s := CountSubDevices(r.dev, []uint64{DevicePartitionEqually, 1, 0})
		t.Logf("CountSubDevices: %d, %v", n, s)
	})
}

func TestHotPathDoesNotAllocate(t *testing.T) {
	eachRuntime(t, func(t *testing.T, l *Library) {
		r := newRig(t, l)
		_, k := r.kernel(t, "kernel void f(global int *a) { *a += 1; }", "f")
		m, s := CreateBuffer(r.ctx, MemReadWrite, 4, nil)
		must(t, s)
		must(t, EnqueueWriteBuffer(r.q, m, true, 0, 4, unsafe.Pointer(&[4]byte{}), nil, nil))
		// Memory beside Go pointers must be fine too.
		object := &struct {
			next *int
			mem  Mem
		}{new(int), m}
		got := testing.AllocsPerRun(20, func() {
			var v int32
			var ev Event
			var wait [1]Event
			glob := [3]uint64{1}
			must(t, SetKernelArg(k, 0, 8, unsafe.Pointer(&object.mem)))
			must(t, EnqueueNDRangeKernel(r.q, k, 1, nil, &glob, &glob, nil, &ev))
			wait[0] = ev
			must(t, EnqueueReadBuffer(r.q, m, true, 0, 4, unsafe.Pointer(&v), wait[:], nil))
			_, s := EventStatus(ev)
			must(t, s)
			_, s = EventTime(ev, ProfilingCommandEnd)
			must(t, s)
			must(t, ReleaseEvent(ev))
		})
		if got != 0 {
			t.Errorf("%v allocations a run, want 0", got)
		}
		must(t, ReleaseMemObject(m))
	})
}

func TestZeroHandles(t *testing.T) {
	for name, c := range map[string]struct{ got, want Status }{
		"Finish":               {Finish(0), InvalidCommandQueue},
		"ReleaseKernel":        {ReleaseKernel(0), InvalidKernel},
		"WaitForEvents":        {WaitForEvents(nil), InvalidValue},
		"WaitForEvents of 0":   {WaitForEvents([]Event{0}), InvalidEvent},
		"EnqueueNDRangeKernel": {EnqueueNDRangeKernel(0, 0, 1, nil, nil, nil, nil, nil), InvalidCommandQueue},
	} {
		if c.got != c.want {
			t.Errorf("%s: %v, want %v", name, c.got, c.want)
		}
	}
	if _, s := CreateBuffer(0, 0, 1, nil); s != InvalidContext {
		t.Errorf("CreateBuffer: %v", s)
	}
	if _, s := CreateContext(nil); s != InvalidValue {
		t.Errorf("CreateContext: %v", s)
	}
}

func TestOpenNoRuntime(t *testing.T) {
	for _, lib := range []string{"/nonexistent.so", "libc.so.6", ""} {
		if _, err := Open(lib); !errors.Is(err, ErrNotRuntime) {
			t.Errorf("%q: %v", lib, err)
		}
	}
}

func TestVersion(t *testing.T) {
	for s, want := range map[string]int{"OpenCL 1.2 x": 12, "OpenCL 3.0 CUDA 12.4": 30, "": 10, "OpenCL x": 10, "OpenCL 0.9": 10} {
		if got := version(s); got != want {
			t.Errorf("version(%q) = %d, want %d", s, got, want)
		}
	}
}

func TestStatus(t *testing.T) {
	if Success.Err() != nil {
		t.Error("Success is an error")
	}
	if err := InvalidValue.Err(); !errors.Is(err, InvalidValue) || err.Error() != "CL_INVALID_VALUE" {
		t.Error(err)
	}
	if got := Status(-9999).Error(); got != "OpenCL status -9999" {
		t.Error(got)
	}
}
