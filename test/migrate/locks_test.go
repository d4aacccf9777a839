package migrate

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/test/libvirt"
)

// state is a VM's state on a host.
func (h *host) state(ctx context.Context) virt.State {
	h.t.Helper()
	d, err := h.virt.Lookup(ctx, "web")
	if err != nil {
		h.t.Fatal(err)
	}
	s, err := h.virt.State(ctx, d)
	if err != nil {
		h.t.Fatal(err)
	}
	return s
}

// alarmed waits until the cluster has this alarm alone; empty: none.
func (h *host) alarmed(ctx context.Context, words string) {
	h.t.Helper()
	testkit.Until(h.t, "the cluster's alarm is "+words, func() error {
		res, err := h.api().Status(ctx, connect.NewRequest(&clusterv1.StatusRequest{}))
		all := strings.Join(res.Msg.GetAlarms(), "\n")
		return testkit.Want(err == nil && len(res.Msg.GetAlarms()) == min(1, len(words)) && strings.Contains(all, words), res, err)
	})
}

// started starts the VM on a host.
func started(ctx context.Context, t *testing.T, r *libvirt.Rig, h *host) virt.Domain {
	t.Helper()
	xml, err := r.Guest("web", uuid, "")
	if err != nil {
		t.Fatal(err)
	}
	d, err := h.virt.Define(ctx, xml)
	if err == nil {
		d, err = h.virt.Start(ctx, d)
	}
	if err != nil {
		t.Fatal(err)
	}
	traveller{ctx: ctx}.counts(t, h, 1)
	return d
}

// planned waits until a plan to move the VM has these notes, and this reason alone why the
// other host does not take it; empty: it does.
func planned(ctx context.Context, t *testing.T, h *host, notes, reason string) {
	t.Helper()
	testkit.Until(t, fmt.Sprintf("the plan has notes %q and reason %q", notes, reason), func() error {
		plan, err := h.migrations().Plan(ctx, connect.NewRequest(&gpuctlv1.MachinePlanRequest{Machine: "web", Verb: "migrate"}))
		if err != nil {
			return err
		}
		var all, against []string
		for _, n := range plan.Msg.GetNotes() {
			if reason == "" {
				all = append(all, n.GetCode())
			}
		}
		for _, r := range plan.Msg.GetRejected() {
			for _, one := range r.GetReasons() {
				if one.GetCode() != "same_host" {
					against = append(against, one.GetCode()+": "+one.GetMessage())
				}
			}
		}
		return testkit.Want(strings.Join(all, " ") == notes && len(against) == min(1, len(reason)) && strings.Contains(strings.Join(against, "; "), reason), all, against)
	})
}

// With virtlockd on both hosts the VM is moved there and back, and its disk is locked where it
// is. When virtlockd does not answer or has forgotten its locks, plans say that.
func TestMigrationsWithALockManager(t *testing.T) {
	r, a, b := clusterBy(t, libvirt.DiskLocks, direct)
	ctx, cancel := context.WithTimeout(t.Context(), 14*time.Minute)
	defer cancel()
	d := started(ctx, t, r, a)
	disk := filepath.Join(r.Dir, "web.img")
	v := traveller{ctx, a, b}
	for _, to := range []*host{b, a} {
		planned(ctx, t, a, "", "")
		n, _ := to.Count("web")
		testkit.Until(t, "a migration is done", func() error { // who asks may lose a busy host
			last, err := a.migrate(ctx, &gpuctlv1.MachinePlanRequest{Machine: "web", To: to.Name}, nil)
			on, _ := where(ctx, "web", to)
			return testkit.Want(len(on) == 1, last, err)
		})
		v.only(t, to)
		v.counts(t, to, n+1)
		if bare, err := (virt.Locks{Manager: "lockd"}).Unlocked(disk); bare || err != nil {
			t.Errorf("its disk is not locked: %v, %v", bare, err)
		}
	}

	// Without virtlockd at either host nothing begins.
	for _, h := range []*host{a, b} {
		if err := h.KillLocker(); err != nil {
			t.Fatal(err)
		}
		planned(ctx, t, a, "", "lock_manager: libvirt's lock manager does not answer on host "+h.Name)
		if last, err := b.migrate(ctx, &gpuctlv1.MachinePlanRequest{Machine: "web"}, nil); err == nil && last.GetEnd() != "refused" {
			t.Errorf("%v", last)
		}
		if err := h.StartLocker(); err != nil {
			t.Fatal(err)
		}
	}
	v.only(t, a)

	// Started anew, it has forgotten the VM's lock, until the VM was paused and goes on.
	planned(ctx, t, b, "not_locked", "")
	if err := errors.Join(a.virt.Suspend(ctx, d), a.virt.Resume(ctx, d)); err != nil {
		t.Fatal(err)
	}
	planned(ctx, t, b, "", "")
	_ = a.virt.Destroy(context.Background(), d)
}

// The answer that the VM runs at its destination is lost. With a lock manager libvirt does not
// let it go on at its source: it runs once. The copy is named in an alarm, and when the
// operator has ended it, the migration is done.
func TestLostLastAnswerWithALockManager(t *testing.T) {
	r, a, b, said := cutCluster(t, libvirt.DiskLocks)
	ctx, cancel := context.WithTimeout(t.Context(), 14*time.Minute)
	defer cancel()
	d := started(ctx, t, r, a)
	testkit.Until(t, "a migration was begun", func() error { // who asks may lose a busy host
		_, err := a.migrate(ctx, &gpuctlv1.MachinePlanRequest{Machine: "web"}, nil)
		res, look := a.api().List(ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_MIGRATION}))
		return testkit.Want(look == nil && len(res.Msg.GetObjects()) == 1, err, look)
	})
	v := traveller{ctx, a, b}
	last := v.ended(t, a)
	const words = "libvirt keeps a copy of the VM from running: it runs on host hostb, and is paused on host hosta"
	if last.GetState() != clusterv1.MigrationState_MIGRATION_STATE_HELD || !strings.Contains(last.GetMessage(), words) || !strings.Contains(last.GetMessage(), "virsh destroy web on host hosta") {
		t.Fatalf("%v; %s", last, said)
	}
	b.alarmed(ctx, words)
	if s, o := a.state(ctx), b.state(ctx); s != virt.Paused || o != virt.Running {
		t.Errorf("it is %v at home, and %v at the destination", s, o)
	}
	if err := a.virt.Resume(ctx, d); !errors.Is(err, virt.ErrLocked) {
		t.Errorf("it went on at home: %v", err)
	}
	n, _ := b.Count("web")
	v.counts(t, b, n+5)

	if _, err := a.migrations().Resume(ctx, connect.NewRequest(&gpuctlv1.MachineResumeRequest{Id: last.GetId()})); err != nil {
		t.Fatal(err)
	}
	if m := v.ended(t, a); m.GetState() != clusterv1.MigrationState_MIGRATION_STATE_HELD || m.GetMachine().GetKeptOn() != "hosta" {
		t.Errorf("nothing was repaired, and it is %v", m)
	}
	if err := errors.Join(a.virt.Destroy(ctx, d), a.virt.Undefine(ctx, d)); err != nil {
		t.Fatal(err)
	}
	if _, err := a.migrations().Resume(ctx, connect.NewRequest(&gpuctlv1.MachineResumeRequest{Id: last.GetId()})); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "the migration is done", func() error {
		m := v.ended(t, b)
		return testkit.Want(m.GetState() == clusterv1.MigrationState_MIGRATION_STATE_DONE, m)
	})
	v.only(t, b)
	b.alarmed(ctx, "")
	if d, err := b.virt.Lookup(context.Background(), "web"); err == nil {
		_ = b.virt.Destroy(context.Background(), d)
	}
}
