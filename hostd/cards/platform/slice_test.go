package platform

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/isolation"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/reset"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
	"github.com/gpuctl/gpuctl/passthrough/vgpu"
)

// pf is a card with SR-IOV.
const pf = "0000:65:00.0"

// rig is a Xen host with one card that has virtual functions: the kernel is
// sysfstest's, and all of hostd that changes it is what runs in production.
type rig struct {
	t       *testing.T
	m       *sysfstest.Machine
	dir     string
	claims  map[string]bool
	journal *bind.Journal
	binder  *bind.Binder
	reset   *reset.Resetter
	keeper  *cards.Keeper
	saved   map[string][]byte // hostd's files as its end left them
}

// kernel notes what is on hostd's disk when it is ended at a write: it goes on
// in this process, and what it records then was never written.
type kernel struct {
	*sysfstest.Machine
	r *rig
}

func (k kernel) Write(ctx context.Context, name, data string) error {
	return k.r.ending(func() error { return k.Machine.Write(ctx, name, data) })
}

func (r *rig) step(what string) error {
	return r.ending(func() error { return r.m.Step(what) })
}

func (r *rig) ending(do func() error) error {
	if r.m.Crashed() {
		return do()
	}
	files := r.files()
	err := do()
	if r.m.Crashed() {
		r.saved = files
	}
	return err
}

func (r *rig) files() map[string][]byte {
	out := map[string][]byte{}
	err := filepath.WalkDir(r.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		out[path] = data
		return err
	})
	if err != nil {
		r.t.Error(err)
	}
	return out
}

// restore brings back the files of hostd's end.
func (r *rig) restore() {
	if r.saved == nil {
		return
	}
	for path := range r.files() {
		if _, was := r.saved[path]; !was {
			if err := os.Remove(path); err != nil {
				r.t.Error(err)
			}
		}
	}
	for path, data := range r.saved {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			r.t.Error(err)
		}
	}
	r.saved = nil
}

const (
	guest = "11111111-1111-1111-1111-111111111111"
	vf0   = "0000:65:00.4"
)

func newRig(t *testing.T) *rig {
	t.Helper()
	m := sysfstest.New()
	m.Load(sysfstest.Pciback())
	m.Add(pcitest.Port("0000:00:01.0", "", 1, pci.PortRoot, pcitest.FullACS()))
	m.Add(pcitest.SRIOVAccelerator("0000:65", "0000:00:01.0", 10, 0, 2, 0)...)
	r := &rig{t: t, m: m, dir: t.TempDir(), claims: map[string]bool{}}
	r.start()
	return r
}

// start is hostd's start.
func (r *rig) start() {
	r.t.Helper()
	known, err := catalog.Load()
	if err != nil {
		r.t.Fatal(err)
	}
	if r.journal, err = bind.OpenJournal(filepath.Join(r.dir, "drivers")); err != nil {
		r.t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	r.reset = reset.New(kernel{r.m, r}, reset.WithRecords(filepath.Join(r.dir, "resets")))
	r.binder = bind.New(kernel{r.m, r}, r.journal, bind.WithUsers(guests(r)))
	r.keeper, err = cards.New(cards.Config{
		Platform: cards.Platform{
			PCI: pci.NewScanner(kernel{r.m, r}), Binder: r.binder, Resetter: resetter{r.reset, known, log}, Hypervisor: r, VMs: r,
			Isolation: judge{isolation.Kernel{Root: kernel{r.m, r}}}, Slicer: vgpu.New(kernel{r.m, r}, known.Lookup),
		},
		File: filepath.Join(r.dir, "cards.json"), Cluster: r, Log: log,
		GPUs: func(context.Context) ([]*clusterv1.GPU, error) {
			return []*clusterv1.GPU{{Name: "a10-0", PciAddress: pf}}, nil
		},
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

// restart lets hostd begin anew after its end.
func (r *rig) restart() {
	r.t.Helper()
	if err := r.journal.Close(); err != nil {
		r.t.Fatal(err)
	}
	r.restore()
	r.m.Restart()
	r.start()
	if _, err := r.reset.Recover(r.t.Context()); err != nil {
		r.t.Error(err)
	}
	if _, err := r.binder.Recover(r.t.Context()); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) Driver() string                  { return driverXen }
func (r *rig) Dom0Access(*pci.Card) string     { return "" }
func (r *rig) HotplugBlocker(*pci.Card) string { return "" }

func (r *rig) Building(context.Context, string) (bool, error) { return false, nil }

func (r *rig) Owners(context.Context) (map[pci.Address]vm.VM, error) {
	if r.m.Crashed() {
		return nil, sysfstest.ErrCrashed
	}
	out := map[pci.Address]vm.VM{}
	for n := range 6 {
		a, _ := pci.ParseAddress(fmt.Sprintf("0000:65:00.%d", n))
		if r.m.Guest(a) != "" {
			out[a] = vm.VM{UUID: guest, Name: "web"}
		}
	}
	return out, nil
}

func (r *rig) List(context.Context) ([]vm.Info, error) { return nil, nil }

func (r *rig) Find(context.Context, string) (vm.Info, error) {
	return vm.Info{VM: vm.VM{UUID: guest, Name: "web"}, State: "running", Type: "hvm"}, nil
}

func (r *rig) Check(context.Context, string) ([]*gpuctlv1.Reason, error) { return nil, nil }

func (r *rig) GuestAddress(context.Context, string, pci.Address) (*pci.Address, error) {
	return nil, nil //nolint:nilnil // it is unknown
}

func (r *rig) Attach(_ context.Context, _ string, f pci.Address, _ *pci.Address) error {
	if err := r.step("attach"); err != nil {
		return err
	}
	return r.m.Give(f, "web")
}

func (r *rig) Detach(_ context.Context, _ string, f pci.Address) error {
	if err := r.step("detach"); err != nil {
		return err
	}
	r.m.TakeBack(f)
	return nil
}

func (r *rig) ForceDetach(context.Context, string, pci.Address) error { return errOneList }
func (r *rig) ForceAttach(context.Context, string, pci.Address) error { return errOneList }
func (r *rig) Listed(_ context.Context, _ string, f pci.Address) (bool, error) {
	return r.m.Guest(f) != "", nil
}

func (r *rig) Store(context.Context, string, []pci.Address) error   { return nil }
func (r *rig) Unstore(context.Context, string, []pci.Address) error { return nil }

func (r *rig) HostName() string                { return "h" }
func (r *rig) Settle(context.Context)          {}
func (r *rig) Known(context.Context, []string) {}
func (r *rig) Kick()                           {}

func (r *rig) Claim(_ context.Context, c *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error) {
	if err := r.step("claim"); err != nil {
		return nil, err
	}
	if c.GetProfile() != "vf" {
		return nil, errors.New("not a claim of a slice")
	}
	return &clusterv1.CreateClaimResponse{Assignments: []*clusterv1.Assignment{{Gpu: "h/a10-0", Host: "h"}}}, nil
}

func (r *rig) attach() error {
	return r.keeper.Attach(r.t.Context(), &gpuctlv1.AttachRequest{Machine: "web", Profile: "vf"}, func(*gpuctlv1.DeviceUpdate) {})
}

func (r *rig) detach() error {
	return r.keeper.Detach(r.t.Context(), &gpuctlv1.DetachRequest{Machine: "web", Unconfirmed: true}, func(*gpuctlv1.DeviceUpdate) {})
}

// settled reconciles until all is decided: either the VM has the function, or
// the card is as it was.
func (r *rig) settled() {
	r.t.Helper()
	for range 3 {
		if err := r.keeper.Reconcile(r.t.Context()); err != nil {
			r.t.Error("reconcile:", err)
		}
		time.Sleep(2 * time.Minute)
	}
	a, _ := pci.ParseAddress(vf0)
	p, _ := pci.ParseAddress(pf)
	number, err := r.m.ReadFile("sys/bus/pci/devices/" + pf + "/sriov_numvfs")
	if err != nil {
		r.t.Fatal(err)
	}
	n := strings.TrimSpace(string(number))
	switch held := r.keeper.Of(guest); {
	case r.m.Guest(a) != "" && (len(held) != 1 || n != "2" || r.m.Driver(a) != driverXen):
		r.t.Errorf("the VM has the function: held %v, %s functions, bound to %q", held, n, r.m.Driver(a))
	case r.m.Guest(a) == "" && (len(held) != 0 || n != "0"):
		r.t.Errorf("the VM does not have the function: held %v, %s functions", held, n)
	case r.m.Driver(p) != "nvidia":
		r.t.Errorf("the card is bound to %q", r.m.Driver(p))
	case r.m.Guest(a) == "" && (len(r.m.Slots()) != 0 || len(r.journal.Records()) != 0):
		r.t.Errorf("left: slots %v, records %v", r.m.Slots(), r.journal.Records())
	}
	for _, v := range r.m.Violations() {
		r.t.Error("violation:", v)
	}
}

// TestSlice gives a virtual function to a VM and takes it back. hostd is ended
// before and after every write to the kernel.
func TestSlice(t *testing.T) {
	for _, crash := range []struct {
		name string
		at   func(*sysfstest.Machine, int)
	}{{"before", (*sysfstest.Machine).CrashBefore}, {"after", (*sysfstest.Machine).CrashAfter}} {
		for n := 1; ; n++ {
			ended := true
			t.Run(fmt.Sprint(crash.name, n), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t)
					crash.at(r.m, n)
					err := r.attach()
					if !r.m.Crashed() && err == nil {
						err = r.detach()
					}
					if ended = r.m.Crashed(); !ended && err != nil {
						t.Error(err)
					}
					r.restart()
					r.settled()
					if r.keeper.Of(guest) != nil {
						if err := r.detach(); err != nil {
							t.Error(err)
						}
						r.settled()
					}
					if err := r.journal.Close(); err != nil {
						t.Error(err)
					}
				})
			})
			if !ended || t.Failed() {
				if n < 10 {
					t.Errorf("ended %s write %d", crash.name, n)
				}
				break
			}
		}
	}
}

// What is made in the kernel, in order.
func TestSliceWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		if err := r.attach(); err != nil {
			t.Fatal(err)
		}
		if err := r.keeper.Reset(t.Context(), &gpuctlv1.ResetRequest{Gpu: "a10-0"}, func(*gpuctlv1.DeviceUpdate) {}); !errors.Is(err, cards.ErrRefused) || !strings.Contains(err.Error(), "VM web has a10-0 (vf "+vf0+")") {
			t.Errorf("%v", err)
		}
		if err := r.detach(); err != nil {
			t.Fatal(err)
		}
		r.settled()
		writes := strings.Join(r.m.Writes(), "\n")
		if !regexp.MustCompile(`(?s)sriov_numvfs = "2".*nvidia/unbind = "0000:65:00.4".*pciback/bind = "0000:65:00.4".*65:00.4/reset.*attach.*detach.*65:00.4/reset.*remove_slot.*nvidia/bind = "0000:65:00.4".*sriov_numvfs = "0"`).MatchString(writes) {
			t.Errorf("%s", writes)
		}
		if err := r.journal.Close(); err != nil {
			t.Error(err)
		}
	})
}
