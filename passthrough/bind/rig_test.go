package bind_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
)

func at(s string) pci.Address {
	a, err := pci.ParseAddress(s)
	if err != nil {
		panic(err)
	}
	return a
}

func list(names ...string) []pci.Address {
	var out []pci.Address
	for _, n := range names {
		out = append(out, at(n))
	}
	return out
}

// card is the first n functions beside a.
func card(a string, n int) []pci.Address {
	var out []pci.Address
	for i := range n {
		f := at(a)
		f.Function = uint8(i)
		out = append(out, f)
	}
	return out
}

// failer is a test of any kind.
type failer interface {
	Helper()
	Context() context.Context
	Errorf(format string, args ...any)
	Fatal(args ...any)
}

// rig is a machine with a process under test that can die.
type rig struct {
	t       failer
	machine *sysfstest.Machine
	dir     string
	journal *bind.Journal
	*bind.Binder
	options []bind.Option
}

func newMachine() *sysfstest.Machine {
	m := sysfstest.New()
	m.Load(sysfstest.Pciback()) // first, as at the start of a dom0
	m.Load(sysfstest.VFIOPCI())
	m.Add(
		pcitest.Port("0000:00:01.0", "", 1, pci.PortRoot, pcitest.FullACS()),
		pcitest.Port("0000:00:02.0", "", 2, pci.PortRoot, pcitest.FullACS()),
	)
	m.Add(pcitest.NVIDIACard("0000:65:00", "0000:00:01.0", 10, 0)...)
	m.Add(pcitest.SRIOVAccelerator("0000:05", "0000:00:02.0", 40, 1, 4, 0)...)
	m.Add(pcitest.AMDCard("0000:01", "0000:02", "0000:03", "", 30, pcitest.FullACS())...)
	m.Node(at(gpu), "nvidia", "drm/renderD128", "dri/renderD128")
	m.Node(at(amd), "amdgpu", "drm/card1", "dri/card1")
	return m
}

// fastDir is in memory where there is such a folder: a thousand journals are
// replaced, and only processes die.
func fastDir(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "bind")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func newRig(t testing.TB, options ...bind.Option) *rig {
	r := &rig{t: t, machine: newMachine(), dir: fastDir(t), options: append([]bind.Option{bind.WithPatience(time.Minute, time.Minute)}, options...)}
	r.start()
	t.Cleanup(func() { r.journal.Close() })
	return r
}

func (r *rig) start() {
	r.t.Helper()
	j, err := bind.OpenJournal(r.dir)
	if err != nil {
		r.t.Fatal(err)
	}
	j.SetStep(r.machine.Step)
	r.journal = j
	r.Binder = bind.New(r.machine, j, append([]bind.Option{bind.WithUsers(r.guests)}, r.options...)...)
}

// restart is what comes after a crash.
func (r *rig) restart() {
	r.t.Helper()
	r.journal.Close()
	r.machine.Restart()
	r.start()
}

// guests is what Xen would say.
func (r *rig) guests(_ context.Context, functions []pci.Address) ([]bind.User, error) {
	var out []bind.User
	for _, a := range functions {
		if g := r.machine.Guest(a); g != "" {
			out = append(out, bind.User{Function: a, Kind: bind.UserGuest, Name: g})
		}
	}
	return out, nil
}

type where struct{ Driver, Override string }

// places is where every function is, and pciback's list.
func places(m *sysfstest.Machine) map[string]where {
	out := map[string]where{}
	entries, err := m.ReadDir("sys/bus/pci/devices")
	if err != nil {
		panic(err)
	}
	for _, e := range entries {
		out[e.Name()] = where{m.Driver(at(e.Name())), m.Override(at(e.Name()))}
	}
	for _, s := range m.Slots() {
		out["slot "+s.String()] = where{}
	}
	return out
}

func (r *rig) same(before map[string]where) {
	r.t.Helper()
	if d := cmp.Diff(before, places(r.machine)); d != "" {
		r.t.Errorf("not as before: %s", d)
	}
}

func (r *rig) at(driver string, functions []pci.Address) {
	r.t.Helper()
	for _, a := range functions {
		if got := r.machine.Driver(a); got != driver {
			r.t.Errorf("%s is bound to %q, want %q", a, got, driver)
		}
	}
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) sound() {
	r.t.Helper()
	if v := r.machine.Violations(); len(v) > 0 {
		r.t.Errorf("violations: %q", v)
	}
}
