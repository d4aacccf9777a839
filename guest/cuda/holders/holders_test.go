package holders

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// tree makes a look from lines "PID PARENT GROUP SESSION TTY CGROUP [holds [USER]]".
func tree(lines ...string) *Look {
	l := &Look{Processes: map[int]*Process{}, Holders: map[int]*Holder{}}
	for _, line := range lines {
		p, group, holds, uid := &Process{}, "", "", uint32(0)
		_, _ = fmt.Sscan(line, &p.PID, &p.Parent, &p.Group, &p.Session, &p.Terminal, &group, &holds, &uid)
		p.Start = uint64(p.PID)
		l.Processes[p.PID] = p
		if holds != "" {
			l.Holders[p.PID] = &Holder{Process: *p, UID: uid, Cgroup: group, Nodes: []string{"nvidia0"}}
		}
	}
	return l
}

func TestJobs(t *testing.T) {
	for _, c := range []struct {
		name string
		look *Look
		want string // jobs as ROOT:PID+PID
	}{
		{"two programs of a shell at a terminal", tree(
			"1 0 1 1 0 /", "10 1 10 10 5 /u", "20 10 20 10 5 /u holds", "30 10 30 10 5 /u holds",
		), "20:20 30:30"},
		{"a pipeline", tree("10 1 10 10 5 /u", "20 10 20 10 5 /u holds", "21 10 20 10 5 /u holds"), "20:20+21"},
		{"workers of a launcher, each in a session of its own", tree(
			"10 1 10 10 5 /u", "20 10 20 10 5 /u", "21 20 21 21 0 /u holds", "22 20 22 22 0 /u holds",
		), "20:21+22"},
		{"services of one manager", tree(
			"1 0 1 1 0 /", "10 1 10 10 0 /m", "20 10 20 20 0 /a holds", "30 10 30 30 0 /b holds",
		), "20:20 30:30"},
		{"daemons of the system's first process", tree("1 0 1 1 0 /", "20 1 20 20 0 / holds", "30 1 30 30 0 / holds"), "20:20 30:30"},
		{"one manager that starts programs of two users", tree(
			"1 0 1 1 0 /", "10 1 10 10 0 /m", "20 10 20 20 0 /m holds 1000", "30 10 30 30 0 /m holds 1001", "31 10 31 31 0 /m holds 1001",
		), "20:20 10:30+31"},
		{"a forked child", tree("1 0 1 1 0 /", "20 1 20 20 0 / holds", "21 20 21 21 0 / holds"), "20:20+21"},
		{"a grandchild behind one that holds nothing", tree("1 0 1 1 0 /", "20 1 20 20 0 / holds", "21 20 21 21 0 /", "22 21 22 22 0 / holds"), "20:20+22"},
	} {
		var got []string
		for _, j := range c.look.Jobs() {
			var pids []string
			for _, h := range j.Holders {
				pids = append(pids, fmt.Sprint(h.PID))
			}
			got = append(got, fmt.Sprintf("%d:%s", j.Root.PID, strings.Join(pids, "+")))
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%s: %s, want %s", c.name, s, c.want)
		}
	}
}

func TestJobOfALauncherThatHoldsNothing(t *testing.T) {
	l := tree("1 0 1 1 0 /", "5 1 5 5 0 /", "20 5 20 5 0 /u", "21 20 21 21 0 /u holds", "22 20 22 22 0 /u holds", "30 5 30 30 0 /w holds")
	j := l.JobOf(20)
	if j == nil || j.Root.PID != 20 || len(j.Holders) != 2 {
		t.Errorf("%+v", j)
	}
	if j := l.JobOf(22); j == nil || j.Root.PID != 20 || !j.Has(21) {
		t.Errorf("%+v", j)
	}
	if j := l.JobOf(5); j == nil || len(j.Holders) != 3 {
		t.Errorf("%+v", j)
	}
	if j := l.JobOf(1); j != nil { // all of the system is no job
		t.Errorf("%+v", j)
	}
	if j := l.JobOf(99); j != nil {
		t.Errorf("%+v", j)
	}
}

// A real process is found with its nodes, open and mapped.
func TestTakeFindsNodes(t *testing.T) {
	dir := t.TempDir()
	dev := filepath.Join(dir, "dev")
	if err := os.Mkdir(dev, 0o755); err != nil {
		t.Fatal(err)
	}
	node := filepath.Join(dev, "nvidia0")
	if err := os.WriteFile(node, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "1000")
	f, err := os.Open(node)
	if err != nil {
		t.Fatal(err)
	}
	cmd.ExtraFiles = []*os.File{f}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f.Close()
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	l, err := Roots{Dev: dev}.Take(true)
	if err != nil {
		t.Fatal(err)
	}
	h := l.Holders[cmd.Process.Pid]
	if h == nil || !slices.Equal(h.Nodes, []string{"nvidia0"}) || !slices.Equal(h.GPUs(), []int{0}) {
		t.Errorf("%+v", h)
	}
	// A plain file that somebody has named so is none of the driver's.
	if l, err = (Roots{}).Take(false); err != nil || l.Holders[cmd.Process.Pid] != nil {
		t.Errorf("%v, %v", l.Holders[cmd.Process.Pid], err)
	}
	if _, err := Pin(cmd.Process.Pid, 1); err == nil {
		t.Error("a process with another start time was taken for it")
	}
	p, err := Pin(cmd.Process.Pid, 0)
	if err != nil || p.Ended() {
		t.Fatal(p, err)
	}
	defer p.Close()
	_ = cmd.Process.Kill()
	<-p.Done()
	if !p.Ended() {
		t.Error("it has ended, and is not known to")
	}
}

// A number that a process had may be a thread's now: the process has ended.
func TestThreadIsNoProcess(t *testing.T) {
	ids, err := (Roots{}).Threads(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	threads := 0
	for _, id := range ids {
		if id == os.Getpid() {
			continue
		}
		threads++
		if _, err := Pin(id, 0); !errors.Is(err, ErrGone) {
			t.Errorf("%v", err)
		}
		if !(Roots{}).Taken(id) {
			t.Errorf("thread %d does not take its number", id)
		}
	}
	if threads == 0 {
		t.Error("no threads")
	}
	layout, err := (Roots{}).Layout(os.Getpid())
	if err != nil || strings.Count(layout, "-") != 9 || strings.HasPrefix(layout, "0-") {
		t.Errorf("%q, %v", layout, err)
	}
}

func TestNodeNames(t *testing.T) {
	device, plain := func() bool { return true }, func() bool { return false }
	for _, c := range []struct {
		path string
		is   func() bool
		want string
	}{
		{"/dev/nvidia0", device, "nvidia0"},
		{"/dev/nvidia0 (deleted)", device, "nvidia0"},
		{"/dev/nvidia-caps/nvidia-cap1", device, "nvidia-caps/nvidia-cap1"},
		{"/run/jail/dev/nvidiactl", device, "nvidiactl"},
		{"/run/jail/dev/nvidiactl", plain, ""},
		{"/dev/null", device, ""},
		{"/home/x/nvidia0", device, ""},
		{"socket:[1]", device, ""},
	} {
		if got, ok := (Roots{}).node(c.path, c.is); ok != (c.want != "") || ok && got != c.want {
			t.Errorf("%s: %q, %v", c.path, got, ok)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add("7 (a) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22")
	f.Add("7 () Z")
	f.Add(")(")
	f.Fuzz(func(t *testing.T, s string) {
		if p, err := parseStat(7, s); err == nil && p.PID != 7 {
			t.Error(p)
		}
	})
}

func TestMain(m *testing.M) {
	testkit.HalfMain()
	os.Exit(m.Run())
}

// A program's first thread may end, and the others compute on.
func TestProcessWhoseFirstThreadHasEndedHasItsNodes(t *testing.T) {
	dev := t.TempDir()
	f, err := os.Create(filepath.Join(dev, "nvidia0"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	t.Setenv("GPUCTL_TOKEN", "its token")
	pid := testkit.Half(t, nil, f)
	r := Roots{Dev: dev}
	l, err := r.Take(true)
	if err != nil {
		t.Fatal(err)
	}
	if h := l.Holders[pid]; h == nil || !slices.Equal(h.Nodes, []string{"nvidia0"}) || h.Command == "" {
		t.Errorf("%+v", h)
	}
	if v := r.Variable(pid, "GPUCTL_TOKEN"); v != "its token" {
		t.Errorf("its token is %q", v)
	}
	p, err := Pin(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if p.Ended() {
		t.Error("it is said to have ended")
	}
}

// Anybody can have very many mappings, and nobody's card must be kept from being taken away by that.
func TestProcessWithManyMappingsKeepsNoLookFromBeingTaken(t *testing.T) {
	dir, dev := t.TempDir(), t.TempDir()
	for range 8 {
		dir = filepath.Join(dir, strings.Repeat("d", 250))
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	size := os.Getpagesize()
	mapped := func(path string, n int) {
		t.Helper()
		if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for range n {
			b, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Munmap(b) })
		}
	}
	mapped(filepath.Join(dir, "file"), 40000)
	mapped(filepath.Join(dev, "nvidia0"), 1)
	l, err := Roots{Dev: dev}.Take(true)
	if err != nil {
		t.Fatal(err)
	}
	if h := l.Holders[os.Getpid()]; h == nil || !slices.Equal(h.Mapped, []string{"nvidia0"}) {
		t.Errorf("%+v", h)
	}
}

// A process that can't be looked at may have a card. It must not be taken for one that has ended.
func TestProcessThatCannotBeReadIsNotTakenForEnded(t *testing.T) {
	proc := t.TempDir()
	if err := os.MkdirAll(filepath.Join(proc, "7", "stat"), 0o700); err != nil { // no file, as if it could not be opened
		t.Fatal(err)
	}
	if l, err := (Roots{Proc: proc}).Take(false); err == nil {
		t.Errorf("%+v", l)
	}
}
