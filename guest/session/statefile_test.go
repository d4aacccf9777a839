package session

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// A file of a suspended session is made with the rights of the user who asks for it, and
// belongs to that user. It is made neither with root's rights nor with only those of the
// session's user.
func TestFileOfASuspendedSessionIsMadeWithTheRightsOfWhoAsks(t *testing.T) {
	needRoot(t)
	const user, group = 0x7f200500, 0x7f200501
	b := newBench(t)
	own := passable(t)
	if err := os.Chown(own, user, group); err != nil {
		t.Fatal(err)
	}
	roots := passable(t)
	for _, dir := range []string{own, roots} {
		if err := os.Chmod(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		who  string
		uid  uint32
		gid  uint32
		dir  string
		made bool
	}{
		{"a user, in root's folder", user, group, roots, false},
		{"another user, in the user's folder", user + 5, group + 5, own, false},
		{"a user of the folder's group, in a folder that its owner alone may use", user + 5, group, own, false},
		{"a user, in the own folder", user, group, own, true},
		{"root, in root's folder", 0, 0, roots, true},
	} {
		file := filepath.Join(c.dir, "state")
		req := &gpuctlv1.SuspendRequest{Session: b.id, File: file, Owner: &gpuctlv1.FileOwner{Uid: c.uid, Gid: c.gid}}
		res, err := b.m.Suspend(context.Background(), req, b.sink)
		if !c.made {
			if err == nil && res.Error == "" {
				t.Errorf("%s: %v", c.who, res)
			}
			if left, _ := filepath.Glob(file + "*"); len(left) > 0 {
				t.Errorf("%s: made %v", c.who, left)
			}
			continue
		}
		if err != nil || res.Error != "" {
			t.Fatal(c.who, res, err)
		}
		if uid, err := ownerOfFile(file); err != nil || uid != c.uid {
			t.Errorf("%s: the file is of user %d, %v", c.who, uid, err)
		}
		b.restart(func() {}) // the record keeps who asked
		if res := b.resume(""); res.Error != "" {
			t.Fatal(c.who, res)
		}
		if left, _ := filepath.Glob(file + "*"); len(left) > 0 {
			t.Errorf("%s: left %v", c.who, left)
		}
	}
}

func ownerOfFile(path string) (uint32, error) {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	return st.Uid, err
}

// Two sessions are suspended to one file at the same time. Who comes second must not replace the
// state of the first, nor remove it.
func TestSuspendLeavesTheFileOfAnotherSession(t *testing.T) {
	for _, at := range []string{stepPrecopy, stepExport} {
		for _, dies := range []bool{false, at == stepPrecopy} {
			t.Run(fmt.Sprint(at, dies), func(t *testing.T) {
				b := newBench(t)
				first := b.id
				_, second := b.connect("tok")
				file := filepath.Join(t.TempDir(), "state")
				other := func() {
					if res, err := b.m.Suspend(context.Background(), &gpuctlv1.SuspendRequest{Session: first, File: file}, b.sink); err != nil || res.Error != "" {
						t.Error(res, err)
					}
				}
				var res *gpuctlv1.SwapResult
				mine := func(at, fault string) {
					done := false
					var err error
					res, err = b.m.Suspend(context.Background(), &gpuctlv1.SuspendRequest{Session: second, File: file, FailAt: fault}, func(p *gpuctlv1.Progress) {
						if p.GetStep() == at && !done {
							done = true
							other()
						}
					})
					if err != nil {
						t.Error(err)
					}
				}
				if !dies {
					mine(at, "")
					if res.Error == "" || res.Held {
						t.Errorf("%v", res)
					}
				} else {
					b.restart(func() { mine(at, "kill_self@"+stepPrecopy) })
				}
				if left, err := filepath.Glob(file + "*"); err != nil || len(left) != 1 {
					t.Errorf("%v, %v", left, err)
				}
				got, err := b.m.Resume(context.Background(), &gpuctlv1.ResumeRequest{Session: first}, b.sink)
				if err != nil || got.Error != "" {
					t.Errorf("the first one is not resumed: %v, %v", got, err)
				}
			})
		}
	}
}
