package mediated

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/mmio/server"
)

// world is a host with Xen, libvirt, a cluster and the process of a GPU. crash makes the
// next call of a kind stop the keeper, as if hostd was killed there.
type world struct {
	t       *testing.T
	file    string
	domains map[string]Domain
	vms     map[string]vm.Info
	parts   map[string]server.Status // of the GPU's process
	claims  map[string]bool
	events  []string
	listed  []string         // for the hook
	arrive  []string         // the same
	fail    map[string]error // by call
	onDo    func(call string)
	k       *Keeper
}

func newWorld(t *testing.T) *world {
	w := &world{
		t: t, file: filepath.Join(t.TempDir(), "mediated.json"), domains: map[string]Domain{}, vms: map[string]vm.Info{},
		parts: map[string]server.Status{}, claims: map[string]bool{}, fail: map[string]error{},
	}
	w.vm("web", "shutoff")
	w.vm("db", "shutoff")
	w.restart()
	return w
}

func (w *world) vm(name, state string) {
	w.vms[name] = vm.Info{VM: vm.VM{UUID: "uuid-" + name, Name: name}, State: state, Type: "hvm", Memory: 1 << 28, CPUs: 1}
}

func (w *world) restart() {
	w.t.Helper()
	k, err := New(Config{
		GPUs: []GPU{{"soft0", server.Model{Memory: 16 << 20, Parts: 2, Policy: timeshare.Fair}}},
		File: w.file, Domains: w, VMs: w, Cluster: w, Log: slog.New(slog.DiscardHandler),
		Process: func(context.Context, string) (Process, error) { return w, w.call("process") },
		List:    func(have, arrive []string) error { w.listed, w.arrive = have, arrive; return w.fail["list file"] },
		Event:   func(_, kind, message string) { w.events = append(w.events, kind+": "+message) },
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.k = k
}

func (w *world) call(name string) error {
	if w.onDo != nil {
		w.onDo(name)
	}
	return w.fail[name]
}

func (w *world) Of(context.Context) (map[string]Domain, error) { return w.domains, w.call("domains") }

func (w *world) Find(_ context.Context, ref string) (vm.Info, error) {
	if m, ok := w.vms[ref]; ok {
		return m, nil
	}
	return vm.Info{}, fmt.Errorf("vm %s: %w", ref, cards.ErrNotFound)
}

func (w *world) HostName() string { return "h" }
func (w *world) Settle(context.Context) {
	for c := range w.claims {
		if !w.k.Knows(c) {
			delete(w.claims, c)
		}
	}
}
func (w *world) Kick() {}

func (w *world) Claim(_ context.Context, c *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error) {
	if err := w.call("claim"); err != nil {
		return nil, err
	}
	if len(w.claims) == 2 {
		return &clusterv1.CreateClaimResponse{Rejected: []*clusterv1.Rejection{{Host: "h", Reasons: []*gpuctlv1.Reason{why("busy", "no room")}}}}, nil
	}
	if c.GetProfile() != "1of2" || !strings.Contains(c.GetExpr(), `"soft0"`) {
		w.t.Errorf("claim %v", c)
	}
	w.claims[c.GetId()] = true
	return &clusterv1.CreateClaimResponse{Assignments: []*clusterv1.Assignment{{Gpu: "h/soft0"}}}, nil
}

func (w *world) Attach(_ context.Context, p server.Part) error {
	if err := w.call("attach"); err != nil {
		return err
	}
	if _, there := w.parts[p.ID]; there {
		return server.ErrExists
	}
	for _, d := range w.domains {
		if d.ID == p.Domain {
			w.parts[p.ID] = server.Status{Part: p, Phases: map[string]server.Counts{"init": {Exits: 7}}}
			return nil
		}
	}
	return errors.New("no such domain")
}

func (w *world) Detach(_ context.Context, id string) error {
	if err := w.call("detach"); err != nil {
		return err
	}
	delete(w.parts, id)
	return nil
}

func (w *world) List(context.Context) (out []server.Status, err error) {
	for _, p := range w.parts {
		out = append(out, p)
	}
	return out, w.call("list")
}

// The moves of parts are tested with a real process (move_test.go).
func (w *world) Park(context.Context, string) ([]byte, error) {
	return nil, cmp.Or(w.call("park"), errors.New("no move"))
}
func (w *world) Save(context.Context, string, io.Writer) error    { return errors.New("no move") }
func (w *world) Restore(context.Context, string, io.Reader) error { return errors.New("no move") }
func (w *world) Give(context.Context, string, string) error       { return errors.New("no move") }
func (w *world) Resume(context.Context, string) error             { return errors.New("no move") }

func (w *world) give(vm string) {
	w.t.Helper()
	err := w.k.Attach(w.t.Context(), &gpuctlv1.AttachRequest{Machine: vm, Gpu: "soft0", Profile: "1of2", Weight: 3}, func(*gpuctlv1.DeviceUpdate) {})
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) reconcile() {
	w.t.Helper()
	if err := w.k.Reconcile(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) slices() []*gpuctlv1.Slice { return w.k.Cards()[0].GetSlices() }

func (w *world) phase() string {
	w.t.Helper()
	s := w.slices()
	if len(s) != 1 {
		w.t.Fatalf("parts %v", s)
	}
	return strings.ToLower(strings.TrimPrefix(s[0].GetPhase().String(), "CARD_PHASE_"))
}

func (w *world) said(kind string) bool {
	for _, e := range w.events {
		if strings.HasPrefix(e, kind+":") {
			return true
		}
	}
	return false
}

func TestVMGetsItsPartWhileItsDomainIsPaused(t *testing.T) {
	w := newWorld(t)
	w.give("web")
	w.reconcile()
	if w.phase() != "ready" || len(w.parts) != 0 {
		t.Errorf("phase %s, parts %v", w.phase(), w.parts)
	}
	w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
	w.reconcile()
	if w.phase() != "attached" || len(w.parts) != 1 {
		t.Fatalf("phase %s, parts %v", w.phase(), w.parts)
	}
	for _, p := range w.parts {
		if p.Domain != 5 || p.Slot != 31 || p.Memory != 8<<20 || p.Weight != 3 {
			t.Errorf("part %+v", p)
		}
	}
	w.domains["uuid-web"] = Domain{ID: 5, HVM: true}
	w.reconcile()
	if w.phase() != "attached" || w.slices()[0].GetCounts()[0].GetExits() != 7 {
		t.Errorf("%v", w.slices())
	}
	if l := w.k.Labels("uuid-web"); len(l) != 1 || l[0] != "soft0 (1of2)" {
		t.Errorf("labels %v", l)
	}
	delete(w.domains, "uuid-web")
	w.reconcile()
	if w.phase() != "ready" || len(w.parts) != 0 {
		t.Errorf("after its end: phase %s, parts %v", w.phase(), w.parts)
	}
}

func TestRebootGetsAFreshPart(t *testing.T) {
	w := newWorld(t)
	w.give("web")
	w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
	w.reconcile()
	w.domains["uuid-web"] = Domain{ID: 6, Paused: true, HVM: true}
	w.reconcile()
	if w.phase() != "attached" || len(w.parts) != 1 {
		t.Fatalf("phase %s, parts %v", w.phase(), w.parts)
	}
	for _, p := range w.parts {
		if p.Domain != 6 {
			t.Errorf("part %+v", p)
		}
	}
}

func TestDomainThatRanFirstGetsNothing(t *testing.T) {
	w := newWorld(t)
	w.give("web")
	w.domains["uuid-web"] = Domain{ID: 5, HVM: true}
	w.reconcile()
	if w.phase() != "ready" || len(w.parts) != 0 || !w.said("NotAttached") {
		t.Errorf("phase %s, parts %v, events %v", w.phase(), w.parts, w.events)
	}
	n := len(w.events)
	if w.reconcile(); len(w.events) != n {
		t.Errorf("events %v", w.events)
	}
	// It ran, and was paused again.
	w = newWorld(t)
	w.give("web")
	w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true, Ran: true}
	if w.reconcile(); w.phase() != "ready" || len(w.parts) != 0 || !w.said("NotAttached") {
		t.Errorf("paused again: phase %s, parts %v, events %v", w.phase(), w.parts, w.events)
	}
	// It begins to run between the look and the server.
	w = newWorld(t)
	w.give("web")
	w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
	w.onDo = func(call string) {
		if call == "attach" {
			w.domains["uuid-web"] = Domain{ID: 5, HVM: true, Ran: true}
		}
	}
	if err := w.k.Reconcile(t.Context()); !errors.Is(err, errLate) || len(w.parts) != 0 || w.phase() != "ready" || !w.said("NotAttached") {
		t.Errorf("%v, phase %s, parts %v", err, w.phase(), w.parts)
	}
}

// TestDomainThatIsBeingMade gets its part when it has its vCPUs, and nobody is told before.
func TestDomainThatIsBeingMade(t *testing.T) {
	w := newWorld(t)
	w.give("web")
	w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
	w.fail["attach"] = fmt.Errorf("vCPU 0: %w", server.ErrEarly)
	for range 2 {
		err := w.k.Reconcile(t.Context())
		if !errors.Is(err, server.ErrEarly) || w.k.pause(err) != w.k.Soon || w.phase() != "ready" || w.said("NotAttached") {
			t.Errorf("%v, looks again in %v, phase %s, events %v", err, w.k.pause(err), w.phase(), w.events)
		}
	}
	delete(w.fail, "attach")
	if w.reconcile(); w.phase() != "attached" || w.k.pause(nil) != w.k.Every {
		t.Errorf("phase %s, looks again in %v", w.phase(), w.k.pause(nil))
	}
}

// TestKilledAtEachCall kills hostd before and after each call that a start and an end
// make. The next hostd always ends with a part for the domain that runs, and none else.
func TestKilledAtEachCall(t *testing.T) {
	type killed struct{}
	for at := range 40 {
		w := newWorld(t)
		w.give("web")
		n := 0
		w.onDo = func(string) {
			if n++; n == at+1 {
				panic(killed{})
			}
		}
		run := func() (dead bool) {
			defer func() {
				if r := recover(); r != nil {
					if _, ok := r.(killed); !ok {
						panic(r)
					}
					dead = true
				}
			}()
			w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
			w.reconcile()
			w.domains["uuid-web"] = Domain{ID: 6, Paused: true, HVM: true}
			w.reconcile()
			w.reconcile()
			return false
		}
		dead := run()
		w.onDo = nil
		w.restart()
		w.reconcile()
		w.reconcile()
		now := w.domains["uuid-web"].ID
		if len(w.parts) != 1 || w.phase() != "attached" {
			t.Errorf("killed at call %d: phase %s, parts %v", at, w.phase(), w.parts)
		}
		for _, p := range w.parts {
			if p.Domain != now {
				t.Errorf("killed at call %d: domain %d has the part, not %d", at, p.Domain, now)
			}
		}
		if !dead {
			return
		}
	}
	t.Error("there are more calls than this test kills")
}

func TestLostPartIsTold(t *testing.T) {
	for name, lose := range map[string]func(w *world, id string){
		"its process was killed": func(w *world, id string) {
			p := w.parts[id]
			p.Lost = "the process died"
			w.parts[id] = p
		},
		"the process knows nothing": func(w *world, id string) { delete(w.parts, id) },
	} {
		w := newWorld(t)
		w.give("web")
		w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
		w.reconcile()
		for id := range w.parts {
			lose(w, id)
		}
		w.domains["uuid-web"] = Domain{ID: 5, HVM: true}
		w.reconcile()
		w.reconcile()
		s := w.slices()[0]
		if !strings.Contains(s.GetMessage(), "reads as ones") || !w.said("PartLost") || w.k.Inventory()[0].GetHealth() != clusterv1.Health_HEALTH_DEGRADED {
			t.Errorf("%s: %v, events %v", name, s, w.events)
		}
		// The VM is started anew: it has a part that works.
		w.domains["uuid-web"] = Domain{ID: 8, Paused: true, HVM: true}
		w.reconcile()
		if s := w.slices()[0]; s.GetMessage() != "" || w.phase() != "attached" || len(w.parts) != 1 {
			t.Errorf("%s: afterwards %v, parts %v", name, s, w.parts)
		}
	}
}

func TestPartWithoutRecordIsTakenBack(t *testing.T) {
	w := newWorld(t)
	w.parts["stray"] = server.Status{Part: server.Part{ID: "stray", Domain: 9}}
	w.reconcile()
	if len(w.parts) != 0 {
		t.Errorf("parts %v", w.parts)
	}
}

func TestWhatCannotHaveAPart(t *testing.T) {
	w := newWorld(t)
	w.vm("run", "running")
	w.vms["pvh"] = vm.Info{VM: vm.VM{UUID: "uuid-pvh", Name: "pvh"}, State: "shutoff", Type: "pvh"}
	for name, r := range map[string]*gpuctlv1.AttachRequest{
		"a VM that runs":  {Machine: "run", Gpu: "soft0"},
		"a PVH guest":     {Machine: "pvh", Gpu: "soft0"},
		"another profile": {Machine: "web", Gpu: "soft0", Profile: "1of4"},
		"too much memory": {Machine: "web", Gpu: "soft0", MinMemory: 9 << 20},
		"no such mode":    {Machine: "web", Gpu: "soft0", Mode: "best"},
		"a huge weight":   {Machine: "web", Gpu: "soft0", Weight: 1 << 20},
	} {
		if err := w.k.Attach(t.Context(), r, func(*gpuctlv1.DeviceUpdate) {}); !errors.Is(err, cards.ErrRefused) {
			t.Errorf("%s: %v", name, err)
		}
		planned := false
		r.Plan = true
		err := w.k.Attach(t.Context(), r, func(u *gpuctlv1.DeviceUpdate) { planned = len(u.GetReasons()) > 0 })
		if err != nil || !planned {
			t.Errorf("%s: the plan has no reason: %v", name, err)
		}
	}
	if len(w.claims) != 0 || len(w.slices()) != 0 {
		t.Errorf("claims %v, parts %v", w.claims, w.slices())
	}
}

func TestNoMorePartsThanThereAre(t *testing.T) {
	w := newWorld(t)
	w.give("web")
	w.give("db")
	err := w.k.Attach(t.Context(), &gpuctlv1.AttachRequest{Machine: "db", Gpu: "soft0"}, func(*gpuctlv1.DeviceUpdate) {})
	if !errors.Is(err, cards.ErrRefused) || len(w.slices()) != 2 {
		t.Errorf("%v, parts %v", err, w.slices())
	}
	if p := w.k.Cards()[0].GetProfiles()[0]; p.GetFree() != 0 || p.GetWhy() == "" {
		t.Errorf("profile %v", p)
	}
}

// TestPlanOfAPartThatThereIsNot: the plan of an attach has what the attach is refused for.
func TestPlanOfAPartThatThereIsNot(t *testing.T) {
	w := newWorld(t)
	against := func() (codes []string) {
		t.Helper()
		err := w.k.Attach(t.Context(), &gpuctlv1.AttachRequest{Machine: "db", Gpu: "soft0", Plan: true}, func(u *gpuctlv1.DeviceUpdate) {
			for _, r := range u.GetReasons() {
				codes = append(codes, r.GetCode())
			}
		})
		if err != nil {
			t.Error(err)
		}
		return codes
	}
	w.give("web")
	if codes := against(); len(codes) != 0 {
		t.Errorf("with a free part: %v", codes)
	}
	w.give("web")
	if codes := against(); !slices.Equal(codes, []string{"busy"}) {
		t.Errorf("without a free part: %v", codes)
	}
	w.fail["process"] = errors.New("it has no memory")
	if err := w.k.Reconcile(t.Context()); err == nil {
		t.Error("its process is there")
	}
	if codes := against(); !slices.Equal(codes, []string{"health"}) {
		t.Errorf("without its process: %v", codes)
	}
}

func TestDetach(t *testing.T) {
	w := newWorld(t)
	w.give("web")
	w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
	w.reconcile()
	r := &gpuctlv1.DetachRequest{Machine: "web", Gpu: "soft0"}
	none := func(*gpuctlv1.DeviceUpdate) {}
	if err := w.k.Detach(t.Context(), r, none); !errors.Is(err, cards.ErrRefused) || len(w.parts) != 1 {
		t.Errorf("from a VM that runs: %v", err)
	}
	r.Unconfirmed = true
	w.fail["detach"] = errors.New("a vCPU waits")
	if err := w.k.Detach(t.Context(), r, none); err == nil || w.phase() != "detaching" {
		t.Errorf("%v, phase %s", err, w.phase())
	}
	delete(w.fail, "detach")
	w.restart()
	w.reconcile()
	w.Settle(t.Context())
	if len(w.parts) != 0 || len(w.slices()) != 0 || len(w.claims) != 0 {
		t.Errorf("parts %v %v, claims %v", w.parts, w.slices(), w.claims)
	}
	if err := w.k.Detach(t.Context(), r, none); !errors.Is(err, cards.ErrNotFound) {
		t.Error(err)
	}
}

func TestStartIsRefusedWithoutTheProcess(t *testing.T) {
	w := newWorld(t)
	w.give("web")
	if err := w.k.PrepareStart(t.Context(), w.vms["web"].VM); err != nil {
		t.Error(err)
	}
	w.fail["process"] = errors.New("it ended at its start")
	if err := w.k.PrepareStart(t.Context(), w.vms["web"].VM); !errors.Is(err, cards.ErrRefused) {
		t.Error(err)
	}
	if err := w.k.PrepareStart(t.Context(), w.vms["db"].VM); err != nil {
		t.Errorf("a VM without a part: %v", err)
	}
	if err := w.k.Reconcile(t.Context()); err == nil || w.k.Inventory()[0].GetHealth() != clusterv1.Health_HEALTH_FAILED {
		t.Errorf("%v, %v", err, w.k.Inventory()[0])
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"version":1,"assignments":[{"id":"a","gpu":"g","machine":"u","claim":"c","memory":1,"slot":31,"phase":"ready"}]}`))
	f.Add([]byte(`{"version":1,"assignments":[null]}`))
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		all, err := decodeRecord(data)
		if err != nil {
			return
		}
		for _, a := range all {
			if a.ID == "" || a.Slot == 0 || a.Slot > 31 || (a.Phase == attached && a.Domain == 0) {
				t.Errorf("%+v", a)
			}
		}
	})
}

// TestSilentProcessIsNotTakenForALoss: nobody knows what it has, and a VM's part may work.
func TestSilentProcessIsNotTakenForALoss(t *testing.T) {
	for _, call := range []string{"process", "list"} {
		w := newWorld(t)
		w.give("web")
		w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
		w.reconcile()
		w.fail[call] = errors.New("it does not answer")
		if err := w.k.Reconcile(t.Context()); err == nil {
			t.Errorf("%s: nobody was told", call)
		}
		if w.phase() != "attached" || w.said("PartLost") || w.slices()[0].GetMessage() != "" {
			t.Errorf("%s: %s, events %v", call, w.phase(), w.events)
		}
	}
}

// TestHookKnowsVMsWithParts, also when hostd was just started.
func TestHookKnowsVMsWithParts(t *testing.T) {
	w := newWorld(t)
	if len(w.listed) != 0 {
		t.Errorf("listed %v", w.listed)
	}
	w.give("web")
	w.listed = nil
	w.restart()
	if len(w.listed) != 1 || w.listed[0] != "uuid-web" {
		t.Errorf("listed %v", w.listed)
	}
	if err := w.k.Detach(t.Context(), &gpuctlv1.DetachRequest{Machine: "web"}, func(*gpuctlv1.DeviceUpdate) {}); err != nil || len(w.listed) != 0 {
		t.Errorf("%v, listed %v", err, w.listed)
	}
}

// TestPartOfAVMThatIsGoneIsGivenBack: libvirt knows the VM no more, or another one by its name.
func TestPartOfAVMThatIsGoneIsGivenBack(t *testing.T) {
	for _, ref := range []string{"web", "uuid-web"} {
		w := newWorld(t)
		w.give("web")
		delete(w.vms, "web") // virsh undefine
		if ref == "uuid-web" {
			w.vms["web"] = vm.Info{VM: vm.VM{UUID: "uuid-2", Name: "web"}, State: "shutoff", Type: "hvm"}
		}
		both := Both{Mediated: w.k}
		if err := both.Detach(t.Context(), &gpuctlv1.DetachRequest{Machine: ref}, func(*gpuctlv1.DeviceUpdate) {}); err != nil || len(w.slices()) != 0 {
			t.Errorf("%s: %v, %v", ref, err, w.slices())
		}
		if w.Settle(t.Context()); len(w.claims) != 0 {
			t.Errorf("%s: claims %v", ref, w.claims)
		}
	}
}

// TestPartOfAGPUThatIsNotConfiguredAnyMore: after a restart of the host no process has it.
func TestPartOfAGPUThatIsNotConfiguredAnyMore(t *testing.T) {
	w := newWorld(t)
	w.give("web")
	w.domains["uuid-web"] = Domain{ID: 5, Paused: true, HVM: true}
	w.reconcile()
	delete(w.domains, "uuid-web")
	c := w.k.Config
	c.GPUs = nil
	c.Process = func(context.Context, string) (Process, error) {
		return nil, errors.New("it is not in the configuration")
	}
	k, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	w.k = k
	w.reconcile()
	if err := k.Detach(t.Context(), &gpuctlv1.DetachRequest{Machine: "web"}, func(*gpuctlv1.DeviceUpdate) {}); err != nil || len(k.Held()) != 0 {
		t.Errorf("%v, %v", err, k.Held())
	}
}
