package cuda

import (
	"context"
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
	in, out := filepath.Join(r.dir, "in"), filepath.Join(r.dir, "out")
	if err := unix.Mkfifo(in, 0o600); err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(programs+"/cudaloop", "--mib", "8")
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

// The gpuguest is killed while criu works: the next one waits for criu and takes it back.
func TestStoreOfAGuestThatDiesIsTakenBack(t *testing.T) {
	needRoot(t)
	r := newRig(t)
	r.script("kill -KILL $PPID; sleep 0.3")
	pid, works := r.apart()
	id := r.adopt(pid)
	r.m.Close()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(exe, "guest", r.dir, kindStore).CombinedOutput()
	if err == nil || len(out) > 0 {
		t.Fatalf("%v %s", err, out)
	}
	r.open()
	if s := r.settled(id); s.GetState() != gpuctlv1.SessionState_SESSION_STATE_RUNNING {
		t.Errorf("%v", s)
	}
	if _, err := os.Stat(filepath.Join(r.dir, "disk")); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
	works()
}

// TestProcessesGoToAFolderAndComeBack needs a criu that runs here.
func TestProcessesGoToAFolderAndComeBack(t *testing.T) {
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
	r := newRig(t, func(c *Config) { c.CRIU.Path = path; c.NoCanary = false })
	pid, works := r.apart()
	id := r.adopt(pid)
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
