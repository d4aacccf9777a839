package cards

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

var errCrashed = errors.New("hostd is dead")

// world is a host with two cards and two VMs. It enforces what the kernel, the
// hypervisor and the cluster enforce, and can end hostd at any call.
type world struct {
	t    *testing.T
	tree *pcitest.Tree
	root fs.FS // the machine's files: tree, or those of sliced
	sliced
	dir string

	mu             sync.Mutex
	unreported     bool                   // the cluster does not know the GPUs yet
	building       string                 // VM whose domain is being made
	driver         map[pci.Address]string // bound
	native         map[pci.Address]string
	owner          map[pci.Address]string           // VM's UUID
	seats          map[string]map[uint8]pci.Address // VM, slot of its bus: the function that is there
	noSeats        bool                             // the hypervisor is told of no slot, as libxl by libvirt
	dirty          map[pci.Address]string           // the VM that has had it since it was reset
	machines       map[string]*vm.Info
	stored         map[string][]pci.Address
	claims         map[string]string // claim: GPU
	dead           map[pci.Address]bool
	deaf           map[string]bool // VMs that do not answer a detach
	hyperDown      bool
	care           bool
	hotplugBlocker string
	noQuorum       bool
	released       map[pci.Address]bool   // by their VM, and still on the hypervisor's list
	listed         map[pci.Address]string // by libvirt as a VM's
	again          map[pci.Address]string // to their VM, and unseen or inUse there
	libvirtDies    string                 // in the next detach: early or late
	resetFail      map[pci.Address]error
	takeFail       error                                  // of every function
	resets         func(ctx context.Context, c *pci.Card) // called when a reset begins; nil: nothing
	pending        bool                                   // migrations have not ended
	events         []string
	now            time.Time

	calls   int
	crashAt int  // 0: never
	after   bool // the call that crashes has its effect
	crashed bool
	saved   []byte // the record as hostd's end left it
	keeper  *Keeper
}

const uuid1, uuid2 = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"

// inMemory is a folder on a file system that syncs at once, if there is one:
// thousands of records are written.
func inMemory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "cards")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := emptyWorld(t)
	w.tree = pcitest.New(t)
	w.tree.Add(pcitest.Port("0000:00:01.0", "", -1, pci.PortRoot, pcitest.FullACS()), pcitest.Port("0000:00:02.0", "", -1, pci.PortRoot, pcitest.FullACS()))
	w.tree.Add(pcitest.NVIDIACard("0000:65:00", "0000:00:01.0", -1, 0)...)
	w.tree.Add(pcitest.SRIOVAccelerator("0000:06", "0000:00:02.0", -1, 0, 0, 0)...)
	cards, err := pci.Scan(w.tree.FS())
	if err != nil || len(cards) != 2 {
		t.Fatalf("%d cards, %v", len(cards), err)
	}
	for _, c := range cards {
		for _, f := range c.Functions {
			w.driver[f.Address], w.native[f.Address] = f.Driver, f.Driver
		}
	}
	w.root = w.tree.FS()
	w.start()
	return w
}

// What a VM makes of a function that it is given again.
const unseen, inUse = "not seen yet", "in use"

// emptyWorld has two VMs and no cards.
func emptyWorld(t *testing.T) *world {
	t.Helper()
	return &world{
		t: t, dir: inMemory(t), driver: map[pci.Address]string{}, native: map[pci.Address]string{}, owner: map[pci.Address]string{},
		dirty: map[pci.Address]string{}, stored: map[string][]pci.Address{}, claims: map[string]string{}, dead: map[pci.Address]bool{}, deaf: map[string]bool{},
		seats: map[string]map[uint8]pci.Address{uuid1: {}, uuid2: {}}, resetFail: map[pci.Address]error{}, released: map[pci.Address]bool{}, listed: map[pci.Address]string{}, again: map[pci.Address]string{}, now: time.Unix(1e9, 0),
		machines: map[string]*vm.Info{
			uuid1: {VM: vm.VM{UUID: uuid1, Name: "one"}, State: "running", Type: "hvm", Persistent: true},
			uuid2: {VM: vm.VM{UUID: uuid2, Name: "two"}, State: "running", Type: "hvm", Persistent: true},
		},
	}
}

func address(s string) pci.Address {
	a, err := pci.ParseAddress(s)
	if err != nil {
		panic(err)
	}
	return a
}

var (
	card4 = []pci.Address{address("0000:65:00.0"), address("0000:65:00.1"), address("0000:65:00.2"), address("0000:65:00.3")}
	card1 = []pci.Address{address("0000:06:00.0")}
)

func (w *world) file() string { return filepath.Join(w.dir, "cards.json") }

// start is hostd's start.
func (w *world) start() {
	w.t.Helper()
	c := Config{
		Platform: Platform{PCI: pci.NewScanner(w.root), Binder: w, Resetter: w, Hypervisor: w, VMs: w, Isolation: w}, File: w.file(), Guests: w, Cluster: cluster{w},
		GPUs: w.gpus, Now: w.clock, Pending: func(context.Context, string) bool { return w.pending }, Log: slog.New(slog.DiscardHandler),
		Event:  w.event,
		Timing: Timing{Verify: 30 * time.Millisecond, Step: 5 * time.Second, Grace: time.Minute},
	}
	w.cuts(&c)
	k, err := New(c)
	if err != nil {
		w.t.Fatal(err)
	}
	w.keeper = k
}

func (w *world) event(gpu, kind, message string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, kind+" "+gpu+" "+message)
}

// restart lets hostd begin anew with what its end has left on disk.
func (w *world) restart() {
	w.t.Helper()
	w.keeper.work.Wait()
	if w.crashed {
		if w.saved == nil {
			_ = os.Remove(w.file())
		} else if err := os.WriteFile(w.file(), w.saved, 0o600); err != nil {
			w.t.Fatal(err)
		}
	}
	w.crashed, w.crashAt, w.calls = false, 0, 0
	w.start()
}

func (w *world) clock() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

func (w *world) pass(d time.Duration) {
	w.mu.Lock()
	w.now = w.now.Add(d)
	w.mu.Unlock()
}

// call is one of hostd's calls that change something. After hostd's end nothing
// has an effect.
func (w *world) call(do func() error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.crashed {
		return errCrashed
	}
	w.calls++
	w.readable()
	if w.calls == w.crashAt {
		if w.after {
			_ = do()
		}
		w.crashed = true
		w.saved, _ = os.ReadFile(w.file())
		return errCrashed
	}
	return do()
}

// readable checks that hostd could begin anew with what is on disk now.
func (w *world) readable() {
	data, err := os.ReadFile(w.file())
	if err == nil {
		_, err = decodeRecord(data)
	} else if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	if err != nil {
		w.t.Errorf("the record could not be read again: %v", err)
	}
}

func (w *world) Take(_ context.Context, functions []pci.Address, driver string) error {
	return w.call(func() error {
		if w.takeFail != nil {
			return w.takeFail
		}
		for _, f := range functions {
			if w.owner[f] != "" {
				w.t.Errorf("%s was bound anew while VM %s has it", f, w.owner[f])
			}
			w.bind(f, driver)
		}
		return nil
	})
}

func (w *world) Return(_ context.Context, functions []pci.Address) error {
	return w.call(func() error {
		for _, f := range functions {
			if w.owner[f] != "" {
				w.t.Errorf("%s was returned while VM %s has it", f, w.owner[f])
			}
			if w.dirty[f] != "" {
				w.t.Errorf("%s was returned without a reset", f)
			}
			w.bind(f, w.native[f])
		}
		return nil
	})
}

// bind is what the kernel does, and what a scan finds of it. A machine with
// slices has files of its own.
func (w *world) bind(f pci.Address, driver string) {
	w.driver[f] = driver
	if w.tree != nil {
		w.tree.Bind(f.String(), driver)
	}
}

func (w *world) Reset(ctx context.Context, card *pci.Card) (string, error) {
	if w.resets != nil {
		w.resets(ctx, card)
	}
	err := w.call(func() error {
		for _, f := range card.Functions {
			if w.owner[f.Address] != "" {
				w.t.Errorf("%s was reset while VM %s has it", f.Address, w.owner[f.Address])
			}
			if w.driver[f.Address] != w.Driver() {
				w.t.Errorf("%s was reset while %q, which is not the hypervisor's driver, has it", f.Address, w.driver[f.Address])
			}
		}
		if err := w.resetFail[card.Address]; err != nil {
			return err
		}
		for _, f := range card.Functions {
			delete(w.dirty, f.Address)
		}
		return nil
	})
	return "flr", err
}

func (w *world) Driver() string                        { return "pciback" }
func (w *world) Dom0Access(*pci.Card) string           { return "enabled" }
func (w *world) HotplugBlocker(*pci.Card) string       { return w.hotplugBlocker }
func (w *world) Answers(context.Context, string) error { return nil }

func (w *world) Building(_ context.Context, uuid string) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.building == uuid, nil
}

func (w *world) About(string) string { return "gpuguest 1" }
func (w *world) Report(context.Context, *pci.Card) (*gpuctlv1.IsolationResponse, error) {
	if w.care {
		return &gpuctlv1.IsolationResponse{Verdict: "care", Findings: []*gpuctlv1.IsolationFinding{{
			Code: "shared", Severity: "care", Message: "it shares its group with 0000:07:00.0", Advice: "give that away, too",
		}}}, nil
	}
	return &gpuctlv1.IsolationResponse{Verdict: "yes"}, nil
}

func (w *world) Owners(context.Context) (map[pci.Address]vm.VM, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hyperDown {
		return nil, errors.New("xenstored does not answer")
	}
	if w.crashed {
		return nil, errCrashed
	}
	w.readable()
	out := map[pci.Address]vm.VM{}
	for f, uuid := range w.owner {
		if uuid != "" {
			out[f] = vm.VM{UUID: uuid, Name: w.machines[uuid].Name}
		}
	}
	return out, nil
}

func (w *world) List(context.Context) (out []vm.Info, err error) {
	for _, m := range w.machines {
		out = append(out, *m)
	}
	return out, nil
}

func (w *world) Find(_ context.Context, ref string) (vm.Info, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.machines {
		if m.UUID == ref || m.Name == ref {
			return *m, nil
		}
	}
	return vm.Info{}, fmt.Errorf("vm %s: %w", ref, ErrNotFound)
}

func (w *world) Check(_ context.Context, uuid string) ([]*gpuctlv1.Reason, error) {
	if w.machines[uuid].Type != "hvm" {
		return []*gpuctlv1.Reason{why("type", "it is a PV guest")}, nil
	}
	return nil, nil
}

// firstSeat is the first slot of a VM that is not its chipset's or its disk's.
const firstSeat = 4

// seat puts a function on a slot of a VM: the first that is free, if none is named.
func (w *world) seat(uuid string, f pci.Address, at *pci.Address) {
	slot := uint8(firstSeat)
	if at != nil && !w.noSeats {
		if *at != (pci.Address{Device: at.Device}) {
			w.t.Errorf("VM %s has no slot %s", uuid, at)
		}
		if other, taken := w.seats[uuid][at.Device]; !taken {
			w.seats[uuid][at.Device] = f
			return
		} else if other != f {
			w.t.Logf("VM %s has %s at %s", uuid, other, at)
		}
	}
	for w.seats[uuid][slot] != (pci.Address{}) {
		slot++
	}
	w.seats[uuid][slot] = f
}

// unseat is its undo.
func (w *world) unseat(f pci.Address) {
	for _, seats := range w.seats {
		maps.DeleteFunc(seats, func(_ uint8, o pci.Address) bool { return o == f })
	}
}

func (w *world) GuestAddress(_ context.Context, uuid string, f pci.Address) (*pci.Address, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hyperDown {
		return nil, errors.New("xenstored does not answer")
	}
	if w.crashed {
		return nil, errCrashed
	}
	for slot, o := range w.seats[uuid] {
		if o == f {
			return &pci.Address{Device: slot}, nil
		}
	}
	return nil, nil //nolint:nilnil // the VM does not have it
}

// give is what the hypervisor does when a VM gets a function.
func (w *world) give(uuid string, f pci.Address, at *pci.Address) error {
	switch {
	case w.driver[f] != "pciback" && !w.vendorTyped(f):
		return fmt.Errorf("%s is not assignable", f)
	case w.owner[f] != "":
		return fmt.Errorf("%s is in use", f)
	case w.dirty[f] != "" && w.dirty[f] != uuid:
		w.t.Errorf("VM %s got %s, which was not reset since another VM had it", uuid, f)
	}
	w.owner[f], w.dirty[f] = uuid, uuid
	w.seat(uuid, f, at)
	return nil
}

func (w *world) Attach(_ context.Context, uuid string, f pci.Address, at *pci.Address) error {
	return w.call(func() error {
		if w.listed[f] != "" {
			return errors.New("target pci device already exists")
		}
		err := w.give(uuid, f, at)
		if err == nil {
			w.listed[f] = uuid
		}
		return err
	})
}

// Has is of a VM whose agent always answers. What it is given again it sees
// when it is asked for the second time.
func (w *world) Has(_ context.Context, uuid string, f pci.Address) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.again[f] == unseen {
		w.again[f] = inUse
		return false, nil
	}
	return w.owner[f] == uuid && !w.released[f], nil
}

func (w *world) ForceDetach(_ context.Context, uuid string, f pci.Address) error {
	return w.call(func() error {
		if w.owner[f] != uuid || !w.released[f] {
			w.t.Errorf("%s was taken off the list of VM %s, which has it", f, uuid)
		}
		w.owner[f] = ""
		w.unseat(f)
		delete(w.released, f)
		return nil
	})
}

func (w *world) ForceAttach(_ context.Context, uuid string, f pci.Address) error {
	return w.call(func() error {
		if w.listed[f] != uuid {
			w.t.Errorf("VM %s got %s, which libvirt does not list", uuid, f)
		}
		w.again[f] = unseen
		return w.give(uuid, f, nil)
	})
}

func (w *world) Listed(_ context.Context, uuid string, f pci.Address) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.listed[f] == uuid, nil
}

func (w *world) Detach(_ context.Context, uuid string, f pci.Address) error {
	return w.call(func() error {
		switch {
		case w.deaf[uuid]:
			return errors.New("timed out")
		case w.released[f] || w.owner[f] != uuid && w.listed[f] == uuid:
			w.t.Errorf("libvirt is to detach %s, which VM %s has not got, and corrupts its list", f, uuid)
		case w.owner[f] != uuid:
			return fmt.Errorf("%s: no such device", f)
		case w.again[f] != "":
			w.t.Errorf("libvirt is to detach %s, which is %s in VM %s", f, w.again[f], uuid)
		case w.libvirtDies == "early": // with this detach
			w.libvirtDies, w.released[f] = "", true
			return errors.New("end of file while reading data")
		}
		w.owner[f] = ""
		w.unseat(f)
		if w.libvirtDies == "late" {
			w.libvirtDies = ""
			return errors.New("end of file while reading data")
		}
		delete(w.listed, f)
		return nil
	})
}

func (w *world) Store(_ context.Context, uuid string, functions []pci.Address) error {
	return w.call(func() error { w.stored[uuid] = slices.Clone(functions); return nil })
}

func (w *world) Unstore(_ context.Context, uuid string, _ []pci.Address) error {
	return w.call(func() error { delete(w.stored, uuid); return nil })
}

func (w *world) LetGo(_ context.Context, uuid string, f pci.Address) error {
	if w.deaf[uuid] {
		return fmt.Errorf("vm %s: its gpuguest does not answer", w.machines[uuid].Name)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.again[f] == inUse {
		delete(w.again, f)
	}
	return nil
}

func (w *world) gpus(context.Context) ([]*clusterv1.GPU, error) {
	return append([]*clusterv1.GPU{
		{Name: "nvidia-0", PciAddress: card4[0].String(), Model: "Quadro"}, {Name: card1[0].String(), PciAddress: card1[0].String(), Model: "A10"}, {Name: "pocl-0"},
	}, w.slicedGPUs()...), nil
}

// detachReleased is a step of the migration m-1.
func (w *world) detachReleased(ctx context.Context, m vm.VM) error {
	_, err := w.keeper.DetachReleased(ctx, m, "nvidia-0", "m-1")
	return err
}

// stop is what libvirt and the hypervisor do when a VM ends.
func (w *world) stop(uuid string) {
	w.mu.Lock()
	w.machines[uuid].State = "shutoff"
	maps.DeleteFunc(w.listed, func(_ pci.Address, o string) bool { return o == uuid })
	for f, o := range w.owner {
		if o == uuid {
			w.owner[f] = ""
			w.unseat(f)
		}
	}
	for id, o := range w.mediated {
		if o == uuid {
			delete(w.mediated, id)
		}
	}
	w.mu.Unlock()
}

// run is a VM's start, after the hook.
func (w *world) run(uuid string, functions ...pci.Address) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.machines[uuid].State = "running"
	for _, f := range functions {
		if err := w.give(uuid, f, nil); err != nil {
			w.t.Error(err)
		}
	}
}

// cluster is the world as the cluster: one claim a GPU.
type cluster struct{ *world }

func (c cluster) HostName() string       { return "h" }
func (c cluster) Settle(context.Context) { c.sweep() }
func (c cluster) Kick()                  {}

func (c cluster) Known(context.Context, []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unreported = false
}

// sweep is the node's part: claims go that no assignment uses.
func (c cluster) sweep() {
	c.mu.Lock()
	all := map[string]string{}
	for id, gpu := range c.claims {
		all[id] = gpu
	}
	dead := c.crashed
	c.mu.Unlock()
	if dead {
		return
	}
	for id, gpu := range all {
		if !c.keeper.Uses(id, gpu) {
			c.mu.Lock()
			delete(c.claims, id)
			c.mu.Unlock()
		}
	}
}

func (c cluster) Claim(_ context.Context, claim *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error) {
	res := &clusterv1.CreateClaimResponse{}
	err := c.call(func() error {
		if c.noQuorum {
			return errors.New("the cluster has no leader now")
		}
		if c.unreported {
			return nil
		}
		for _, gpu := range []string{"nvidia-0", card1[0].String(), slicedGPU} {
			if !strings.Contains(claim.GetExpr(), fmt.Sprintf("%q", gpu)) {
				continue
			}
			taken := false
			for id, other := range c.claims {
				taken = taken || id != claim.GetId() && other == gpu && (claim.GetProfile() == "" || c.profiles[id] == "")
			}
			if taken {
				res.Rejected = append(res.Rejected, &clusterv1.Rejection{Host: "h", Gpu: "h/" + gpu, Reasons: []*gpuctlv1.Reason{why("taken", "it is claimed")}})
				continue
			}
			c.claims[claim.GetId()] = gpu
			if claim.GetProfile() != "" {
				c.profiles[claim.GetId()] = claim.GetProfile()
			}
			res.Assignments = []*clusterv1.Assignment{{Gpu: "h/" + gpu, Host: "h"}}
			res.Rejected = nil
			return nil
		}
		return nil
	})
	return res, err
}

// settled reconciles until time has made everything be decided, and checks
// what must hold then.
func (w *world) settled() {
	w.t.Helper()
	for range 3 {
		if err := w.keeper.Reconcile(w.t.Context()); err != nil {
			w.t.Errorf("reconcile: %v", err)
		}
		w.keeper.work.Wait()
		w.pass(2 * time.Minute)
	}
	cluster{w}.sweep()
	w.check()
}

func (w *world) check() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, functions := range [][]pci.Address{card4, card1} {
		owner := w.owner[functions[0]]
		a := w.keeper.assignments[functions[0]]
		for _, f := range functions {
			switch {
			case w.owner[f] != owner:
				w.t.Errorf("the card of %s is torn apart: %v", f, w.owner)
			case owner == "" && a == nil && w.driver[f] != w.native[f]:
				w.t.Errorf("%s is free and bound to %q, not %q", f, w.driver[f], w.native[f])
			case owner == "" && a != nil && a.Phase != quarantined:
				w.t.Errorf("nobody has %s, and it is %s for %s", f, a.Phase, a.vm())
			case owner != "" && (a == nil || a.Phase != attached || a.UUID != owner):
				w.t.Errorf("VM %s has %s, and the record is %+v", owner, f, a)
			}
		}
		if owner != "" && a != nil && w.claims[a.Claim] != a.GPU {
			w.t.Errorf("VM %s has %s without a claim: %v", owner, a.GPU, w.claims)
		}
	}
	for id, gpu := range w.claims {
		used := false
		for a := range w.keeper.each() {
			used = used || a.Claim == id && a.GPU == gpu
		}
		if !used {
			w.t.Errorf("claim %s of %s stands for nothing", id, gpu)
		}
	}
	w.checkSlices()
	if len(w.keeper.busy)+len(w.keeper.claiming) > 0 {
		w.t.Errorf("left busy: %v %v", w.keeper.busy, w.keeper.claiming)
	}
}
