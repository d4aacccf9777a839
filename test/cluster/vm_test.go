package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/guest/vm/channel/channeltest"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/virt/virttest"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/test/rig"
)

// vmConfig is a host with one GPU and a libvirtd. Carriers reach it through a relay.
const vmConfig = `version: 1
discover: false
cluster: {host: %[1]s, listen: "127.0.0.2:%[2]s", lendListen: "127.0.0.1:%[3]s"}
devices: {libvirt: "qemu:///system", libvirtSocket: "%[4]s", migrateURI: "qemu+tls://{host}/system"}
gpus:
  - id: one
    runtime: pocl
    env: {POCL_DEVICES: basic, POCL_MEMORY_LIMIT: "1"}
    model: Small
`

// vmHost is a host of VMs.
type vmHost struct {
	*host
	libvirt *virttest.Server
	client  *virt.Client
	relay   *testkit.Relay // before its port for carriers
}

// vmHosts makes a cluster of hosts between which VMs can move.
func vmHosts(t *testing.T, ctx context.Context, r root, names ...string) []*vmHost {
	t.Helper()
	var out []*vmHost
	for i, name := range names {
		h := &vmHost{host: newHost(t, r, name), libvirt: virttest.Start(t, "qemu")}
		var err error
		if h.client, err = virt.Open("qemu:///system", virt.WithSocket(h.libvirt.Socket())); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = h.client.Close() })
		port := freePort(t)
		h.relay = testkit.NewRelay(t, net.JoinHostPort("127.0.0.2", port), net.JoinHostPort("127.0.0.1", port))
		if err := os.WriteFile(filepath.Join(h.dir, "hostd.yaml"), fmt.Appendf(nil, vmConfig, name, freePort(t), port, h.libvirt.Socket()), 0o600); err != nil {
			t.Fatal(err)
		}
		h.start()
		if i == 0 {
			h.must(ctx, "cluster", "init")
		} else {
			h.must(ctx, "cluster", "join", strings.TrimSpace(out[0].must(ctx, "cluster", "token", "create")))
		}
		for _, other := range out {
			h.libvirt.Peer("qemu+tls://"+other.name+"/system", other.libvirt)
			other.libvirt.Peer("qemu+tls://"+name+"/system", h.libvirt)
		}
		out = append(out, h)
	}
	testkit.Until(t, "all GPUs are known", func() error {
		gpus, err := out[len(out)-1].get(ctx, "gpus")
		if err == nil && len(gpus) != len(names) {
			err = fmt.Errorf("%v", names)
		}
		return err
	})
	return out
}

// offline makes a VM without network.
const offline = "offline"

// guest is a VM: files, a console and gpuguest. libvirt's model has its domain.
type guest struct {
	t       *testing.T
	root    root
	name    string
	uuid    string
	dir     string
	tree    *pcitest.Tree
	console *channeltest.Console
	log     *testkit.Log
	cmd     *exec.Cmd
	offline bool // it has no network
}

// newGuest makes a VM without cards that runs on the host. Its sessions' users are none of
// the hosts'. more are lines of its gpuguest.yaml; "offline" gives it no network.
func newGuest(t *testing.T, ctx context.Context, h *vmHost, name, uuid string, users int, more ...string) *guest {
	t.Helper()
	dir, err := os.MkdirTemp("", "gv") // short: sockets lie in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := rig.Passable(dir); err != nil {
		t.Fatal(err)
	}
	v := &guest{t: t, root: h.root, name: name, uuid: uuid, dir: dir, tree: pcitest.New(t), console: channeltest.New(t), log: &testkit.Log{}}
	v.console.Root(v.tree.Root, channel.Name)
	v.tree.Write("proc/sys/kernel/random/boot_id", "boot\n")
	v.tree.Write("proc/meminfo", "MemTotal: 1024 kB\nMemAvailable: 512 kB\n")
	if v.offline = slices.Contains(more, offline); v.offline {
		more = slices.DeleteFunc(more, func(line string) bool { return line == offline })
	}
	config := fmt.Sprintf("version: 1\nrunDir: %s/run\nexecutorUsers: %d-%d\n%s\n", dir, users, users+99, strings.Join(more, "\n"))
	if err := os.WriteFile(filepath.Join(dir, "gpuguest.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	v.start()
	t.Cleanup(func() {
		_ = v.cmd.Process.Signal(syscall.SIGTERM)
		_ = v.cmd.Wait()
		if t.Failed() {
			text := v.log.String()
			t.Logf("log of VM %s:\n%s", name, text[max(0, len(text)-6<<10):])
		}
	})
	d, err := h.client.Define(ctx, fmt.Appendf(nil, `<domain type='qemu'><name>%s</name><uuid>%s</uuid><memory unit='MiB'>64</memory><devices>
<channel type='unix'><source mode='bind' path='%s'/><target type='virtio' name='%s'/></channel></devices></domain>`, name, uuid, v.console.Socket(), channel.Name))
	if err == nil {
		d, err = h.client.Start(ctx, d)
	}
	if err == nil { // nothing of it is left where it has moved from
		err = h.client.Undefine(ctx, d)
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (v *guest) start() {
	v.t.Helper()
	v.cmd = exec.Command(v.root.bin("gpuguest"), "serve", "--vm", "--config", filepath.Join(v.dir, "gpuguest.yaml"), "--root", v.tree.Root)
	v.cmd.Stdout, v.cmd.Stderr = v.log, v.log
	v.cmd.WaitDelay = time.Second
	if v.offline { // not even a loopback interface that is up
		v.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	}
	if err := v.cmd.Start(); err != nil {
		v.t.Fatal(err)
	}
	testkit.Until(v.t, "gpuguest of "+v.name+" listens", func() error {
		return testkit.Want(rundir.Answers(filepath.Join(v.dir, "run", "guest.sock")))
	})
}

func (v *guest) kill() {
	_ = v.cmd.Process.Kill()
	_ = v.cmd.Wait()
}

// native is the environment of a program without gpuctl.
func (v *guest) native() []string {
	v.t.Helper()
	return v.environment("native", "libpocl.so.2")
}

func (v *guest) environment(name, library string) []string {
	v.t.Helper()
	dir := filepath.Join(v.dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		v.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "one.icd"), []byte(library+"\n"), 0o600); err != nil {
		v.t.Fatal(err)
	}
	return []string{"OCL_ICD_VENDORS=" + dir + "/", "HOME=" + v.dir, "PATH=" + os.Getenv("PATH"), "GPUCTL_SOCKET=" + filepath.Join(v.dir, "run", "app.sock")}
}

// run starts the stream program in the VM.
func (v *guest) run(ctx context.Context) *app {
	v.t.Helper()
	a := &app{out: &testkit.Log{}, ended: make(chan error, 1)}
	cmd := exec.CommandContext(ctx, v.root.program("stream"), "--kib", "64", "--stdin", "--verbose")
	cmd.Env = v.environment("vendors", filepath.Join(string(v.root), "lib", "libgpuctl-opencl.so"))
	cmd.Stdout, cmd.Stderr = a.out, a.out
	cmd.WaitDelay = 5 * time.Second
	in, err := cmd.StdinPipe()
	if err != nil {
		v.t.Fatal(err)
	}
	a.stop = func() { _ = in.Close() }
	if err := cmd.Start(); err != nil {
		v.t.Fatal(err)
	}
	go func() { a.ended <- cmd.Wait() }()
	v.t.Cleanup(a.stop)
	return a
}

// checkedIn ends the program, and compares its result with that of a run without gpuctl.
func (a *app) checkedIn(v *guest) {
	v.t.Helper()
	a.stop()
	if err := <-a.ended; err != nil {
		v.t.Fatalf("%v: %s", err, a.out)
	}
	m := regexp.MustCompile(`checksum (\d+) [0-9a-f]+`).FindStringSubmatch(a.out.String())
	if m == nil {
		v.t.Fatalf("no checksum: %s", a.out)
	}
	cmd := exec.Command(v.root.program("stream"), "--kib", "64", "--iterations", m[1])
	cmd.Env = v.native()
	if want, err := cmd.Output(); err != nil || !bytes.Contains(want, []byte(m[0])) {
		v.t.Errorf("%s, without gpuctl it is %s (%v)", m[0], want, err)
	}
}

// remotes are the VMs' remote GPUs, each with its host.
func (h *host) remotes(ctx context.Context) (map[string]string, error) {
	text, err := h.gpuctl(ctx, "-o", "json", "vms")
	if err != nil {
		return nil, err
	}
	var all struct {
		Machines []struct {
			Name   string `json:"name"`
			Host   string `json:"host"`
			Remote struct {
				GPU string `json:"gpu"`
			} `json:"remote"`
		} `json:"machines"`
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("%w: %s", err, text)
	}
	out := map[string]string{}
	for _, m := range all.Machines {
		out[m.Name] = m.Host + " " + m.Remote.GPU
	}
	return out, nil
}

const (
	webUUID = "11111111-2222-4333-8444-555555555501"
	dbUUID  = "11111111-2222-4333-8444-555555555502"
)

// refusedFor checks that a command is refused, and says why.
func refusedFor(t *testing.T, err error, says string) {
	t.Helper()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 3 || !strings.Contains(err.Error(), says) {
		t.Errorf("%v; it is to be refused with %q", err, says)
	}
}

// TestVMsWithoutCardsShareAGPUOfAnotherHost is the life of two VMs that have no card: they
// compute on one GPU of the other host, by memory, while each process that takes part is
// killed and the network is cut, and one of them moves.
func TestVMsWithoutCardsShareAGPUOfAnotherHost(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("gpuguest of hosts and of VMs need users of their own")
	}
	built := build(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	hosts := vmHosts(t, ctx, built, "a", "b")
	a, b := hosts[0], hosts[1]
	web := newGuest(t, ctx, a, "web", webUUID, 2130800000)
	db := newGuest(t, ctx, a, "db", dbUUID, 2130800100)

	// An application that begins before there is a GPU waits for it.
	first := web.run(ctx)
	_, err := a.gpuctl(ctx, "attach", "web", "--remote", "--min-memory", "100GiB")
	refusedFor(t, err, "are needed")
	if plan := a.must(ctx, "attach", "web", "b/one", "--remote", "--min-memory", "300MiB", "--plan"); !strings.Contains(plan, "the claim is released") {
		t.Errorf("plan: %s", plan)
	}
	b.must(ctx, "attach", "web", "b/one", "--remote", "--min-memory", "300MiB") // from any host
	first.goesOn(t)
	_, err = a.gpuctl(ctx, "attach", "web", "--remote", "--min-memory", "300MiB")
	refusedFor(t, err, "has b/one already")
	_, err = a.gpuctl(ctx, "attach", "db", "b/one", "--remote", "--min-memory", "900MiB") // beside the first
	refusedFor(t, err, "724 MiB free")
	a.must(ctx, "attach", "db", "--remote", "--min-memory", "300MiB", "--where", "id == 'b/one'")
	dying, die := context.WithCancel(ctx)
	defer die()
	other := db.run(dying)
	other.goesOn(t)
	if all, err := a.remotes(ctx); err != nil || all["web"] != "a b/one" || all["db"] != "a b/one" {
		t.Errorf("%v: %v", err, all)
	}
	if text := b.must(ctx, "inventory"); !strings.Contains(text, "vm:web") || !strings.Contains(text, "vm:db") {
		t.Errorf("inventory: %s", text)
	}
	// The sessions of a VM stay within its claim together.
	big := exec.CommandContext(ctx, built.program("stream"), "--kib", "400000", "--buffers", "1", "--iterations", "1")
	big.Env = web.environment("vendors", filepath.Join(string(built), "lib", "libgpuctl-opencl.so"))
	if out, err := big.CombinedOutput(); err == nil {
		t.Errorf("400 of 300 MiB: %s", out)
	}
	first.goesOn(t)

	// hostd of the VMs' host dies, and that of the host that lends. Sessions go on, and an
	// application that begins meanwhile waits.
	a.kill()
	first.goesOn(t)
	second := web.run(ctx)
	a.start()
	second.goesOn(t)
	b.kill()
	first.goesOn(t)
	b.start()
	other.goesOn(t)
	third := db.run(ctx)
	third.goesOn(t)
	third.checkedIn(db)

	before := b.relay.Passed()
	b.relay.Cut(true)
	web.kill() // gpuguest in the VM
	b.relay.Cut(false)
	web.start()
	first.goesOn(t)
	second.goesOn(t)
	if b.relay.Passed() == before {
		t.Error("no carrier has connected again")
	}
	second.checkedIn(web)

	// The VM moves. Nothing of it is frozen, and its claim is there already.
	a.must(ctx, "migrate", "web", "--to", "b")
	first.goesOn(t)
	testkit.Until(t, "the VM has its GPU on its new host", func() error {
		all, err := a.remotes(ctx)
		return errors.Join(err, testkit.Want(all["web"] == "b b/one", all))
	})
	fourth := web.run(ctx)
	fourth.goesOn(t)
	fourth.checkedIn(web)

	// It is taken back only when nothing computes there, or if that may be lost.
	_, err = a.gpuctl(ctx, "detach", "web")
	refusedFor(t, err, "compute there")
	first.goesOn(t)
	first.checkedIn(web)
	testkit.Until(t, "it is taken back", func() error {
		_, err := a.gpuctl(ctx, "detach", "web", "b/one")
		return err
	})
	a.must(ctx, "detach", "db", "--remote", "--unconfirmed")
	free(t, ctx, a.host, b.host) // although the application waits for its GPU
	die()
	<-other.ended
}
