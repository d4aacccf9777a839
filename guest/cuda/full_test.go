package cuda

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
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

// Out of descriptors, gpuguest does not know what a session is. It must not go on without it: one that
// is suspended can't be adopted again.
func TestTakeOverWithoutDescriptorsDropsNoSession(t *testing.T) {
	r := newRig(t)
	var all []*program
	var ids []string
	for range 6 {
		p := r.start(nil)
		all, ids = append(all, p), append(ids, r.adopt(p.pid))
	}
	r.m.Close()
	refused := 0
	for i := range 20 * 12 { // what is read takes descriptors beside those that watch what was read before
		left := i % 12
		m := &Manager{cfg: r.cfg, log: r.m.log, ask: r.m.ask, losses: r.m.losses, sessions: map[string]*session{}}
		m.ctx, m.cancel = context.WithCancel(context.Background())
		var err error
		testkit.FewDescriptors(t, left, func() { err = m.takeOver() })
		if err != nil {
			refused++
		}
		for _, id := range ids {
			if err == nil && m.sessions[id] == nil {
				t.Errorf("with %d descriptors one was dropped", left)
			}
		}
		m.cancel()
		m.wg.Wait()
	}
	if refused == 0 {
		t.Error("it was never out of descriptors")
	}
	r.open()
	for _, p := range all {
		p.works()
	}
}
