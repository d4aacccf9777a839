package mediated

import (
	"context"
	"testing"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/mmio/server"
)

// newWorldOfTwo returns a world in which the VM web runs with its part, and db has one for its start.
func newWorldOfTwo(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.give("web")
	w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
	w.reconcile()
	w.domains["uuid-web"] = Domain{ID: 5, HVM: true}
	w.give("db")
	return w
}

// A VM that is parked for its migration decides how long its command runs. One that starts meanwhile would
// run without its part.
func TestVMStartsWithItsPartWhileAnotherOnesCommandKeepsItFromBeingParked(t *testing.T) {
	w := newWorldOfTwo(t)
	parking, over := make(chan struct{}), make(chan struct{})
	w.onDo = func(call string) {
		if call == "park" {
			close(parking)
			<-over
		}
	}
	parked := make(chan error)
	go func() {
		_, err := w.k.ParkParts(context.WithoutCancel(t.Context()), w.vms["web"].VM, "m-1")
		parked <- err
	}()
	<-parking
	w.domains["uuid-db"] = Domain{ID: 6, Paused: true, HVM: true}
	looked := make(chan error, 1)
	go func() { looked <- w.k.Reconcile(context.WithoutCancel(t.Context())) }()
	select {
	case err := <-looked:
		if err != nil || len(w.parts) != 2 {
			t.Errorf("%v, parts %v", err, w.parts)
		}
	case <-time.After(20 * time.Second):
		t.Error("it waits")
	}
	close(over)
	if err := <-parked; err == nil {
		t.Error("it was parked")
	}
}

// A cluster that has lost its leader answers for ten seconds nobody who wants a claim. A VM that starts meanwhile
// would run without its part.
func TestVMStartsWithItsPartWhileTheClusterDoesNotAnswerForAnotherOnes(t *testing.T) {
	for name, obtain := range map[string]func(w *world) error{
		"attach": func(w *world) error {
			return w.k.Attach(context.WithoutCancel(t.Context()), &gpuctlv1.AttachRequest{Machine: "db", Gpu: "soft0", Weight: 3}, func(*gpuctlv1.DeviceUpdate) {})
		},
		"arrival": func(w *world) error {
			return w.k.ExpectParts(context.WithoutCancel(t.Context()), w.vms["db"].VM, "m-1", []*gpuctlv1.SitePart{{
				Slot: 31, Memory: 8 << 20, Channels: uint32(w.k.GPUs[0].Model.Channels()), Weight: 1, Config: make([]byte, 4096),
			}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.give("web")
			asked, answers := make(chan struct{}), make(chan struct{})
			w.onDo = func(call string) {
				if call == "claim" {
					close(asked)
					<-answers
				}
			}
			got := make(chan error)
			go func() { got <- obtain(w) }()
			<-asked
			w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
			looked := make(chan error, 1)
			go func() { looked <- w.k.Reconcile(context.WithoutCancel(t.Context())) }()
			select {
			case err := <-looked:
				if err != nil || len(w.parts) != 1 {
					t.Errorf("%v, parts %v", err, w.parts)
				}
			case <-time.After(20 * time.Second):
				t.Error("it waits")
			}
			close(answers)
			if err := <-got; err != nil || len(w.k.of(func(*assignment) bool { return true })) != 2 {
				t.Errorf("%v, parts %v", err, w.slices())
			}
		})
	}
}

// hangs is a process that takes connections and does not answer, as one that was stopped.
type hangs struct{ Process }

func (hangs) List(ctx context.Context) ([]server.Status, error) { return nil, hang(ctx, clientWaits) }
func (hangs) Detach(ctx context.Context, _ string) error        { return hang(ctx, clientWaits) }

const clientWaits = 30 * time.Second // that is what server.Client does

func hang(ctx context.Context, most time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	<-ctx.Done()
	return ctx.Err()
}

// A VM that starts with a part of another GPU would run without it.
func TestProcessThatHangsKeepsNoVMsOfOtherGPUsWaiting(t *testing.T) {
	w := newWorld(t)
	w.give("web")
	other := w.k.of(func(*assignment) bool { return true })[0]
	other.ID, other.GPU, other.UUID, other.Name, other.Claim, other.Phase, other.Domain = "mgpu-x", "soft1", "uuid-db", "db", "vm-x", detaching, 9
	if err := w.k.put(other); err != nil {
		t.Fatal(err)
	}
	w.k.GPUs = append([]GPU{{"soft1", w.k.GPUs[0].Model}}, w.k.GPUs...)
	w.k.Process = func(_ context.Context, gpu string) (Process, error) {
		if gpu == "soft1" {
			return hangs{}, nil
		}
		return w, nil
	}
	for i, most := range []time.Duration{20 * time.Second, 10 * time.Second} { // the second time it is known to hang
		w.domains["uuid-web"] = Domain{ID: uint16(5 + i), Paused: true, HVM: true}
		began := time.Now()
		err := w.k.Reconcile(t.Context())
		if took := time.Since(began); err == nil || took > most || len(w.parts) != 1 {
			t.Errorf("%v after %v, parts %v", err, took, w.parts)
		}
	}
	if a := w.k.of(func(a *assignment) bool { return a.ID == "mgpu-x" }); len(a) != 1 || a[0].Phase != detaching {
		t.Errorf("%+v", a)
	}
}
