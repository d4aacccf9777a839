package cuda

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// small mounts a small file system on the rig's run folder, and returns what fills it.
func (r *rig) small() (fill func()) {
	r.t.Helper()
	needRoot(r.t)
	r.m.Close()
	if err := unix.Mount("tmpfs", r.cfg.Dir, "tmpfs", 0, "size=256k,mode=0700"); err != nil {
		r.t.Skipf("no tmpfs: %v", err)
	}
	r.t.Cleanup(func() {
		r.m.Close()
		if err := unix.Unmount(r.cfg.Dir, unix.MNT_DETACH); err != nil {
			r.t.Error(err)
		}
	})
	r.open()
	return func() {
		f, err := os.Create(filepath.Join(r.cfg.Dir, "filler"))
		if err != nil {
			r.t.Fatal(err)
		}
		defer f.Close()
		for err == nil {
			_, err = f.Write(bytes.Repeat([]byte("x"), 4096))
		}
		if !errors.Is(err, unix.ENOSPC) {
			r.t.Fatal(err)
		}
	}
}

// A suspended program can't be adopted again: without its record it is lost.
func TestNextGpuguestOnAFullDiskKeepsSuspendedSessions(t *testing.T) {
	r := newRig(t)
	fill := r.small()
	p := r.start(nil)
	id := r.adopt(p.pid)
	r.done(id, kindSuspend)
	if err := r.m.losses.Add(&gpuctlv1.Session{Id: "d-00000001"}, "an earlier one"); err != nil {
		t.Fatal(err)
	}
	fill()
	r.m.Close()
	r.open()
	if s := r.session(id); s.GetState() != gpuctlv1.SessionState_SESSION_STATE_SUSPENDED {
		t.Errorf("%v", s)
	}
	if err := os.Remove(filepath.Join(r.cfg.Dir, "filler")); err != nil {
		t.Fatal(err)
	}
	r.done(id, kindResume)
	p.works()
}
