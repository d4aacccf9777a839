package virt_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/virt"
)

// impatient is quick, with a short time in which a migration may send nothing.
func impatient() virt.Timeouts {
	limits := quick()
	limits.Silence, limits.Migrate = 100*time.Millisecond, time.Hour
	return limits
}

// A destination that hangs before libvirt has reached it gets nothing of the domain. That
// can't be interrupted, so the outcome is unknown. libvirt remembers the abort: when the
// destination goes on, the domain stays.
func TestMigrationToALibvirtdThatHangsBeforeItIsReached(t *testing.T) {
	limits := impatient()
	limits.Abort = 200 * time.Millisecond
	_, b, ca, cb, uri := pair(t, "qemu", limits)
	d := started(t, ca)
	b.Freeze()
	err := ca.Migrate(t.Context(), d, virt.Migration{Destination: uri, Every: 10 * time.Millisecond})
	if !errors.Is(err, virt.ErrNothingSent) || !errors.Is(err, virt.ErrUnknownOutcome) || !strings.Contains(err.Error(), uri) {
		t.Fatal(err)
	}
	// Whoever looks sees that it is not known to stay.
	if j, err := ca.Job(t.Context(), d); err != nil || j.State != virt.JobUnbounded {
		t.Errorf("its job: %+v, %v", j, err)
	}
	b.Thaw()
	ready(t, cb)
	testkit.Until(t, "the job has ended", func() error {
		j, err := ca.Job(t.Context(), d)
		return testkit.Want(err == nil && j.State == virt.NoJob, j, err)
	})
	if st, err := ca.State(t.Context(), d); err != nil || st != virt.Running {
		t.Errorf("here: %v, %v", st, err)
	}
	if _, err := cb.State(t.Context(), d); !errors.Is(err, virt.ErrNotFound) {
		t.Errorf("there: %v", err)
	}
}

// Memory that does not get through is a migration that can be aborted, and is known to be
// undone. The next one to that host may be without progress for longer.
func TestMigrationThatSendsNothingMoreIsUndone(t *testing.T) {
	a, _, ca, cb, uri := pair(t, "qemu", impatient())
	d := started(t, ca)
	a.Jam()
	var took []time.Duration
	for range 2 {
		began := time.Now()
		err := ca.Migrate(t.Context(), d, virt.Migration{Destination: uri, Every: 10 * time.Millisecond})
		if !errors.Is(err, virt.ErrNothingSent) || !errors.Is(err, virt.ErrAborted) || errors.Is(err, virt.ErrUnknownOutcome) {
			t.Fatal(err)
		}
		took = append(took, time.Since(began))
	}
	if took[0] < 100*time.Millisecond || took[1] < 200*time.Millisecond {
		t.Errorf("after %v", took)
	}
	if st, err := ca.State(t.Context(), d); err != nil || st != virt.Running {
		t.Errorf("here: %v, %v", st, err)
	}
	if _, err := cb.State(t.Context(), d); !errors.Is(err, virt.ErrNotFound) {
		t.Errorf("there: %v", err)
	}
}

// Xen's driver neither counts bytes nor aborts: a migration that it does is waited for.
func TestMigrationThatIsNotCountedIsWaitedFor(t *testing.T) {
	_, b, ca, cb, uri := pair(t, "xen", impatient())
	d := started(t, ca)
	if err := ca.Migrate(t.Context(), d, virt.Migration{Destination: uri, Every: 10 * time.Millisecond, Progress: func(virt.Job) {}}); err != nil {
		t.Fatal(err)
	}
	if st, err := cb.State(t.Context(), d); err != nil || st != virt.Running {
		t.Errorf("there: %v, %v; %v", st, err, b.Calls())
	}
}
