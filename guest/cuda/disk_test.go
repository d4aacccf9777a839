package cuda

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/criu"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// realCRIU names a criu for the tests, if the one of the path does not run here.
const realCRIU = "GPUCTL_TEST_CRIU"

// script is the rig's criu. It refuses what is not in the order or not as it must be.
func (r *rig) script(dump string) {
	r.t.Helper()
	text := `#!/bin/sh
[ "$1" = --no-default-config ] && [ "$(id -u)" = 0 ] || exit 9
shift
cd "` + r.dir + `"
case $1 in
--version) echo "Version: 4.1.1";;
check) touch checked;;
dump)
	[ -e checked ] && [ $# = 11 ] && [ "$2 $4 $6 $7 $8 $9 ${11}" = "--images-dir --libdir --log-file dump.log -v2 --tree --leave-stopped" ] || exit 8
	[ "$(stat -c %a:%u "$3")" = 700:0 ] && [ "$3" = "$5" ] && pid=${10} && kill -STOP $pid && echo image > "$3/core.img" || exit 7
	` + dump + `;;
*) exit 6;;
esac
`
	if err := os.WriteFile(filepath.Join(r.dir, "criu"), []byte(text), 0o755); err != nil {
		r.t.Fatal(err)
	}
}

// apart starts cudaloop with its input and output in files, as a service would.
func (r *rig) apart() (pid int, works func()) {
	r.t.Helper()
	return r.apartAs(programs+"/cudaloop", "--mib", "8")
}

// apartAs does the same with a command that starts it.
func (r *rig) apartAs(path string, args ...string) (pid int, works func()) {
	r.t.Helper()
	in, out := filepath.Join(r.dir, "in"), filepath.Join(r.dir, "out")
	if err := unix.Mkfifo(in, 0o600); err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(path, args...)
	cmd.Env = environment(r.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var err error
	if cmd.Stdin, err = os.OpenFile(in, os.O_RDWR, 0); err != nil {
		r.t.Fatal(err)
	}
	f, err := os.Create(out)
	if err != nil {
		r.t.Fatal(err)
	}
	defer f.Close()
	cmd.Stdout = f
	// What the test itself was started with ties the program to others.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		r.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	pid = cmd.Process.Pid
	reaped := make(chan struct{})
	go func() { _ = cmd.Wait(); close(reaped) }()
	r.t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL); <-reaped })
	said := func(what string) {
		testkit.Until(r.t, "the program says "+what, func() error {
			b, err := os.ReadFile(out)
			if err != nil {
				return err
			}
			return testkit.Want(strings.Contains("\n"+string(b), "\n"+what), string(b))
		})
	}
	said("ready ")
	return pid, func() {
		r.t.Helper()
		if err := os.WriteFile(in, []byte("end\n"), 0); err != nil {
			r.t.Fatal(err)
		}
		said("ok ")
	}
}

func (r *rig) store(id, failAt string) *gpuctlv1.SwapResult {
	r.t.Helper()
	res, err := r.m.Suspend(context.Background(), &gpuctlv1.SuspendRequest{Session: id, File: filepath.Join(r.dir, "disk"), WithProcess: true, FailAt: failAt}, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return res
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root writes processes to a folder")
	}
}

func TestStoreIsRefusedBeforeAnythingIsTouched(t *testing.T) {
	needRoot(t)
	for name, c := range map[string]struct{ script, code, says string }{
		"missing": {"", ReasonCRIU, "criu"},
		"old":     {"echo Version: 3.17.1", ReasonCRIU, "3.17.1"},
		"kernel":  {"[ $2 = --version ] && echo Version: 4.1.1 && exit; echo 'Error (vdso.c): bounds'; exit 1", ReasonCRIU, "Error (vdso.c): bounds"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			pid, works := r.apart()
			id := r.adopt(pid)
			if c.script != "" {
				if err := os.WriteFile(filepath.Join(r.dir, "criu"), []byte("#!/bin/sh\n"+c.script+"\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			res := r.store(id, "")
			if !res.GetRefused() || !slices.Contains(codes(res.GetReasons()), c.code) || !strings.Contains(res.GetError(), c.says) {
				t.Errorf("%v", res)
			}
			works()
		})
	}
	t.Run("tied", func(t *testing.T) {
		r := newRig(t)
		r.script("")
		p := r.start(nil) // with pipes to this test
		id := r.adopt(p.pid)
		if err := os.Mkdir(filepath.Join(r.dir, "disk"), 0o700); err != nil {
			t.Fatal(err)
		}
		res := r.store(id, "")
		if got := codes(res.GetReasons()); !res.GetRefused() || !slices.Contains(got, ReasonTied) || !slices.Contains(got, ReasonFolder) {
			t.Errorf("%v", res)
		}
		p.works()
	})
}

func TestStoreThatFailsIsTakenBack(t *testing.T) {
	needRoot(t)
	for name, c := range map[string]struct{ dump, failAt, says string }{
		"criu fails": {`echo "Error (dump): no" > "$3/dump.log"; exit 1`, "", "Error (dump): no"},
		"seal":       {"", "seal", "injected"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.script(c.dump)
			pid, works := r.apart()
			id := r.adopt(pid)
			res := r.store(id, c.failAt)
			if !res.GetRolledBack() || !strings.Contains(res.GetError(), c.says) {
				t.Errorf("%v", res)
			}
			if _, err := os.Stat(filepath.Join(r.dir, "disk")); !os.IsNotExist(err) {
				t.Errorf("the folder is left: %v", err)
			}
			if s := r.session(id); s.GetState() != gpuctlv1.SessionState_SESSION_STATE_RUNNING {
				t.Errorf("%v", s)
			}
			works()
		})
	}
}

// The gpuguest is killed at every point of a store. The next one takes it back, or finishes
// it after the commit.
func TestStoreOfAGuestThatDiesIsTakenBackOrFinished(t *testing.T) {
	needRoot(t)
	for _, c := range []struct {
		point, dump string
		done        bool
	}{
		{"noted", "", false},
		{"folder", "", false},
		{"made", "", false},
		{"criu", "", false}, // it has noted criu, and not let it begin
		{"in criu", "kill -KILL $PPID; sleep 0.3", false},
		{"dumped", "", false},
		{"sealed", "", false},
		{"committed", "", true},
		{"ended", "", true},
	} {
		t.Run(c.point, func(t *testing.T) {
			r := newRig(t)
			r.script(c.dump)
			pid, works := r.apart()
			id := r.adopt(pid)
			r.m.Close()
			r.dies(kindStore, c.point)
			r.open()
			dir := filepath.Join(r.dir, "disk")
			if !c.done {
				if s := r.settled(id); s.GetState() != gpuctlv1.SessionState_SESSION_STATE_RUNNING {
					t.Errorf("%v", s)
				}
				if left, err := filepath.Glob(dir + "*"); err != nil || len(left) > 0 {
					t.Errorf("folders are left: %v, %v", left, err)
				}
				works()
				return
			}
			testkit.Until(t, "the session has ended", func() error { return testkit.Want(len(r.m.list()) == 0, r.m.list()) })
			if _, err := criu.Open(dir); err != nil {
				t.Error(err)
			}
			if p, err := holders.Pin(pid, 0); !errors.Is(err, holders.ErrGone) {
				t.Errorf("the process is there, too: %v, %v", p, err)
			}
		})
	}
}

// dies has a gpuguest begin an operation with the folder, and die at a point of it.
func (r *rig) dies(kind, point string) {
	r.t.Helper()
	exe, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	out, err := exec.Command(exe, "guest", r.dir, kind, point, r.cfg.CRIU.Path).CombinedOutput()
	if err == nil || len(out) > 0 {
		r.t.Fatalf("%v %s", err, out)
	}
}

// Who is killed while it is stopped, after its folder is whole, is not lost with the folder.
func TestStoreWhoseProcessesAreGoneIsFinished(t *testing.T) {
	needRoot(t)
	r := newRig(t)
	r.script("")
	pid, _ := r.apart()
	id := r.adopt(pid)
	r.m.Close()
	r.dies(kindStore, "sealed")
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r.open()
	testkit.Until(t, "the session has ended", func() error { return testkit.Want(len(r.m.list()) == 0, r.m.list()) })
	if m, err := criu.Open(filepath.Join(r.dir, "disk")); err != nil || m.Session != id {
		t.Errorf("%v, %v", m, err)
	}
}

// Its user lets a stopped process go on: it is further than what was written.
func TestStoreOfAProcessThatGoesOnIsTakenBack(t *testing.T) {
	needRoot(t)
	r := newRig(t)
	r.script("kill -CONT $pid")
	pid, works := r.apart()
	res := r.store(r.adopt(pid), "")
	if !res.GetRolledBack() || !strings.Contains(res.GetError(), "let go on meanwhile") {
		t.Errorf("%v", res)
	}
	works()
}

// A folder that somebody else makes in the middle stays theirs.
func TestStoreLeavesAFolderOfOthers(t *testing.T) {
	needRoot(t)
	dir := ""
	r := newRig(t, func(c *Config) {
		c.at = func(point string) {
			if point == "folder" {
				_ = os.Mkdir(dir, 0o700)
			}
		}
	})
	r.script("")
	dir = filepath.Join(r.dir, "disk")
	pid, works := r.apart()
	if res := r.store(r.adopt(pid), ""); !res.GetRolledBack() || !strings.Contains(res.GetError(), "exists") {
		t.Errorf("%v", res)
	}
	if left, err := filepath.Glob(dir + "*"); err != nil || len(left) != 1 || left[0] != dir {
		t.Errorf("%v, %v", left, err)
	}
	works()
}

// TestProcessesGoToAFolderAndComeBack needs a criu that runs here.
func TestProcessesGoToAFolderAndComeBack(t *testing.T) {
	r, id, pid, works := realRig(t)
	r.m.cfg.NoCanary = false
	dir := filepath.Join(r.dir, "disk")
	revive := func(failAt string, to ...string) *gpuctlv1.SwapResult {
		t.Helper()
		target := &gpuctlv1.Target{}
		for _, u := range to {
			target.Driver = append(target.Driver, &gpuctlv1.DriverGPU{Uuid: u})
		}
		res, err := r.m.Revive(context.Background(), dir, target, failAt, nil)
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	free := func() {
		t.Helper()
		testkit.Until(t, "the pid is free", func() error {
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
			return testkit.Want(!(holders.Roots{}).Taken(pid), pid)
		})
	}
	if res := r.store(id, ""); res.GetError() != "" || res.GetSession().GetSuspendedTo() != dir {
		t.Fatalf("%v", res)
	}
	free()
	testkit.Until(t, "the session has ended", func() error { return testkit.Want(len(r.m.list()) == 0, r.m.list()) })

	// Of another driver, or on a card of another chip: nothing is made.
	r.configure("driver 581.1")
	if res := revive(""); !res.GetRefused() || !slices.Contains(codes(res.GetReasons()), ReasonDriver) {
		t.Errorf("%v", res)
	}
	r.configure("gpu " + string(other) + " 20b010de 00000000:03:00.0 256")
	if res := revive("", string(other)); !res.GetRefused() || !slices.Contains(codes(res.GetReasons()), ReasonChip) {
		t.Errorf("%v", res)
	}
	r.configure()
	// One that fails ends what was made, and can be repeated.
	if res := revive("restore"); !res.GetRolledBack() {
		t.Errorf("%v", res)
	}
	free()
	if len(r.m.list()) != 0 {
		t.Errorf("%v", r.m.list())
	}
	began := time.Now()
	res := revive("", string(cardB))
	if res.GetError() != "" {
		t.Fatalf("%v", res)
	}
	t.Log("made again in", time.Since(began))
	if got := r.on(pid); len(got) != 1 || string(got[0]) != string(cardB) {
		t.Errorf("it is on %v", got)
	}
	if s := r.session(id); s.GetState() != gpuctlv1.SessionState_SESSION_STATE_RUNNING || s.GetPid() != uint32(pid) {
		t.Errorf("%v", s)
	}
	if _, err := r.m.Revive(context.Background(), dir, nil, "", nil); err == nil || !strings.Contains(err.Error(), "resumed already") {
		t.Errorf("a second time: %v", err)
	}
	works()
	free()
}

// The gpuguest is killed at every point of a resume from a folder, and criu in the middle of
// both. It needs a criu that runs here.
func TestKilledResumeFromAFolderIsTakenBackOrFinished(t *testing.T) {
	r, id, pid, works := realRig(t)
	dir := filepath.Join(r.dir, "disk")
	if res := r.store(id, ""); res.GetError() != "" {
		t.Fatalf("%v", res)
	}
	gone := func(what string) {
		t.Helper()
		testkit.Until(t, "the session is gone and its pid is free after "+what, func() error {
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
			return testkit.Want(len(r.m.list()) == 0 && !(holders.Roots{}).Taken(pid), r.m.list())
		})
		if _, err := criu.Open(dir); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	gone("the store")
	for _, point := range []string{"noted", "taken", "criu", "made", "started", "before restore", "after restore"} {
		r.m.Close()
		r.dies(kindRevive, point)
		r.open()
		gone(point)
	}
	// criu is killed: what it has begun is ended, by the same gpuguest.
	for _, after := range []time.Duration{5 * time.Millisecond, 20 * time.Millisecond, 40 * time.Millisecond} {
		if res := r.reviveKilled(dir, after); res.GetError() == "" {
			t.Skip("criu was faster than its killer")
		} else if !res.GetRolledBack() {
			t.Errorf("%v", res)
		}
		gone("criu was killed after " + after.String())
	}
	r.m.Close()
	r.dies(kindRevive, "after unlock")
	r.open()
	if s := r.settled(id); s.GetState() != gpuctlv1.SessionState_SESSION_STATE_RUNNING {
		t.Errorf("%v", s)
	}
	if _, err := criu.Open(dir); err == nil || !strings.Contains(err.Error(), "resumed already") {
		t.Errorf("%v", err)
	}
	works()
}

// reviveKilled resumes from a folder while somebody kills criu.
func (r *rig) reviveKilled(dir string, after time.Duration) *gpuctlv1.SwapResult {
	r.t.Helper()
	r.m.cfg.at = func(point string) {
		if point != "criu" {
			return
		}
		for _, s := range r.m.list() {
			pid := s.rec.Op.Disk.CRIU
			time.AfterFunc(after, func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
		}
	}
	defer func() { r.m.cfg.at = nil }()
	res, err := r.m.Revive(context.Background(), dir, nil, "", nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return res
}

// A criu that is killed while it writes a process leaves it as it was, or the store fails.
func TestKilledCRIULeavesTheProgramWhole(t *testing.T) {
	r, id, _, works := realRig(t)
	dir := filepath.Join(r.dir, "disk")
	failed := 0
	for _, after := range []time.Duration{2 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond, 35 * time.Millisecond} {
		r.m.cfg.at = func(point string) {
			if point == "criu" {
				s, _ := r.m.lookup(id)
				pid := s.rec.Op.Disk.CRIU
				time.AfterFunc(after, func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
			}
		}
		res := r.store(id, "")
		if res.GetError() == "" {
			break // criu was faster
		}
		failed++
		if !res.GetRolledBack() {
			t.Fatalf("after %v: %v", after, res)
		}
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("the folder is left: %v", err)
		}
	}
	if len(r.m.list()) == 0 {
		t.Skipf("criu was faster than its killer, after %d", failed)
	}
	works()
}

// realRig is a rig with a criu that runs here, and a program in it.
func realRig(t *testing.T) (r *rig, id string, pid int, works func()) {
	t.Helper()
	needRoot(t)
	path := os.Getenv(realCRIU)
	if v, err := (criu.Program{Path: path}).Check(t.Context()); err != nil {
		t.Skipf("no criu here that serves: %v", err)
	} else {
		t.Log("criu", v)
	}
	// What criu makes is to be this process's child in the end, so that it can be reaped.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	r = newRig(t, func(c *Config) { c.CRIU.Path = path })
	pid, works = r.apart()
	return r, r.adopt(pid), pid, works
}
