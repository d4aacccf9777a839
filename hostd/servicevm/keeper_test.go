package servicevm

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

var gpuvm = vm.Info{VM: vm.VM{UUID: "u-gpuvm", Name: "gpuvm"}, State: "running"}

// world is a host with VMs, their gpuguests, and who has parts of their GPUs.
type world struct {
	unknown, looks int // how often it is not known what computes in a VM, and how often it was asked
	t              *testing.T

	mu    sync.Mutex
	vms   []vm.Info
	hello map[string]*gpuctlv1.HelloResponse // by UUID; nil: silent
	where map[string]migrate.Presence
	says  error // instead of hello
	asked map[string]int
	users map[string][]string // by GPU
	stuck error               // of EndUsers

	moves  string // the VM's migration
	begins bool
	calls  []string
	fail   error  // of Cards.Attach
	while  func() // what others do during Cards.Attach
}

func newWorld(t *testing.T) *world {
	return &world{
		t: t, vms: []vm.Info{gpuvm}, hello: map[string]*gpuctlv1.HelloResponse{gpuvm.UUID: hello()},
		where: map[string]migrate.Presence{gpuvm.UUID: migrate.Running}, asked: map[string]int{}, users: map[string][]string{},
	}
}

func (w *world) set(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *world) Where(_ context.Context, uuid string) (migrate.Presence, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.where[uuid], nil
}

func (w *world) Hello(_ context.Context, uuid string) (*gpuctlv1.HelloResponse, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked[uuid]++
	if w.says != nil {
		return nil, w.says
	}
	if h := w.hello[uuid]; h != nil {
		return proto.CloneOf(h), nil
	}
	return nil, errors.New("nobody answers")
}

func (w *world) GuestService(context.Context, string) (gpuctlv1connect.GuestServiceClient, error) {
	return nil, errors.New("not asked for here")
}

// leaving plays a migration of the VM, which begins before it is asked about the second time if begins is set.
func (w *world) leaving(context.Context, string) (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.begins {
		w.begins = false
		w.moves = "m-1"
		return "", nil
	}
	return w.moves, nil
}

func (w *world) Find(_ context.Context, ref string) (vm.Info, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.vms {
		if m.UUID == ref || m.Name == ref {
			return m, nil
		}
	}
	return vm.Info{}, cards.ErrNotFound
}

func (w *world) Attach(_ context.Context, r *gpuctlv1.AttachRequest, report cards.Report) error {
	if w.while != nil && !r.GetPlan() {
		w.while()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if r.GetPlan() {
		report(&gpuctlv1.DeviceUpdate{Plan: []*gpuctlv1.PlannedStep{{Name: "take"}, {Name: "attach"}}, Done: true})
		return nil
	}
	w.calls = append(w.calls, "attach "+r.GetGpu())
	if w.fail != nil {
		return w.fail
	}
	report(&gpuctlv1.DeviceUpdate{Step: "take", StepIndex: 1, Steps: 2, TookNs: 1})
	report(&gpuctlv1.DeviceUpdate{Step: "attach", StepIndex: 2, Steps: 2, TookNs: 1})
	report(&gpuctlv1.DeviceUpdate{Done: true})
	return nil
}

func (w *world) Detach(_ context.Context, r *gpuctlv1.DetachRequest, _ cards.Report) error {
	w.set(func() { w.calls = append(w.calls, "detach "+r.GetGpu()) })
	return nil
}

func (w *world) GPUUsers(gpus []string) (out []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range gpus {
		out = append(out, w.users[g]...)
	}
	return out
}

func (w *world) EndUsers(_ context.Context, _ string, gpus []string, _ string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stuck != nil {
		return w.stuck
	}
	for _, g := range gpus {
		delete(w.users, g)
	}
	return nil
}

func (w *world) ServersChanged(context.Context) {}

func (w *world) NotServing(context.Context, string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.looks++
	if w.looks <= w.unknown {
		return "what computes there is not known"
	}
	return ""
}

func (w *world) keeper(file string) *Service {
	w.t.Helper()
	r, err := NewRegistry(file, "h", w)
	if err != nil {
		w.t.Fatal(err)
	}
	k := NewKeeper(Config{Registry: r, Claims: w, Loopback: func() bool { return false }, Log: slog.New(slog.DiscardHandler), Silent: time.Hour})
	return NewService(ServiceConfig{Keeper: k, VMs: w, Cards: w, Offer: 300 * time.Millisecond, Leaving: w.leaving})
}

func serve(k *Service, r *gpuctlv1.ServeRequest) (last *gpuctlv1.DeviceUpdate, steps []string, err error) {
	r.Machine = gpuvm.Name
	err = k.Serve(context.Background(), r, func(u *gpuctlv1.DeviceUpdate) {
		if last = u; u.GetTookNs() > 0 {
			steps = append(steps, u.GetStep())
		}
	})
	return last, steps, err
}

func endServe(k *Service, r *gpuctlv1.EndServeRequest) (last *gpuctlv1.DeviceUpdate, err error) {
	r.Machine = gpuvm.Name
	err = k.EndServe(context.Background(), r, func(u *gpuctlv1.DeviceUpdate) { last = u })
	return last, err
}

// A VM that offers itself is not asked before an operator has declared it.
func TestOnlyADeclaredVMServes(t *testing.T) {
	w := newWorld(t)
	w.vms = append(w.vms, vm.Info{VM: vm.VM{UUID: "u-loud", Name: "loud"}, State: "running"})
	w.hello["u-loud"], w.where["u-loud"] = hello(), migrate.Running
	file := filepath.Join(t.TempDir(), "service.json")
	k := w.keeper(file)
	last, _, err := serve(k, &gpuctlv1.ServeRequest{Plan: true})
	if err != nil || len(last.GetPlan()) != 2 || len(last.GetReasons()) > 0 || k.Of(gpuvm.UUID) != nil {
		t.Errorf("a plan: %v %v", err, last)
	}
	if _, steps, err := serve(k, &gpuctlv1.ServeRequest{}); err != nil || !slices.Equal(steps, []string{"declare", "offer"}) {
		t.Fatalf("%v: %v", err, steps)
	}
	all := k.GPUs()
	if len(all) != 1 || all[0].Name != "vm-gpuvm" || all[0].Why != "" || !all[0].Present || all[0].Target.GetModel() != "A10" || len(all[0].Addresses) != 1 {
		t.Errorf("%+v", all)
	}
	if of := k.Of(gpuvm.UUID); !slices.Equal(of.GetGpus(), []string{"h/vm-gpuvm"}) || of.GetMessage() != "" || k.Serves(gpuvm.UUID) == "" {
		t.Errorf("%v", of)
	}
	if k.look(t.Context()); w.asked["u-loud"] > 0 || k.Serves("u-loud") != "" {
		t.Error("a VM that nobody has declared was asked")
	}
	if _, _, err := serve(k, &gpuctlv1.ServeRequest{}); !reason.Is(err, reason.Refused) {
		t.Errorf("a second time: %v", err)
	}
	// A restart of hostd: what was known counts, and nothing new is given away before the VM answers.
	again := w.keeper(file).GPUs()
	if len(again) != 1 || again[0].Name != "vm-gpuvm" || again[0].Target.GetLimits().GetGlobalMemory() != 24*gib || again[0].Why == "" {
		t.Errorf("after a restart: %+v", again)
	}
}

func TestAVMThatCannotServeIsRefused(t *testing.T) {
	for says, change := range map[string]func(*world){
		"speaks protocol 4": func(w *world) { w.hello[gpuvm.UUID].Protocol = 4 },
		"say lend":          func(w *world) { w.hello[gpuvm.UUID].LendAddresses = nil },
		"does not answer":   func(w *world) { delete(w.hello, gpuvm.UUID) },
		"start it":          func(w *world) { w.vms[0].State = "shutoff" },
		"bytes of memory":   func(w *world) { w.hello[gpuvm.UUID].Devices[0].Target.Limits.GlobalMemory = 1 << 62 },
	} {
		w := newWorld(t)
		change(w)
		k := w.keeper("")
		if _, _, err := serve(k, &gpuctlv1.ServeRequest{}); !reason.Is(err, reason.Refused) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
		if k.Of(gpuvm.UUID) != nil {
			t.Errorf("%s: it is declared", says)
		}
	}
}

// Who is told that a VM serves others attaches its card somewhere at once. That was refused for as long as hostd
// had not looked at what computes in the VM.
func TestAVMServesOnlyWhenItsCardsCanBeGiven(t *testing.T) {
	w := newWorld(t)
	w.unknown = 1
	if _, _, err := serve(w.keeper(""), &gpuctlv1.ServeRequest{}); err != nil || w.looks != 2 {
		t.Errorf("%v, after %d looks", err, w.looks)
	}
}

// A VM that is being migrated serves nobody: its cards would be taken from those who compute there, or the
// host that it leaves would go on offering them.
func TestAVMThatIsBeingMigratedServesNobody(t *testing.T) {
	for _, begins := range []bool{false, true} {
		w := newWorld(t)
		if w.begins = begins; !begins {
			w.moves = "m-1"
		}
		k := w.keeper("")
		if _, _, err := serve(k, &gpuctlv1.ServeRequest{}); err == nil || !strings.Contains(err.Error(), "migration m-1 of VM "+gpuvm.Name+" has not ended") {
			t.Error(err)
		}
		if k.Of(gpuvm.UUID) != nil || k.Serves(gpuvm.UUID) != "" {
			t.Error("it is declared")
		}
		w.set(func() { w.moves = "" })
		k.Leaving = func(context.Context, string) (string, error) { return "", errors.New("one is being begun") }
		if _, _, err := serve(k, &gpuctlv1.ServeRequest{}); err == nil || !strings.Contains(err.Error(), "VM "+gpuvm.Name+": one is being begun") {
			t.Error(err)
		}
		k.Leaving = w.leaving
		if _, _, err := serve(k, &gpuctlv1.ServeRequest{}); err != nil {
			t.Error(err)
		}
	}
}

// With a card, the VM gets that first. What fails is undone.
func TestACardForAServiceVM(t *testing.T) {
	w := newWorld(t)
	k := w.keeper("")
	if _, steps, err := serve(k, &gpuctlv1.ServeRequest{Gpu: "c"}); err != nil || !slices.Equal(steps, []string{"declare", "take", "attach", "offer"}) {
		t.Errorf("%v: %v", err, steps)
	}
	w = newWorld(t)
	w.fail = errors.New("the card is stuck")
	k = w.keeper("")
	if _, _, err := serve(k, &gpuctlv1.ServeRequest{Gpu: "c"}); !errors.Is(err, w.fail) || k.Of(gpuvm.UUID) != nil {
		t.Errorf("%v", err)
	}
	w = newWorld(t)
	w.hello[gpuvm.UUID].Devices[0].Lends = false // it never comes to lend it
	w.hello[gpuvm.UUID].Devices[0].Message = "no driver"
	k = w.keeper("")
	if _, _, err := serve(k, &gpuctlv1.ServeRequest{Gpu: "c"}); err == nil || k.Of(gpuvm.UUID) != nil || !slices.Equal(w.calls, []string{"attach c", "detach c"}) {
		t.Errorf("%v, %v", err, w.calls)
	}
}

// The VM has another card already, and somebody gets a part of that while the new one fails to
// come. What computes there must not be forgotten: the card could be detached under it.
func TestAnAttachThatFailsForgetsNoServiceVMThatOthersUse(t *testing.T) {
	w := newWorld(t)
	w.fail = errors.New("the card is stuck")
	k := w.keeper(filepath.Join(t.TempDir(), "service.json"))
	w.while = func() {
		k.look(t.Context())
		w.set(func() { w.users["vm-gpuvm"] = []string{"vm:web"} })
	}
	if _, _, err := serve(k, &gpuctlv1.ServeRequest{Gpu: "c"}); !errors.Is(err, w.fail) {
		t.Errorf("%v", err)
	}
	if _, err := k.Hold(gpuvm.UUID); err == nil || !strings.Contains(err.Error(), "vm:web") {
		t.Errorf("a detach of its card: %v", err)
	}
	if all := k.GPUs(); len(all) != 1 || all[0].Why == "" {
		t.Errorf("it is forgotten, or given to others: %+v", all)
	}
	w.set(func() { delete(w.users, "vm-gpuvm") })
	if k.look(t.Context()); k.Of(gpuvm.UUID) != nil {
		t.Error("it is a service VM for ever")
	}
}

// While others have parts of its GPUs, nothing is taken from a VM but by force, and no card.
func TestNothingIsTakenFromAServiceVMInUse(t *testing.T) {
	w := newWorld(t)
	k := w.keeper("")
	if _, _, err := serve(k, &gpuctlv1.ServeRequest{}); err != nil {
		t.Fatal(err)
	}
	w.set(func() { w.users["vm-gpuvm"] = []string{"vm:web"} })
	if _, err := k.Hold(gpuvm.UUID); err == nil || !strings.Contains(err.Error(), "vm:web") {
		t.Errorf("a detach of its card: %v", err)
	}
	if last, err := endServe(k, &gpuctlv1.EndServeRequest{Plan: true}); err != nil || len(last.GetReasons()) != 1 || last.GetReasons()[0].GetCode() != "in_use" {
		t.Errorf("%v: %v", err, last)
	}
	if _, err := endServe(k, &gpuctlv1.EndServeRequest{}); !reason.Is(err, reason.Refused) || k.GPUs()[0].Why != "" {
		t.Errorf("%v", err)
	}
	// What computes there may not end: it stays, and is given to nobody.
	w.set(func() { w.stuck = errors.New("the VM does not answer") })
	if _, err := endServe(k, &gpuctlv1.EndServeRequest{Unconfirmed: true}); !errors.Is(err, w.stuck) || len(k.GPUs()) != 1 || k.GPUs()[0].Why == "" {
		t.Errorf("%v: %+v", err, k.GPUs())
	}
	k.look(t.Context())
	if len(k.GPUs()) != 1 {
		t.Error("it was forgotten while somebody computes there")
	}
	w.set(func() { delete(w.users, "vm-gpuvm") })
	k.look(t.Context())
	if k.Of(gpuvm.UUID) != nil || len(k.GPUs()) > 0 {
		t.Errorf("it is not forgotten: %v", k.Of(gpuvm.UUID))
	}
	if _, err := endServe(k, &gpuctlv1.EndServeRequest{}); !reason.Is(err, reason.NotFound) {
		t.Errorf("a second time: %v", err)
	}
}

// A card that nobody has a part of can be detached; meanwhile nobody gets one.
func TestACardOfAServiceVMIsHeldForItsDetach(t *testing.T) {
	w := newWorld(t)
	k := w.keeper("")
	if _, _, err := serve(k, &gpuctlv1.ServeRequest{}); err != nil {
		t.Fatal(err)
	}
	end, err := k.Hold(gpuvm.UUID)
	if err != nil || k.GPUs()[0].Why == "" {
		t.Fatalf("%v: %+v", err, k.GPUs())
	}
	w.set(func() { w.hello[gpuvm.UUID].Devices = nil }) // it has gone
	end()
	k.look(t.Context())
	if all := k.GPUs(); len(all) > 0 || k.Of(gpuvm.UUID).GetMessage() == "" {
		t.Errorf("%+v", all)
	}
	if end, err := k.Hold("u-other"); err != nil {
		t.Error(err)
	} else {
		end()
	}
}

// What becomes of a GPU when its VM is silent, stops, lies, or has another card in its place.
func TestAGPUIsWhatItsVMSays(t *testing.T) {
	w := newWorld(t)
	k := w.keeper("")
	k.Silent = time.Nanosecond
	if _, _, err := serve(k, &gpuctlv1.ServeRequest{}); err != nil {
		t.Fatal(err)
	}
	look := func(want string, present bool) {
		t.Helper()
		k.look(t.Context())
		all := k.GPUs()
		if len(all) != 1 || all[0].Present != present || !strings.Contains(all[0].Why, want) || (want == "") != (all[0].Why == "") || all[0].Target.GetLimits().GetGlobalMemory() != 24*gib {
			t.Errorf("%+v, want %q", all, want)
		}
	}
	honest := w.hello[gpuvm.UUID]
	w.set(func() { delete(w.hello, gpuvm.UUID) })
	look("does not answer", true)
	w.set(func() { w.hello[gpuvm.UUID] = honest })
	look("", true)
	w.set(func() { w.says = errors.New("\x00\xff" + strings.Repeat("x", 1<<16)) }) // an error is a VM's words, too
	look("does not answer", true)
	if why := k.GPUs()[0].Why; len(why) > 250 || strings.ContainsRune(why, 0) || !utf8.ValidString(why) {
		t.Errorf("%d bytes are passed on: %.300q", len(why), why)
	}
	w.set(func() { w.says = nil })
	lies := proto.CloneOf(honest)
	lies.Devices[0].Target.Limits.MaxAlloc = 1 << 63
	w.set(func() { w.hello[gpuvm.UUID] = lies })
	look("one allocation", true)
	w.set(func() { w.hello[gpuvm.UUID], w.where[gpuvm.UUID] = honest, migrate.Stopped })
	look("stopped", false)
	other := proto.CloneOf(honest)
	other.Devices[0].Target.Model = "A2"
	w.set(func() {
		w.hello[gpuvm.UUID], w.where[gpuvm.UUID], w.users["vm-gpuvm"] = other, migrate.Running, []string{"host b"}
	})
	look("another card", true)
	w.set(func() { delete(w.users, "vm-gpuvm") })
	look("", true)
	if m := k.GPUs()[0].Target.GetModel(); m != "A2" {
		t.Error(m)
	}
	if k.Ended(t.Context(), gpuvm.UUID) {
		t.Error("it runs")
	}
}
