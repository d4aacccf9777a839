package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/vm/agent"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/guest/vm/channel/channeltest"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

const (
	vmPatience = 5 * time.Minute
	oclgrind   = "/usr/lib/oclgrind/liboclgrind-rt-icd.so"
)

// testVM is a VM made of files, with a console, gpuguest in it and a host outside.
type testVM struct {
	t       *testing.T
	dir     string
	tree    *pcitest.Tree
	console *channeltest.Console
	binary  string
	icd     string
	config  string
	env     []string // added to gpuguest's environment
	cmd     *exec.Cmd
	log     *testkit.Log
	host    *channel.Client
	agent   gpuctlv1connect.AgentServiceClient
	guest   gpuctlv1connect.GuestServiceClient
}

// newVM returns a VM in which gpuguest runs. before, if given, is called before it starts.
func newVM(t *testing.T, before ...func(*testVM)) *testVM {
	t.Helper()
	for _, need := range []string{oclgrind, "/etc/OpenCL/vendors/pocl.icd"} {
		if _, err := os.Stat(need); err != nil {
			t.Fatal("needs the packages oclgrind and pocl-opencl-icd: make setup")
		}
	}
	root, err := built()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(root, "vm")
	if err := os.Mkdir(dir, 0o711); err != nil { // the sessions' users pass through it
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	v := &testVM{t: t, dir: dir, tree: pcitest.New(t), console: channeltest.New(t), log: &testkit.Log{}, binary: filepath.Join(root, "gpuguest"), icd: filepath.Join(dir, "vendors")}
	run := filepath.Join(dir, "run")
	for _, name := range []string{"lib.so", "stream"} {
		if err := os.Link(filepath.Join(root, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	v.write(filepath.Join(v.icd, "gpuctl.icd"), filepath.Join(dir, "lib.so")+"\n")
	v.config = filepath.Join(dir, "gpuguest.yaml")
	v.write(v.config, "version: 1\nrunDir: "+run+"\nemulatedDevices: true\nprofiles: "+filepath.Join(dir, "profiles")+"\n")

	v.console.Root(v.tree.Root, channel.Name)
	v.tree.Write("sys/bus/pci/drivers_autoprobe", "1\n")
	v.tree.Write("sys/bus/pci/drivers_probe", "")
	v.tree.Write("sys/bus/pci/slots/5/address", "0000:00:05\n")
	v.tree.Write("sys/bus/pci/slots/5/power", "1\n")
	v.tree.Write("proc/sys/kernel/random/boot_id", "boot\n")
	v.tree.Write("proc/meminfo", "MemTotal: 1024 kB\nMemAvailable: 512 kB\n")

	for _, f := range before {
		f(v)
	}
	v.start()
	t.Cleanup(func() {
		v.kill(syscall.SIGKILL)
		if t.Failed() {
			t.Log(v.log)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), vmPatience)
	defer cancel()
	if v.host, err = channel.Dial(ctx, v.console.Socket()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { v.host.Close() })
	v.agent = gpuctlv1connect.NewAgentServiceClient(v.host.HTTP(), channel.BaseURL, channel.ConnectOptions()...)
	v.guest = gpuctlv1connect.NewGuestServiceClient(v.host.HTTP(), channel.BaseURL, channel.ConnectOptions()...)
	return v
}

// built makes the programs of all VMs. The VMs of the tests are one after the other in the
// same folder, whose path the library has in it. TestMain removes it.
var built = sync.OnceValues(func() (root string, err error) {
	root, err = os.MkdirTemp("", "vm") // short, because it contains sockets
	if err != nil {
		return "", err
	}
	builtIn = root
	if err := os.Chmod(root, 0o711); err != nil { // the sessions' users pass through it
		return "", err
	}
	socket := filepath.Join(root, "vm", "run", "app.sock")
	for _, args := range [][]string{
		{"go", "build", "-o", filepath.Join(root, "gpuguest"), "."},
		{"sh", "../../guest/opencl/icd/build.sh", filepath.Join(root, "lib.so"), fmt.Sprintf("-DGX_VM_SOCKET=%q", socket)},
		{"gcc", "-O1", "-std=gnu11", "-o", filepath.Join(root, "stream"), "../../test/cl/stream.c", "-lOpenCL", "-lpthread"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return "", fmt.Errorf("%v: %w\n%s", args, err, out)
		}
	}
	return root, nil
})

var builtIn string

func TestMain(m *testing.M) {
	code := m.Run()
	if builtIn != "" {
		_ = os.RemoveAll(builtIn)
	}
	os.Exit(code)
}

func (v *testVM) write(path, text string) {
	v.t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		v.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		v.t.Fatal(err)
	}
}

func (v *testVM) start() {
	v.t.Helper()
	v.cmd = exec.Command(v.binary, "serve", "--vm", "--config", v.config, "--root", v.tree.Root)
	v.cmd.Env = append(os.Environ(), v.env...)
	v.cmd.Stdout, v.cmd.Stderr = v.log, v.log
	v.cmd.WaitDelay = time.Second
	if err := v.cmd.Start(); err != nil {
		v.t.Fatal(err)
	}
}

func (v *testVM) kill(sig syscall.Signal) error {
	_ = v.cmd.Process.Signal(sig)
	return v.cmd.Wait()
}

func (v *testVM) plug(vendor, device uint16, class uint32) {
	v.tree.Add(pcitest.Function{Address: "0000:00:05.0", Vendor: vendor, Device: device, Class: class, IOMMUGroup: -1, NUMANode: -1})
}

// unplug removes the function. After that there is a new tree, because a tree can add an
// address only once.
func (v *testVM) unplug() {
	v.t.Helper()
	root := v.tree.Root
	if err := os.Remove(filepath.Join(root, "sys/bus/pci/devices/0000:00:05.0")); err != nil {
		v.t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(root, v.tree.Dir("0000:00:05.0"))); err != nil {
		v.t.Fatal(err)
	}
	v.tree = pcitest.New(v.t)
	v.tree.Root = root
}

func (v *testVM) ctx() context.Context {
	ctx, cancel := context.WithTimeout(v.t.Context(), vmPatience)
	v.t.Cleanup(cancel)
	return ctx
}

// hello calls Hello until it succeeds, because a connection may just have been lost.
func (v *testVM) hello() *gpuctlv1.HelloResponse {
	v.t.Helper()
	ctx := v.ctx()
	for {
		resp, err := v.agent.Hello(ctx, connect.NewRequest(&gpuctlv1.HelloRequest{}))
		if err == nil {
			return resp.Msg
		}
		if ctx.Err() != nil {
			v.t.Fatalf("%v; %+v", err, v.host.State())
		}
	}
}

func (v *testVM) await(vendor, device uint32) *gpuctlv1.GuestDevice {
	v.t.Helper()
	resp, err := v.agent.AwaitDevice(v.ctx(), connect.NewRequest(&gpuctlv1.AwaitDeviceRequest{VendorId: vendor, DeviceId: device, TimeoutMs: 60000}))
	if err != nil {
		v.t.Fatal(err)
	}
	return resp.Msg.Device
}

// session waits until the application's session has launched more kernels than before.
func (v *testVM) session(before uint64) *gpuctlv1.Session {
	v.t.Helper()
	ctx := v.ctx()
	var s []*gpuctlv1.Session
	testkit.Until(v.t, "the session computes", func() error {
		resp, err := v.guest.ListSessions(ctx, connect.NewRequest(&gpuctlv1.ListSessionsRequest{}))
		if err != nil {
			v.t.Fatal(err)
		}
		s = resp.Msg.Sessions
		return testkit.Want(len(s) == 1 && s[0].Usage.GetLaunches() > before, s)
	})
	return s[0]
}

func finished(t *testing.T, st *connect.ServerStreamForClient[gpuctlv1.Progress], err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	var last *gpuctlv1.Progress
	for st.Receive() {
		last = st.Msg()
	}
	if r := last.GetResult(); st.Err() != nil || r == nil || r.Refused || r.RolledBack || r.Error != "" {
		t.Fatalf("%v: %v", st.Err(), last)
	}
}

// An application computes in a VM that loses its GPU, moves and gets another.
func TestVMMovesWithItsApplication(t *testing.T) {
	v := newVM(t)
	if h := v.hello(); !h.Hotplug || len(h.Devices) != 0 || h.BootId != "boot" || h.Protocol != agent.Protocol {
		t.Fatalf("hello %v", h)
	}

	// An application that starts before there is a GPU waits for it.
	var out testkit.Log
	app := exec.Command(filepath.Join(v.dir, "stream"), "--stdin", "--kib", "16", "--buffers", "2")
	app.Env = []string{"OCL_ICD_VENDORS=" + v.icd + "/", "PATH=" + os.Getenv("PATH")}
	app.Stdout, app.Stderr = &out, &out
	stdin, err := app.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = app.Process.Kill()
		if t.Failed() {
			t.Log(out.String())
		}
	})

	v.plug(0x1234, 0x1111, 0x038000)
	d := v.await(0x1234, 0x1111)
	if d.Target.Model != "QEMU standard VGA" || d.Target.Runtime.Library != oclgrind || d.Target.Limits.GlobalMemory != 256<<20 {
		t.Errorf("target %v", d.Target)
	}
	s := v.session(0)
	if s.Target.Gpu != d.Target.Gpu || s.Target.Gpu != "vm/0000:00:05.0" {
		t.Errorf("session on %v", s.Target)
	}
	release := func() error {
		_, err := v.agent.Release(v.ctx(), connect.NewRequest(&gpuctlv1.ReleaseRequest{Address: d.Address}))
		return err
	}
	if err := release(); connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), s.Id) {
		t.Fatalf("released under a session: %v", err)
	}

	// gpuguest dies. Its successor has the session and the channel again.
	before := v.hello().Instance
	_ = v.kill(syscall.SIGKILL)
	v.start()
	for deadline := time.Now().Add(vmPatience); v.hello().Instance == before; {
		if time.Now().After(deadline) {
			t.Fatal("the new gpuguest is never there")
		}
	}
	if again := v.session(s.Usage.Launches); again.Id != s.Id {
		t.Fatalf("the session is another: %v", again)
	}
	v.await(0x1234, 0x1111)

	st, err := v.guest.Suspend(v.ctx(), connect.NewRequest(&gpuctlv1.SuspendRequest{Session: s.Id}))
	finished(t, st, err)
	if err := release(); err != nil {
		t.Fatal(err)
	}
	v.unplug()
	v.console.Migrate()
	if h := v.hello(); h.BootId != "boot" {
		t.Fatalf("hello %v", h)
	}
	if _, err := v.agent.TakeUp(v.ctx(), connect.NewRequest(&gpuctlv1.TakeUpRequest{Address: d.Address})); err != nil {
		t.Fatal(err)
	}
	v.plug(0x1af4, 0x1050, 0x038000)
	d = v.await(0x1af4, 0x1050)
	if d.Target.Model != "virtio GPU" || d.Target.Limits.GlobalMemory <= 256<<20 {
		t.Errorf("target %v", d.Target)
	}
	rst, err := v.guest.Resume(v.ctx(), connect.NewRequest(&gpuctlv1.ResumeRequest{Session: s.Id, Target: d.Target}))
	finished(t, rst, err)
	v.session(s.Usage.Launches + 10)

	stdin.Close()
	if err := app.Wait(); err != nil {
		t.Fatalf("the application: %v", err)
	}
	m := regexp.MustCompile(`checksum (\d+) ([0-9a-f]+)`).FindStringSubmatch(out.String())
	if m == nil {
		t.Fatalf("the application has no result: %s", out.String())
	}
	native := exec.Command(filepath.Join(v.dir, "stream"), "--iterations", m[1], "--kib", "16", "--buffers", "2")
	vendors := filepath.Join(v.dir, "native")
	v.write(filepath.Join(vendors, "pocl.icd"), "libpocl.so.2\n")
	native.Env = []string{"OCL_ICD_VENDORS=" + vendors + "/", "HOME=" + v.dir, "PATH=" + os.Getenv("PATH")}
	want, err := native.Output()
	if err != nil || !bytes.Contains(want, []byte(m[0])) {
		t.Fatalf("%s, without gpuctl %s (%v)", m[0], want, err)
	}
	if err := v.kill(syscall.SIGTERM); err != nil {
		t.Errorf("gpuguest ends with %v", err)
	}
}

// The socket's mode decides who may use the GPU.
func TestVMSocket(t *testing.T) {
	o := defaultVM()
	dir := t.TempDir()
	o.RunDir, o.AppMode, o.AppGroup = dir, "0640", fmt.Sprint(os.Getgid())
	if err := o.check(); err != nil {
		t.Fatal(err)
	}
	l, err := listenApps(o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	info, err := os.Stat(filepath.Join(dir, "app.sock"))
	if err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("%v, %v", info, err)
	}
	o.AppGroup = "no-such-group"
	l.Close()
	if _, err := listenApps(o); err == nil || !strings.Contains(err.Error(), "appGroup") {
		t.Errorf("error %v", err)
	}
}

func TestServeFlags(t *testing.T) {
	for _, args := range [][]string{{}, {"--socket", "x"}, {"--vm", "--socket", "x", "--app-socket", "y", "--rundir", "z"}} {
		if err := run(t.Context(), append([]string{"serve"}, args...), nil, io.Discard, io.Discard); err == nil {
			t.Errorf("serve %v: no error", args)
		}
	}
}
