package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/virt"
)

const uuid = "6d696772-6174-4000-8000-000000000001"

// traveller is a VM on two hosts that migrate it to each other.
type traveller struct {
	ctx  context.Context
	a, b *host
}

func TestMigrations(t *testing.T) {
	r, a, b := cluster(t)
	ctx, cancel := context.WithTimeout(t.Context(), 14*time.Minute) // on a busy machine
	defer cancel()
	xml, err := r.Guest("web", uuid, "")
	if err != nil {
		t.Fatal(err)
	}
	d, err := a.virt.Define(ctx, xml)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.virt.Start(ctx, d); err != nil {
		t.Fatal(err)
	}
	v := traveller{ctx, a, b}
	v.counts(t, a, 0)
	for _, step := range []struct {
		name string
		run  func(t *testing.T)
	}{
		{"plan", v.plans},
		{"refused", v.refuses},
		{"there and back", v.goesThereAndBack},
		{"the driver dies", v.survivesItsDriver},
		{"the destination's hostd dies", v.survivesTheDestination},
		{"the destination's libvirtd hangs", v.survivesAHangingLibvirtd},
		{"the destination's libvirtd hangs while the VM moves", v.survivesALibvirtdThatStops},
		{"two at once", v.goesOnceOfTwo},
		{"cold", v.goesCold},
	} {
		if !t.Failed() {
			t.Run(step.name, step.run)
		}
	}
	for _, h := range []*host{a, b} {
		if d, err := h.virt.Lookup(context.Background(), "web"); err == nil {
			_ = h.virt.Destroy(context.Background(), d)
		}
	}
}

// counts waits until the VM's program has counted to more than n on a host.
func (v traveller) counts(t *testing.T, h *host, n int) {
	t.Helper()
	testkit.Until(t, fmt.Sprintf("the VM counts on %s", h.Name), func() error {
		got, err := h.Count("web")
		return testkit.Want(err == nil && got > n, got, err)
	})
}

// only waits until the VM runs on a host and nowhere else.
func (v traveller) only(t *testing.T, h *host) {
	t.Helper()
	testkit.Until(t, "the VM runs on "+h.Name+" alone", func() error {
		on, err := where(v.ctx, "web", v.a, v.b)
		return testkit.Want(err == nil && strings.Join(on, " ") == h.Name, on, err)
	})
}

// ended waits for the end of the migration that runs.
func (v traveller) ended(t *testing.T, h *host) *clusterv1.Migration {
	t.Helper()
	var last *clusterv1.Migration
	testkit.Until(t, "the migration has ended", func() error {
		res, err := h.api().List(v.ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_MIGRATION}))
		if err != nil {
			return err
		}
		last = nil
		for _, o := range res.Msg.GetObjects() {
			if m := o.GetMigration(); last == nil || m.GetStartedUnixMs() > last.GetStartedUnixMs() {
				last = m
			}
		}
		switch last.GetState() {
		case clusterv1.MigrationState_MIGRATION_STATE_RUNNING, clusterv1.MigrationState_MIGRATION_STATE_UNSPECIFIED:
			return testkit.Want(false, last)
		default:
			return nil
		}
	})
	return last
}

// at acts when the migration of the VM from a host comes to a step.
func (v traveller) at(t *testing.T, from *host, name string, act func()) (*gpuctlv1.MachineProgress, error) {
	t.Helper()
	acted := false
	return from.migrate(v.ctx, &gpuctlv1.MachinePlanRequest{Machine: "web"}, func(p *gpuctlv1.MachineProgress) {
		if p.GetStep() == name && !acted {
			acted = true
			act()
		}
	})
}

func (v traveller) plans(t *testing.T) {
	// Of any host: the VM's is found.
	res, err := v.b.migrations().Plan(v.ctx, connect.NewRequest(&gpuctlv1.MachinePlanRequest{Machine: "web", Verb: "migrate"}))
	if err != nil {
		t.Fatal(err)
	}
	p := res.Msg
	if p.GetHost() != "hosta" || len(p.GetReasons()) != 0 || len(p.GetCandidates()) != 1 || p.GetCandidates()[0].GetHost() != "hostb" || len(p.GetRejected()) != 1 {
		t.Errorf("%v", p)
	}
	_, err = v.b.migrations().Plan(v.ctx, connect.NewRequest(&gpuctlv1.MachinePlanRequest{Machine: "wob", Verb: "migrate"}))
	says(t, err, `vm "wob": not found`)
	says(t, err, `web`)
	res, err = v.a.migrations().Plan(v.ctx, connect.NewRequest(&gpuctlv1.MachinePlanRequest{Machine: uuid, Verb: "upgrade"}))
	if err != nil || len(res.Msg.GetReasons()) != 1 || res.Msg.GetReasons()[0].GetCode() != "no_gpu" {
		t.Errorf("%v %v", res, err)
	}
}

func (v traveller) refuses(t *testing.T) {
	last, err := v.a.migrate(v.ctx, &gpuctlv1.MachinePlanRequest{Machine: "web", To: "hosta"}, nil)
	if err != nil || last.GetEnd() != "refused" || last.GetRefused() == nil {
		t.Errorf("%v %v", last, err)
	}
	v.only(t, v.a)
}

func (v traveller) goesThereAndBack(t *testing.T) {
	for i, h := range []*host{v.b, v.a} {
		n, _ := []*host{v.a, v.b}[i].Count("web")
		// Asked of the other host than it runs on.
		last, err := h.migrate(v.ctx, &gpuctlv1.MachinePlanRequest{Machine: "web"}, nil)
		if err != nil || last.GetEnd() != "done" {
			t.Fatalf("%v %v", last, err)
		}
		v.only(t, h)
		v.counts(t, h, n+1)
	}
	res, err := v.b.api().List(v.ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_MIGRATION}))
	if err != nil || len(res.Msg.GetObjects()) != 2 {
		t.Errorf("%v %v", res, err)
	}
	for _, o := range res.Msg.GetObjects() {
		if m := o.GetMigration(); m.GetState() != clusterv1.MigrationState_MIGRATION_STATE_DONE || len(m.GetSteps()) != 2 || m.GetSteps()[0].GetTookNs() <= 0 {
			t.Errorf("%v", m)
		}
	}
}

func (v traveller) survivesItsDriver(t *testing.T) {
	_, err := v.at(t, v.a, "move", v.a.kill)
	if err == nil {
		t.Error("nobody noticed that it died")
	}
	v.a.start()
	m := v.ended(t, v.a)
	if m.GetState() != clusterv1.MigrationState_MIGRATION_STATE_DONE {
		t.Errorf("%v", m)
	}
	v.only(t, v.b)
}

func (v traveller) survivesTheDestination(t *testing.T) {
	_, _ = v.at(t, v.b, "move", func() { v.a.kill(); time.AfterFunc(2*time.Second, v.a.start) })
	m := v.ended(t, v.b)
	if m.GetState() != clusterv1.MigrationState_MIGRATION_STATE_DONE {
		t.Errorf("%v", m)
	}
	v.only(t, v.a)
}

// stops lets a host's libvirtd hang for 8 s.
func (v traveller) stops(t *testing.T, h *host) {
	t.Helper()
	if err := h.Signal(syscall.SIGSTOP); err != nil {
		t.Error(err)
	}
	time.AfterFunc(8*time.Second, func() {
		if err := h.Signal(syscall.SIGCONT); err != nil {
			t.Error(err)
		}
	})
}

// answers waits until a host's libvirtd does.
func (v traveller) answers(t *testing.T, h *host) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	err := testkit.Poll(ctx, "libvirtd answers again on "+h.Name, func() error {
		one, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err := h.virt.Domains(one)
		return err
	})
	if err != nil {
		t.Fatalf("%v; its threads: %s", err, h.Threads())
	}
}

// movable waits until a plan finds that the VM can move to the other host, and returns
// from where to where: a hostd notices some time after its libvirtd that it works again.
func (v traveller) movable(t *testing.T) (from, to *host) {
	t.Helper()
	testkit.Until(t, "the VM can move", func() error {
		res, err := v.a.migrations().Plan(v.ctx, connect.NewRequest(&gpuctlv1.MachinePlanRequest{Machine: "web", Verb: "migrate"}))
		if err != nil {
			return err
		}
		from, to = v.a, v.b
		if res.Msg.GetHost() == v.b.Name {
			from, to = v.b, v.a
		}
		return testkit.Want(len(res.Msg.GetCandidates()) == 1, res.Msg)
	})
	return from, to
}

func (v traveller) survivesAHangingLibvirtd(t *testing.T) {
	v.stops(t, v.b)
	last, err := v.a.migrate(v.ctx, &gpuctlv1.MachinePlanRequest{Machine: "web"}, nil)
	t.Logf("%v %v", last, err)
	v.answers(t, v.b)
	on, err := where(v.ctx, "web", v.a, v.b)
	if err != nil || len(on) != 1 {
		t.Errorf("it runs on %v, %v", on, err)
	}
}

func (v traveller) survivesALibvirtdThatStops(t *testing.T) {
	from, to := v.movable(t)
	last, err := v.at(t, from, "move", func() { v.stops(t, to) })
	t.Logf("%v %v", last, err)
	if last.GetEnd() == "refused" {
		t.Error("it was refused")
	}
	v.answers(t, to)
	m := v.ended(t, from)
	t.Log(m)
	on, err := where(v.ctx, "web", v.a, v.b)
	if err != nil || len(on) != 1 {
		t.Errorf("it runs on %v, %v", on, err)
	}
}

func (v traveller) goesOnceOfTwo(t *testing.T) {
	v.movable(t)
	type answer struct {
		p   *gpuctlv1.MachineProgress
		err error
	}
	answers := make(chan answer, 2)
	for _, h := range []*host{v.a, v.b} {
		go func() {
			p, err := h.migrate(v.ctx, &gpuctlv1.MachinePlanRequest{Machine: "web"}, nil)
			answers <- answer{p, err}
		}()
	}
	var ends []string
	for range 2 {
		x := <-answers
		if x.err != nil && !strings.Contains(x.err.Error(), "is just being begun") {
			t.Error(x.err)
		}
		ends = append(ends, x.p.GetEnd())
	}
	if !slices.Contains(ends, "done") {
		t.Errorf("none of the two went: %v", ends)
	}
	on, err := where(v.ctx, "web", v.a, v.b)
	if err != nil || len(on) != 1 {
		t.Errorf("it runs on %v, %v", on, err)
	}
}

func (v traveller) goesCold(t *testing.T) {
	from, to := v.movable(t)
	d, err := from.virt.Lookup(v.ctx, "web")
	if err == nil {
		err = errors.Join(from.virt.Suspend(v.ctx, d), from.virt.SetAutostart(v.ctx, d, true))
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, cold := range []bool{false, true} {
		last, err := to.migrate(v.ctx, &gpuctlv1.MachinePlanRequest{Machine: "web", ForceCold: cold}, nil)
		if want := map[bool]string{false: "refused", true: "done"}[cold]; err != nil || last.GetEnd() != want {
			t.Fatalf("cold %v: %v %v", cold, last, err)
		}
	}
	v.only(t, to)
	if _, err := from.virt.Lookup(v.ctx, "web"); !errors.Is(err, virt.ErrNotFound) {
		t.Errorf("%s still knows the VM: %v", from.Name, err)
	}
	if d, err = to.virt.Lookup(v.ctx, "web"); err != nil {
		t.Fatal(err)
	}
	if kept, err := to.virt.Persistent(v.ctx, d); err != nil || !kept {
		t.Errorf("its definition is gone: %v", err)
	}
	if boots, err := to.virt.Autostart(v.ctx, d); err != nil || boots {
		t.Errorf("its autostart has gone along, or %v", err)
	}
	m := v.ended(t, to)
	var names []string
	for _, s := range m.GetSteps() {
		names = append(names, s.GetName())
	}
	if got := strings.Join(names, " "); got != "stop define start commit clean" {
		t.Errorf("steps: %s", got)
	}
}
