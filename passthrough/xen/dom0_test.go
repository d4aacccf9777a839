package xen

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/internal/xenstore"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// TestControlDomain runs where it is started in a control domain: what the
// hypervisor says by hypercall is what xl says.
func TestControlDomain(t *testing.T) {
	root := os.DirFS("/")
	if err := Detect(root); err != nil {
		t.Skip(err)
	}
	v, err := ReadVersion(root)
	if err != nil {
		t.Fatal(err)
	}
	p, err := OpenPrivcmd("/dev/xen", v)
	if errors.Is(err, ErrVersion) {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	xl := &XL{}
	devices, err := os.ReadDir("/sys/bus/pci/devices")
	if err != nil {
		t.Fatal(err)
	}
	var all []pci.Address
	for _, d := range devices {
		if a, err := pci.ParseAddress(d.Name()); err == nil {
			all = append(all, a)
		}
	}
	ctx := t.Context()

	want, err := xl.IOMMU(ctx)
	if got, err2 := p.IOMMU(ctx); got != want || err != nil || err2 != nil {
		t.Errorf("IOMMU: %v by hypercall (%v), %v by xl (%v)", got, err2, want, err)
	}
	t.Logf("Xen %s, IOMMU %v", v, want)

	wantNodes, err := xl.Nodes(ctx, all)
	gotNodes, err2 := p.Nodes(ctx, all)
	if d := cmp.Diff(wantNodes, gotNodes); d != "" || err != nil || err2 != nil {
		t.Error(err, err2, d)
	}
	t.Logf("nodes: %v", gotNodes)

	wantLog, err := xl.Log(ctx)
	gotLog, err2 := p.Log(ctx)
	if err != nil || err2 != nil || len(gotLog) == 0 || !strings.HasPrefix(gotLog, wantLog[:min(len(wantLog), 2000)]) {
		t.Errorf("log: %d bytes by hypercall (%v), %d by xl (%v)", len(gotLog), err2, len(wantLog), err)
	}
	facts := ParseLog(gotLog)
	if facts.IOMMU != want {
		t.Errorf("IOMMU: the log says %v", facts.IOMMU)
	}
	t.Logf("log: interrupt remapping %v, %d reserved regions, %d refused, %d faults", facts.InterruptRemapping, len(facts.Reserved), len(facts.Refused), len(facts.Faults))

	for _, a := range all {
		group, err := p.Group(ctx, a)
		if err != nil {
			t.Error(err)
		}
		t.Logf("group of %s: %v", a, group)
	}
	domains(t, root, p, xl, all)
}

// domains compares what the store and the hypervisor say of domains and devices.
func domains(t *testing.T, root fs.FS, p *Privcmd, xl *XL, all []pci.Address) {
	t.Helper()
	ctx := t.Context()
	store, err := xenstore.Dial(ctx, "/run/xenstored/socket")
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	h := New(root, store, p)
	byCall, err := h.Domains(ctx)
	byXL, err2 := New(root, store, xl).Domains(ctx)
	if err != nil || err2 != nil || len(byCall) != len(byXL) || len(byCall) == 0 {
		t.Errorf("%d domains by hypercall (%v), %d by xl (%v)", len(byCall), err, len(byXL), err2)
	}
	for i := range min(len(byCall), len(byXL)) {
		a, b := byCall[i], byXL[i]
		same := a.ID == b.ID && a.Name == b.Name && (b.UUID == "" || a.UUID == b.UUID || a.ID == 0) && (b.Type == TypeUnknown || a.Type == b.Type)
		if !same {
			t.Errorf("by hypercall %+v, by xl %+v", a, b)
		}
		t.Logf("%+v", a)
	}
	back, err := h.Pciback()
	t.Logf("%+v, %v", back, err)
	free, err := h.Assignable(ctx)
	out, err2 := xl.run(ctx, "pci-assignable-list")
	var want2 []pci.Address
	for line := range strings.Lines(out) {
		if fields := strings.Fields(line); len(fields) > 0 {
			if a, err := pci.ParseAddress(fields[0]); err == nil {
				want2 = append(want2, a)
			}
		}
	}
	if d := cmp.Diff(want2, free); d != "" || err != nil || err2 != nil {
		t.Error(err, err2, d)
	}
	taken, err := h.Assigned(ctx)
	t.Logf("%+v, %v", taken, err)
	for _, a := range all {
		access, err := h.Access(a)
		if err != nil {
			t.Error(err)
		}
		t.Logf("access to %s: %s", a, access)
	}
}
