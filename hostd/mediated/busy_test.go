package mediated

import (
	"context"
	"testing"
	"time"
)

// A VM that is parked for its migration decides how long its command runs. One that starts meanwhile would
// run without its part.
func TestVMStartsWithItsPartWhileAnotherOnesCommandKeepsItFromBeingParked(t *testing.T) {
	w := newWorld(t)
	w.give("web")
	w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
	w.reconcile()
	w.domains["uuid-web"] = Domain{ID: 5, HVM: true}
	w.give("db")
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
