package confine

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/rundir"
)

// Range is a range of user numbers and of the same group numbers. Each session gets one of
// them. The first is reserved: no process runs as that user.
type Range struct{ First, Last uint32 }

// DefaultRange does not overlap systemd's users and containers, the ranges of /etc/subuid,
// or those that directory services map names to.
func DefaultRange() Range { return Range{0x7f000000, 0x7f000fff} }

const (
	minUsers   = 16
	overflowID = 65534 // nobody; the next number is not a user
)

// ParseRange parses FIRST-LAST.
func ParseRange(s string) (Range, error) {
	a, b, ok := strings.Cut(s, "-")
	first, err1 := strconv.ParseUint(a, 10, 32)
	last, err2 := strconv.ParseUint(b, 10, 32)
	r := Range{uint32(first), uint32(last)}
	switch {
	case !ok || err1 != nil || err2 != nil:
		return Range{}, fmt.Errorf("%q is no range of user numbers, as %v", s, DefaultRange())
	case last < first || last-first+1 < minUsers:
		return Range{}, fmt.Errorf("%v are fewer than %d users", r, minUsers)
	case first < 1000 || last == uint64(^uint32(0)) || first <= overflowID+1 && last >= overflowID:
		return Range{}, fmt.Errorf("%v has users that the system needs: those below 1000, %d and %d, or the last", r, overflowID, overflowID+1)
	}
	return r, nil
}

func (r Range) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// Users assigns users of a range to folders, for all programs of a host that use the same
// Dir. The owner of a folder is the user that it is assigned to.
type Users struct {
	Range Range
	Dir   string // folder that records which users are taken; created if missing
}

// ErrNoUser is returned when all users of the range are taken.
var ErrNoUser = errors.New("all users of the range are taken")

// Take makes a user that nobody else has the owner of the folder, which with all its
// content must belong to root. If the folder belongs to another user already, nothing
// changes. The folder above it must be root's.
func (u *Users) Take(folder string) (uint32, error) {
	uid, err := Owner(folder)
	if err != nil || uid != 0 {
		return uid, err
	}
	unlock, err := u.lock()
	if err != nil {
		return 0, err
	}
	defer unlock()
	if uid, err := Owner(folder); err != nil || uid != 0 {
		return uid, err // assigned since the first check
	}
	first := u.Range.First + 1 // after the keeper
	n := u.Range.Last - first + 1
	start := rand.Uint32N(n) //nolint:gosec // no secret: one that was given back rests a while
	for i := range n {
		uid := first + (start+i)%n
		free, err := u.free(uid)
		if err != nil {
			return 0, err
		}
		if !free {
			continue
		}
		if err := os.WriteFile(u.record(uid), []byte(folder), 0o600); err != nil {
			return 0, fmt.Errorf("user %d of %v: %w", uid, u.Range, err)
		}
		if err := give(folder, uid); err != nil {
			return 0, errors.Join(fmt.Errorf("give %s to user %d: %w", folder, uid, err), os.Remove(u.record(uid)))
		}
		return uid, nil
	}
	return 0, fmt.Errorf("%v: %w", u.Range, ErrNoUser)
}

// give makes the user the owner of a tree. The folder itself comes last, because its owner
// shows that all is done, and the user can enter it only then.
func give(folder string, uid uint32) error {
	var all []string
	err := filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
		all = append(all, path)
		return err
	})
	for _, path := range slices.Backward(all) {
		if err == nil {
			err = os.Lchown(path, int(uid), int(uid))
		}
	}
	return err
}

// Owner returns the owner of a folder.
func Owner(folder string) (uint32, error) {
	fi, err := os.Lstat(folder)
	if err != nil {
		return 0, err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || !fi.IsDir() {
		return 0, fmt.Errorf("%s is no folder", folder)
	}
	return st.Uid, nil
}

func (u *Users) record(uid uint32) string {
	return filepath.Join(u.Dir, strconv.FormatUint(uint64(uid), 10))
}

// lock keeps other processes from taking users at the same time.
func (u *Users) lock() (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(u.Dir), 0o755); err != nil {
		return nil, fmt.Errorf("users of sessions: %w", err)
	}
	if err := os.Mkdir(u.Dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("users of sessions: %w", err)
	}
	if unlock, err = rundir.Lock(u.Dir); err != nil {
		return nil, fmt.Errorf("users of sessions: %w", err)
	}
	return unlock, nil
}

// free reports whether nobody has the user. If the user's folder is missing, because its
// gpuguest was killed at the wrong moment, the user is free if it has no process.
func (u *Users) free(uid uint32) (bool, error) {
	folder, err := os.ReadFile(u.record(uid))
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("user %d of %v: %w", uid, u.Range, err)
	}
	if owner, err := Owner(string(folder)); err == nil && owner == uid {
		return false, nil
	}
	busy, err := hasProcess(uid)
	return err == nil && !busy, err
}

// endWait is how long a killed process may take to end, because a driver may delay it.
const endWait = 2 * time.Second

// Release ends all processes of the folder's user and releases the user. If a process does
// not end, the user stays taken until it has ended. A user that Take did not assign is left
// alone.
func (u *Users) Release(folder string) error {
	uid, err := Owner(folder)
	if errors.Is(err, fs.ErrNotExist) || err == nil && uid == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	if given, err := os.ReadFile(u.record(uid)); err != nil || string(given) != folder {
		return nil // the folder is from an older gpuguest, whose sessions shared a user
	}
	for end := time.Now().Add(endWait); ; time.Sleep(5 * time.Millisecond) {
		busy, err := hasProcess(uid)
		if err != nil {
			return err
		}
		if !busy {
			break
		}
		if err := u.killAll(uid); err != nil {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("user %d: a process of it does not end", uid)
		}
	}
	unlock, err := u.lock()
	if err != nil {
		return err
	}
	defer unlock()
	// The folder still exists, so the record is not of another folder.
	if err := os.Remove(u.record(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("give user %d back: %w", uid, err)
	}
	return nil
}

// killAll kills all processes of the user at once, even if they create new ones quickly.
func (u *Users) killAll(uid uint32) error {
	return signalling(uid, u.Range.First, func() error {
		if err := unix.Kill(-1, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("end processes of user %d: %w", uid, err)
		}
		return nil
	})
}

// hasProcess reports whether a process runs as the user. Zombies do not count: they do
// nothing, and their parents may be slow. One of which only the first thread has ended is none.
func hasProcess(uid uint32) (bool, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return false, fmt.Errorf("processes of user %d: %w", uid, err)
	}
	want := strconv.FormatUint(uint64(uid), 10)
	for _, e := range entries {
		if c := e.Name()[0]; c < '0' || c > '9' {
			continue
		}
		b, err := os.ReadFile("/proc/" + e.Name() + "/status")
		if err != nil {
			continue // it has ended
		}
		var state, ids, threads string
		for l := range strings.Lines(string(b)) {
			if rest, ok := strings.CutPrefix(l, "State:"); ok {
				state = strings.TrimSpace(rest)
			}
			if rest, ok := strings.CutPrefix(l, "Uid:"); ok {
				ids = rest
			}
			if rest, ok := strings.CutPrefix(l, "Threads:"); ok {
				threads = strings.TrimSpace(rest)
				break
			}
		}
		if (strings.HasPrefix(state, "Z") || strings.HasPrefix(state, "X")) && (threads == "" || threads == "0" || threads == "1") {
			continue
		}
		for _, id := range strings.Fields(ids) {
			if id == want {
				return true, nil
			}
		}
	}
	return false, nil
}

// Reachable returns an error if a user without rights can't reach a folder, because a
// folder above it does not let the user pass.
func Reachable(folder string) error {
	for dir := filepath.Dir(folder); ; dir = filepath.Dir(dir) {
		fi, err := os.Stat(dir)
		if err != nil {
			return err
		}
		if fi.Mode().Perm()&0o001 == 0 {
			return fmt.Errorf("the users of sessions can't pass through %s (mode %04o) to %s: chmod o+x it, or choose another run folder", dir, fi.Mode().Perm(), folder)
		}
		if dir == "/" {
			return nil
		}
	}
}
