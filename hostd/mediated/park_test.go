package mediated

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
	"github.com/gpuctl/gpuctl/mmio/server"
	"github.com/gpuctl/gpuctl/mmio/xen/xentest"
)

// function is a VM's part as its driver sees it.
type function struct{ d *xentest.Domain }

func (f function) Read(a mmio.Access) uint64 {
	return f.d.Load(0, bars[a.BAR]+a.Offset, int(a.Size))
}

func (f function) Write(a mmio.Access) { f.d.Store(0, bars[a.BAR]+a.Offset, int(a.Size), a.Data) }

// computes has the VM run a command that lasts.
func computes(t *testing.T, d *xentest.Domain, lasts time.Duration) {
	t.Helper()
	g, err := guestdriver.Open(guestdriver.Options{Device: function{d}})
	if err == nil {
		err = g.Launch(nvc0.KernelLoop, guestdriver.Buffer{}, guestdriver.Buffer{}, guestdriver.Buffer{}, uint32(lasts.Microseconds()), 1)
	}
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond) // until it has begun
}

func (h *host) state() server.State {
	all, err := h.client.List(context.Background())
	if err != nil || len(all) != 1 {
		h.t.Fatalf("%v, %v", all, err)
	}
	return all[0].State
}

// The VM's command may last for seconds, and hostd may be restarted meanwhile: the process goes on parking
// the part. It is to be asked again then, and neither refuses the migration nor has lost anything.
func TestPartThatIsStillBeingParkedForAHostdThatIsGoneIsNotLost(t *testing.T) {
	for name, over := range map[string]bool{"the migration goes on": false, "it has ended": true} {
		t.Run(name, func(t *testing.T) {
			home, _, d := pair(t, 5)
			computes(t, d, 4*time.Second)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				_, err := home.k.ParkParts(ctx, web, "m-1")
				ended <- err
			}()
			id := home.k.of(func(*assignment) bool { return true })[0].ID
			testkit.Until(t, "it is being parked", func() error {
				err := home.client.Save(t.Context(), id, io.Discard)
				return testkit.Want(errors.Is(err, server.ErrAgain), err)
			})
			cancel()
			if err := <-ended; err == nil {
				t.Fatal("it is parked already")
			}
			home.restart()
			if over {
				home.ended["m-1"] = true
				_ = home.k.Reconcile(t.Context())
				testkit.Until(t, "it works again", func() error {
					if err := home.k.Reconcile(t.Context()); err != nil {
						return err
					}
					return testkit.Want(home.served(), home.state())
				})
			} else {
				_, err := home.k.ParkParts(t.Context(), web, "m-1")
				if !errors.Is(err, server.ErrAgain) {
					t.Error(err)
				}
				testkit.Until(t, "it is parked", func() error {
					_, err := home.k.ParkParts(t.Context(), web, "m-1")
					return err
				})
			}
			if saidIn(home.events, "PartLost") {
				t.Error(home.events)
			}
		})
	}
}

// The migration ends before the process is asked to park the part, which it does then.
func TestPartThatIsParkedAfterItsMigrationHasEndedGoesOn(t *testing.T) {
	home, _, _ := pair(t, 5)
	home.k.Process = func(context.Context, string) (Process, error) { return &late{Process: home, ended: home}, nil }
	if _, err := home.k.ParkParts(t.Context(), web, "m-1"); !errors.Is(err, cards.ErrBusy) {
		t.Errorf("parked: %v", err)
	}
	if err := home.k.Reconcile(t.Context()); err != nil || !home.served() {
		t.Errorf("%v: it is %s", err, home.state())
	}
	if _, err := home.k.ParkParts(t.Context(), web, "m-2"); err != nil || home.state() != server.Parked {
		t.Errorf("parked for the next migration: %v", err)
	}
}

// late has the migration end, and hostd notice, before it parks a part.
type late struct {
	Process
	ended *host
}

func (l *late) Park(ctx context.Context, id string) ([]byte, error) {
	if _, over := l.ended.ended["m-1"]; !over {
		l.ended.ended["m-1"] = true
		if err := l.ended.k.Reconcile(ctx); err != nil {
			return nil, err
		}
	}
	return l.Process.Park(ctx, id)
}

// A part goes on when the command of its VM that runs has ended. One that starts meanwhile would run
// without its part.
func TestVMStartsWithItsPartWhileAnotherOnesCommandKeepsItFromGoingOn(t *testing.T) {
	w := newWorldOfTwo(t)
	w.k.Process = func(context.Context, string) (Process, error) { return keeps{w}, nil }
	if _, err := w.k.ParkParts(t.Context(), w.vms["web"].VM, "m-1"); err != nil {
		t.Fatal(err)
	}
	w.k.Over = func(context.Context, string) (over, here bool) { return true, true }
	w.domains["uuid-db"] = Domain{ID: 6, Paused: true, HVM: true}
	began := time.Now()
	err := w.k.Reconcile(t.Context())
	if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || len(w.parts) != 2 || took > 10*time.Second {
		t.Errorf("%v after %v, parts %v", err, took, w.parts)
	}
	if w.said("PartLost") {
		t.Error(w.events)
	}
}

// keeps parks parts, and has a command that keeps them from going on.
type keeps struct{ *world }

func (keeps) Park(context.Context, string) ([]byte, error) { return make([]byte, 4096), nil }

func (keeps) Resume(ctx context.Context, _ string) error { return hang(ctx, 20*time.Second) } // as the process does
