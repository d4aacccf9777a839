package confine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestParseRange(t *testing.T) {
	if r, err := ParseRange(DefaultRange().String()); err != nil || r != DefaultRange() {
		t.Error(r, err)
	}
	for _, in := range []string{"", "5", "a-b", "2000-1999", "2000-2005", "0-100", "500-5000", "65000-66000", "65534-70000", "65535-70000", "4294960000-4294967295", "1-99999999999"} {
		if r, err := ParseRange(in); err == nil {
			t.Errorf("%q is %v", in, r)
		}
	}
	// Not systemd's dynamic users, not those of /etc/subuid, nor systemd's containers.
	for _, taken := range []Range{{0, 99999}, {100000, 600100000}, {524288, 1879048191}, {1 << 31, ^uint32(0)}} {
		if DefaultRange().First <= taken.Last && DefaultRange().Last >= taken.First {
			t.Errorf("the default range is in %v", taken)
		}
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to give folders away")
	}
}

func folder(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "x")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestEachFolderHasAUserOfItsOwn(t *testing.T) {
	needRoot(t)
	taken := filepath.Join(t.TempDir(), "taken")
	r := Range{0x7f200000, 0x7f20000f}
	have := map[uint32]string{}
	for range 15 { // the first is reserved
		// Whoever comes first, and however many there are: a folder has one user.
		dir := folder(t)
		got := make([]uint32, 8)
		var wg sync.WaitGroup
		for i := range got {
			wg.Go(func() {
				u := &Users{Range: r, Dir: taken}
				uid, err := u.Take(dir)
				if err != nil {
					t.Error(err)
				}
				got[i] = uid
			})
		}
		wg.Wait()
		owner, err := Owner(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, uid := range got {
			if uid != owner || uid <= r.First || uid > r.Last || have[uid] != "" {
				t.Fatalf("user %d, the folder is %d's; it was %q", uid, owner, have[uid])
			}
		}
		have[owner] = dir
	}
	u := &Users{Range: r, Dir: taken}
	last := folder(t)
	if _, err := u.Take(last); !errors.Is(err, ErrNoUser) {
		t.Fatal(err)
	}
	// A user that was released, and one whose folder is missing, can be taken again.
	var freed []uint32
	for uid, dir := range have {
		if len(freed) == 0 {
			if err := u.Release(dir); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
		if freed = append(freed, uid); len(freed) == 2 {
			break
		}
	}
	a, err := u.Take(last)
	b, err2 := u.Take(folder(t))
	if err := errors.Join(err, err2); err != nil || a == b || a != freed[0] && a != freed[1] || b != freed[0] && b != freed[1] {
		t.Errorf("%d, %d, not %v: %v", a, b, freed, err)
	}
}

// A folder whose user Take has not assigned is from an older gpuguest. Others may run as
// that user.
func TestUserThatWasNotGivenIsLeftAlone(t *testing.T) {
	needRoot(t)
	u := &Users{Range: Range{0x7f200100, 0x7f20010f}, Dir: filepath.Join(t.TempDir(), "taken")}
	dir := folder(t)
	if err := os.Chown(dir, 0x7f200300, 0x7f200300); err != nil {
		t.Fatal(err)
	}
	if uid, err := u.Take(dir); err != nil || uid != 0x7f200300 {
		t.Error(uid, err)
	}
	if err := u.Release(dir); err != nil {
		t.Error(err)
	}
}

func TestFilesAreOpenedWithTheUsersRightsAlone(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	for d := dir; d != filepath.Clean(os.TempDir()); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, []byte("x"), 0o640); err != nil {
		t.Fatal(err)
	}
	read := func() error { _, err := os.ReadFile(secret); return err }
	const uid = 0x7f200400
	if err := AsOwner(uid, uid, read); !errors.Is(err, os.ErrPermission) {
		t.Error(err)
	}
	if err := AsOwner(uid, uid, func() error { return os.WriteFile(filepath.Join(dir, "new"), nil, 0o600) }); !errors.Is(err, os.ErrPermission) {
		t.Error(err)
	}
	if err := read(); err != nil {
		t.Error("this process has lost its rights", err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := AsOwner(uid, uid, func() error { return os.WriteFile(filepath.Join(dir, "new"), nil, 0o600) }); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(filepath.Join(dir, "new")); err != nil || !strings.Contains(fmt.Sprint(fi.Sys()), fmt.Sprint(uid)) {
		t.Error(fi, err)
	}
}

// A simulated control group: only its files.
func TestLimits(t *testing.T) {
	dir := t.TempDir()
	if _, err := FindLimits(dir, 1); err == nil {
		t.Error("any folder will do")
	}
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("cgroup.controllers", "cpu pids\n")
	if _, err := FindLimits(dir, 1); err == nil || !strings.Contains(err.Error(), "cpu pids") {
		t.Error(err)
	}
	write("cgroup.controllers", "cpu memory pids\n")
	write("cgroup.subtree_control", "")
	l, err := FindLimits(dir, 8<<30)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Add("s-1", 42); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"cgroup.subtree_control": "+memory", "s-1/memory.max": "8589934592", "s-1/cgroup.procs": "42"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	var none *Limits
	if err := errors.Join(none.Add("s-1", 1), none.Remove("s-1"), l.Remove("s-2")); err != nil {
		t.Error(err)
	}
}

func BenchmarkEnter(b *testing.B) {
	dir := b.TempDir()
	for b.Loop() {
		if err := OnThread(Policy{Program: "/proc/self/exe", Write: []string{dir}}.Enter); err != nil {
			b.Fatal(err)
		}
	}
}

func TestMain(m *testing.M) {
	testkit.HalfMain()
	os.Exit(m.Run())
}

// Who runs as a session's user and ends its first thread must not be left to the next session.
func TestUserIsNotGivenBackWhileAThreadOfItRuns(t *testing.T) {
	needRoot(t)
	u := &Users{Range: Range{0x7f200200, 0x7f20020f}, Dir: filepath.Join(t.TempDir(), "taken")}
	dir := folder(t)
	uid, err := u.Take(dir)
	if err != nil {
		t.Fatal(err)
	}
	pid := testkit.Half(t, &syscall.Credential{Uid: uid, Gid: uid})
	if busy, err := hasProcess(uid); err != nil || !busy {
		t.Errorf("busy: %v, %v", busy, err)
	}
	if err := u.Release(dir); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "task", strconv.Itoa(pid), "status")); err == nil && !strings.Contains(string(b), "Threads:\t1\n") {
		t.Errorf("the user was given back, and its process runs:\n%s", b)
	}
}
