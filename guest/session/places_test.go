package session

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// as runs f as another user. Only this thread is that user.
func as(t *testing.T, uid uint32, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	keep := ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); errno != 0 {
		t.Fatal(errno)
	}
	defer func() {
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, 0, keep); errno != 0 {
			panic(errno)
		}
	}()
	f()
}

// opened lets other users connect.
func (b *bench) opened() {
	b.t.Helper()
	for path, mode := range map[string]os.FileMode{b.dir: 0o755, filepath.Join(b.dir, "apps"): 0o666} {
		if err := os.Chmod(path, mode); err != nil {
			b.t.Fatal(err)
		}
	}
}

// The host of a VM gives it a number of leases of a remote GPU, whichever of its users begin sessions.
func TestOneUserDoesNotTakeEveryLeaseOfAVM(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can be several users")
	}
	far := func(token string) *gpuctlv1.Target {
		return &gpuctlv1.Target{Gpu: "h2/big", Runtime: &gpuctlv1.Runtime{Remote: &gpuctlv1.Remote{Token: []byte(token)}}}
	}
	b := newBench(t, func(c *Config) {
		c.Lease = func(context.Context, string, *gpuctlv1.OfferRequest) (*gpuctlv1.Target, error) {
			return far("lease"), nil
		}
	})
	b.opened()
	if err := b.m.offer(&gpuctlv1.OfferRequest{Token: "far", Claim: "claim-2", Target: far("")}); err != nil {
		t.Fatal(err)
	}
	begun := map[uint32]int{}
	for range mostLeases + 1 {
		for _, uid := range []uint32{65533, 65532} { // the second begins only when the first gets no more
			status, text := int32(0), ""
			as(t, uid, func() { status, text = b.connect("far") })
			if status == 0 {
				begun[uid]++
				break
			}
			if !strings.Contains(text, "left for other users") {
				t.Fatal(text)
			}
		}
	}
	if begun[65533] != mostLeases/2 || begun[65532] != mostLeases/4 {
		t.Errorf("sessions by user: %v", begun)
	}
	if status, text := b.connect("far"); status != 0 {
		t.Errorf("root: %s", text)
	}
}

// In a VM each user may have sessions without a token. One who takes all that there are gets no
// more than half: others find a place, and root takes the last. A gpuguest that takes the sessions
// over knows whose they are.
func TestOneUserDoesNotTakeEverySession(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can be several users")
	}
	const greedy, honest = 65533, 65532
	config := func(c *Config) {
		c.MaxSessions = 8
		c.Whose = func(uid uint32) uint32 {
			if uid >= 200000 { // by /etc/subuid
				return greedy
			}
			return uid
		}
	}
	b := newBench(t, config)
	b.opened()
	connect := func(uid uint32) (status int32, text string) {
		as(t, uid, func() { status, text = b.connect("tok") })
		return status, text
	}
	for i, uid := range []uint32{greedy, 200000, 200001, greedy} { // one is root's
		if status, text := connect(uid); status != 0 {
			t.Fatal(i, status, text)
		}
	}
	for _, uid := range []uint32{greedy, 200000, 200002} {
		if status, text := connect(uid); status == 0 || !strings.Contains(text, "left for other users") {
			t.Errorf("one more than half, as user %d: %d %s", uid, status, text)
		}
	}
	b.m.Close()
	b.m = newManager(t, b.dir, b.l, config)
	if n := len(b.m.list()); n != 5 {
		t.Fatalf("%d sessions were taken over", n)
	}
	if id, err := b.m.reserve(greedy); err == nil {
		t.Errorf("the next gpuguest gives one more than half: %s", id)
	}
	for _, c := range []struct {
		uid  uint32
		want bool
	}{{honest, true}, {honest, true}, {honest, false}, {0, true}, {0, false}} {
		if _, err := b.m.reserve(c.uid); (err == nil) != c.want {
			t.Errorf("user %d: %v", c.uid, err)
		}
	}
}
