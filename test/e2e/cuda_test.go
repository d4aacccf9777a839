package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/test/rig"
)

// realCRIU names a criu if the one of the path does not run here.
const realCRIU = "GPUCTL_TEST_CRIU"

// cudaHost is a host with two cards of the fake driver, and a CUDA program on it.
type cudaHost struct {
	*rig.Rig
	t       *testing.T
	dir     string
	env     []string
	pid     int
	session string
}

func newCUDAHost(t *testing.T) *cudaHost {
	t.Helper()
	dir, err := os.MkdirTemp("", "gx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	root, err := rig.Root()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("make", "-s", "-C", filepath.Join(root, "test/cuda")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	text := "cuda 13000\ndriver 580.159.04\n"
	for i := range 2 {
		text += fmt.Sprintf("gpu GPU-00000000-0000-4000-8000-00000000000%d 233010de 0000:%02x:00.0 256\n", i+1, 10+i)
	}
	for _, name := range []string{"dev", "cards", "procs", "run"} {
		err = errors.Join(err, os.Mkdir(filepath.Join(dir, name), 0o755))
	}
	for _, name := range []string{"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"} {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, "dev", name), nil, 0o666))
	}
	if err := errors.Join(err, os.WriteFile(filepath.Join(dir, "config"), []byte(text), 0o644)); err != nil {
		t.Fatal(err)
	}
	h := &cudaHost{t: t, dir: dir, env: []string{
		"GPUCTL_FAULTS=1", "GPUCTL_FAKE_CUDA=" + dir, "GPUCTL_DRIVER_NODES=" + filepath.Join(dir, "dev"),
		"LD_LIBRARY_PATH=" + filepath.Join(root, "test/cuda/bin/fake"),
	}}
	if criu := os.Getenv(realCRIU); criu != "" {
		h.env = append(h.env, "PATH="+filepath.Dir(criu)+":"+os.Getenv("PATH"))
	}
	h.open()
	t.Cleanup(func() {
		h.Close()
		if b, _ := os.ReadFile(filepath.Join(dir, "violations")); len(b) > 0 {
			t.Errorf("the driver's rules were broken:\n%s", b)
		}
		if t.Failed() {
			t.Logf("log of hostd:\n%s\nlog of gpuguest:\n%s", tail(h.Log(), 8<<10), tail(h.GuestLog(), 8<<10))
		}
	})
	return h
}

// open starts hostd, for the first time or again.
func (h *cudaHost) open() {
	h.t.Helper()
	r, err := rig.Start(h.t.Context(), rig.Options{Dir: filepath.Join(h.dir, "run"), Config: "version: 1\ndiscover: false\n", Env: h.env})
	if err != nil {
		h.t.Fatal(err)
	}
	h.Rig = r
}

func (h *cudaHost) client() gpuctlv1connect.HostServiceClient {
	return gpuctlv1connect.NewHostServiceClient(unixrpc.Client(filepath.Join(h.Dir, "hostd.sock")), "http://hostd")
}

// start starts the program as a service would: with nothing but files.
func (h *cudaHost) start() {
	h.t.Helper()
	// What criu makes is to be this process's child in the end, so that it can be reaped.
	err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	in := filepath.Join(h.dir, "in")
	if err = errors.Join(err, unix.Mkfifo(in, 0o600)); err != nil {
		h.t.Fatal(err)
	}
	root, _ := rig.Root()
	cmd := exec.Command(filepath.Join(root, "test/cuda/bin/cudaloop"), "--mib", "8", "--pause", "3000", "--say", "10")
	cmd.Env = append(os.Environ(), h.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if cmd.Stdin, err = os.OpenFile(in, os.O_RDWR, 0); err != nil {
		h.t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(h.dir, "out"))
	if err != nil {
		h.t.Fatal(err)
	}
	defer f.Close()
	cmd.Stdout = f
	if err := errors.Join(unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC), cmd.Start()); err != nil {
		h.t.Fatal(err)
	}
	h.pid = cmd.Process.Pid
	go func() { _ = cmd.Wait() }()
	h.t.Cleanup(func() { // it may have ended, and its id may be another's: criu makes it anew, so there is no other handle
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", h.pid)); err == nil && exe == cmd.Path {
			_ = syscall.Kill(h.pid, syscall.SIGKILL)
		}
	})
	h.more()
}

func (h *cudaHost) output() string {
	b, err := os.ReadFile(filepath.Join(h.dir, "out"))
	if err != nil {
		h.t.Fatal(err)
	}
	return string(b)
}

// more waits until the program has computed more.
func (h *cudaHost) more() {
	h.t.Helper()
	before := strings.Count(h.output(), "round ")
	testkit.Until(h.t, "the program computes", func() error {
		now := strings.Count(h.output(), "round ")
		return testkit.Want(now > before+1, now)
	})
}

// cut is an operation that is killed.
type cut struct {
	verb string // suspend, resume, migrate, store or revive
	step string
	host bool // hostd is killed, not gpuguest
}

func (c cut) String() string {
	return fmt.Sprintf("%s, %s is killed at %s", c.verb, map[bool]string{false: "gpuguest", true: "hostd"}[c.host], c.step)
}

// run begins the operation and has it killed. What it says of itself is not looked at.
func (h *cudaHost) run(c cut) {
	h.t.Helper()
	fault := ""
	if !c.host && c.step != "" {
		fault = "kill_self@" + c.step
	}
	ctx, cancel := context.WithCancel(h.t.Context())
	defer cancel()
	var stream *connect.ServerStreamForClient[gpuctlv1.OperationUpdate]
	var err error
	switch c.verb {
	case "suspend", "store":
		req := &gpuctlv1.HostSuspendRequest{Session: h.session, FailAt: fault}
		if c.verb == "store" {
			req.Folder = h.folder()
		}
		stream, err = h.client().Suspend(ctx, connect.NewRequest(req))
	case "resume":
		stream, err = h.client().Resume(ctx, connect.NewRequest(&gpuctlv1.HostResumeRequest{Session: h.session, FailAt: fault}))
	case "revive":
		stream, err = h.client().Resume(ctx, connect.NewRequest(&gpuctlv1.HostResumeRequest{Folder: h.folder(), FailAt: fault}))
	default:
		stream, err = h.client().Swap(ctx, connect.NewRequest(&gpuctlv1.HostSwapRequest{
			Session: h.session, Verb: gpuctlv1.Verb_VERB_MIGRATE, To: h.elsewhere(), FailAt: fault,
		}))
	}
	if err != nil {
		h.t.Fatalf("%v: %v", c, err)
	}
	defer stream.Close()
	for stream.Receive() {
		p := stream.Msg().GetProgress()
		if r := p.GetResult(); r != nil && c.step != "" && !c.host && r.GetRefused() {
			h.t.Errorf("%v: %s", c, r.GetError())
		}
		if c.host && p.GetStep() == c.step {
			if err := syscall.Kill(h.Pid(), syscall.SIGKILL); err != nil {
				h.t.Fatal(err)
			}
			c.host = false
			defer h.open()
		}
	}
	if c.host {
		h.t.Logf("%v: it was faster", c)
	}
}

func (h *cudaHost) folder() string { return filepath.Join(h.dir, "disk") }

// owners returns which GPUs somebody has.
func (h *cudaHost) owners() (gpus []string) {
	h.t.Helper()
	res, err := h.client().GetInventory(h.t.Context(), connect.NewRequest(&gpuctlv1.GetInventoryRequest{}))
	if err != nil {
		h.t.Fatal(err)
	}
	for _, g := range res.Msg.GetGpus() {
		if len(g.GetOwners()) > 1 {
			h.t.Errorf("%s has two owners: %v", g.GetId(), g.GetOwners())
		}
		if len(g.GetOwners()) > 0 {
			gpus = append(gpus, g.GetId())
		}
	}
	return gpus
}

// elsewhere is the GPU that the session is not on.
func (h *cudaHost) elsewhere() string {
	h.t.Helper()
	for _, gpu := range []string{"0000:0a:00.0", "0000:0b:00.0"} {
		if !slices.Contains(h.owners(), gpu) {
			return gpu
		}
	}
	h.t.Fatal("no GPU is free")
	return ""
}

// settled waits until the session rests, and returns where: "running", "suspended", or
// "folder" if it is gone and its folder is whole.
func (h *cudaHost) settled(c cut) (at string) {
	h.t.Helper()
	testkit.Until(h.t, "the session rests after "+c.String(), func() error {
		at = ""
		if _, err := unixrpc.PeerOf(filepath.Join(h.Dir, "guest.sock")); err != nil {
			return err
		}
		res, err := h.client().ListSessions(h.t.Context(), connect.NewRequest(&gpuctlv1.HostListSessionsRequest{}))
		if err != nil {
			return err
		}
		var gpu string
		for _, s := range res.Msg.GetSessions() {
			gpu = s.GetTarget().GetGpu()
			switch {
			case s.GetId() != h.session:
				return fmt.Errorf("another session: %v", s)
			case s.GetState() == gpuctlv1.SessionState_SESSION_STATE_RUNNING:
				at = "running"
			case s.GetState() == gpuctlv1.SessionState_SESSION_STATE_SUSPENDED:
				at = "suspended"
			default:
				return fmt.Errorf("%v: %s", s.GetState(), s.GetMessage())
			}
		}
		owned := h.owners()
		switch at {
		case "running":
			return testkit.Want(slices.Equal(owned, []string{gpu}), fmt.Sprint(owned, " are owned, it is on ", gpu))
		case "suspended":
			return testkit.Want(len(owned) == 0, owned)
		}
		if _, err := os.Stat(filepath.Join(h.folder(), "manifest.json")); err != nil {
			return err
		}
		_, _ = unix.Wait4(h.pid, nil, unix.WNOHANG, nil)
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", h.pid)); !errors.Is(err, fs.ErrNotExist) {
			return errors.New("the process is there, and is in the folder, too")
		}
		at = "folder"
		return testkit.Want(len(owned) == 0, owned)
	})
	return at
}

// bring brings the session to where an operation begins, undisturbed.
func (h *cudaHost) bring(verb string) {
	h.t.Helper()
	want := map[string]string{"resume": "suspended", "revive": "folder"}[verb]
	if want == "" {
		want = "running"
	}
	for range 3 {
		at := h.settled(cut{verb: verb, step: "nothing"})
		switch {
		case at == want:
			return
		case at == "suspended":
			h.run(cut{verb: "resume"})
		case at == "folder":
			h.run(cut{verb: "revive"})
		case want == "suspended":
			h.run(cut{verb: "suspend"})
		default:
			_ = os.RemoveAll(h.folder()) // resumed already
			h.run(cut{verb: "store"})
		}
	}
	h.t.Fatalf("the session does not become %s", want)
}

// adopt adopts the program while gpuguest or hostd is killed. In the end it is one session.
func (h *cudaHost) adopt() {
	h.t.Helper()
	for _, host := range []bool{false, true} {
		victim := h.Pid()
		testkit.Until(h.t, "gpuguest answers", func() error {
			peer, err := unixrpc.PeerOf(filepath.Join(h.Dir, "guest.sock"))
			if err == nil && !host {
				victim = int(peer.PID)
			}
			return err
		})
		said := make(chan error, 1)
		go func() {
			_, err := h.client().Adopt(context.Background(), connect.NewRequest(&gpuctlv1.HostAdoptRequest{Pid: uint32(h.pid)}))
			said <- err
		}()
		if err := syscall.Kill(victim, syscall.SIGKILL); err != nil {
			h.t.Fatal(err)
		}
		h.t.Logf("adopt, killed: %v", <-said)
		if host {
			h.open()
		}
	}
	testkit.Until(h.t, "the program is a session", func() error {
		res, err := h.client().Adopt(h.t.Context(), connect.NewRequest(&gpuctlv1.HostAdoptRequest{Pid: uint32(h.pid)}))
		if err != nil {
			return err
		}
		if len(res.Msg.GetSessions()) != 1 {
			return fmt.Errorf("%v", res.Msg)
		}
		h.session = res.Msg.GetSessions()[0].GetId()
		return nil
	})
	h.settled(cut{verb: "adopt", step: "any"})
}

// A CUDA program bears that gpuguest or hostd is killed at any step of any operation: it is
// done or taken back, no GPU has two owners, and its result is right.
func TestCUDASessionBearsKillsAtEveryStep(t *testing.T) {
	cuts := []cut{}
	add := func(verb string, steps ...string) {
		for _, step := range steps {
			cuts = append(cuts, cut{verb, step, false}, cut{verb, step, true})
		}
	}
	add("suspend", "check", "prepare", "lock", "checkpoint", "mark")
	add("resume", "check", "prepare", "restore", "unlock")
	add("migrate", "check", "prepare", "lock", "checkpoint", "restore", "unlock")
	runKills(t, cuts)
}

// The same of suspends to a folder and resumes from one. It needs root, and a criu that runs
// here.
func TestCUDASessionInAFolderBearsKillsAtEveryStep(t *testing.T) {
	criu := os.Getenv(realCRIU)
	if criu == "" {
		criu = "criu"
	}
	if out, err := exec.Command(criu, "check").CombinedOutput(); err != nil || os.Geteuid() != 0 {
		t.Skipf("no criu here that serves, or not root: %v: %s", err, tail(string(out), 200))
	}
	cuts := []cut{}
	for _, host := range []bool{false, true} {
		for _, step := range []string{"checkpoint", "dump", "seal", "end"} {
			cuts = append(cuts, cut{"store", step, host})
		}
		for _, step := range []string{"check", "make", "restore", "unlock"} {
			cuts = append(cuts, cut{"revive", step, host})
		}
	}
	runKills(t, cuts)
}

func runKills(t *testing.T, cuts []cut) {
	t.Helper()
	h := newCUDAHost(t)
	h.start()
	h.adopt()
	for _, c := range cuts {
		h.bring(c.verb)
		if c.verb == "store" {
			_ = os.RemoveAll(h.folder())
		}
		h.run(c)
		at := h.settled(c)
		t.Logf("%v: %s", c, at)
		if at == "running" {
			h.more()
		}
	}
	h.bring("migrate") // running
	if err := os.WriteFile(filepath.Join(h.dir, "in"), []byte("end\n"), 0); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "the program ends", func() error {
		out := h.output()
		return testkit.Want(strings.Contains(out, "\nok ") || strings.Contains(out, "\nbad "), tail(out, 100))
	})
	if out := h.output(); !strings.Contains(out, "\nok ") {
		t.Error(tail(out, 200))
	}
}
