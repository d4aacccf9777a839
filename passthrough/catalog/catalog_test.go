package catalog_test

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/reset"
)

func load(t testing.TB, extra ...catalog.File) *catalog.Catalog {
	t.Helper()
	c, err := catalog.Load(extra...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func device(t testing.TB, id string) *pci.Device {
	t.Helper()
	i, err := catalog.ParseID(id)
	if err != nil {
		t.Fatal(err)
	}
	return &pci.Device{VendorID: i.Vendor, DeviceID: i.Device, SubVendorID: i.SubVendor, SubDeviceID: i.SubDevice}
}

func TestLookup(t *testing.T) {
	c := load(t)
	const gib = 1 << 30
	for _, tc := range []struct {
		id, model string
		memory    uint64
	}{
		{"10de:1eb8:10de:12a2", "Tesla T4", 16 * gib},
		{"10de:1db4", "Tesla V100-PCIE-16GB", 16 * gib},
		{"10de:1db5", "Tesla V100-SXM2-32GB", 32 * gib},
		{"10de:2235:10de:145a", "NVIDIA A40", 48 * gib},
		{"10de:20f1", "NVIDIA A100-PCIE-40GB", 40 * gib},
		{"10de:20b5", "NVIDIA A100 80GB PCIe", 80 * gib},
		{"10de:2335", "NVIDIA H200", 141 * gib},
		// One id, two models: the subsystem tells.
		{"10de:25b6:10de:157e", "NVIDIA A2", 16 * gib},
		{"10de:25b6:10de:14a9", "NVIDIA A16", 16 * gib},
		{"10de:25b6:10de:ffff", "", 0},
		{"10de:1e30:10de:12ba", "Quadro RTX 6000", 24 * gib},
		{"10de:1e30:10de:129e", "Quadro RTX 8000", 48 * gib},
		{"1002:66a1", "AMD Instinct MI50", 0},
		{"1002:74a1", "AMD Instinct MI300X", 192 * gib},
		{"8086:56c0", "Intel Data Center GPU Flex 170", 16 * gib},
		{"1234:1111:1af4:1100", "QEMU standard VGA", 0},
		{"1234:11e8", "QEMU edu", 0},
		{"10de:10f8", "", 0}, // the audio function of a card
		{"ffff:ffff", "", 0},
	} {
		e, ok := c.Lookup(device(t, tc.id))
		if ok != (tc.model != "") || e.Model != tc.model || e.Memory != tc.memory || e.Limits.GetGlobalMemory() != tc.memory {
			t.Errorf("%s: %q with %d bytes (limit %d), %v; want %q with %d", tc.id, e.Model, e.Memory, e.Limits.GetGlobalMemory(), ok, tc.model, tc.memory)
		}
	}
}

func TestVirtualFunctionsAreNotTheCard(t *testing.T) {
	c := load(t)
	vf := device(t, "10de:2235")
	vf.PF = &pci.Address{Bus: 0x65}
	e, ok := c.Lookup(vf)
	if !ok || e.Model != "NVIDIA A40" || e.Memory != 0 || e.Limits.GlobalMemory != 0 || e.VGPU != nil {
		t.Errorf("a virtual function is taken for all of an A40: %+v, %v", e, ok)
	}
	// What was given out is a copy.
	if e, _ := c.Model("NVIDIA A40"); e.Memory == 0 || e.Limits.GlobalMemory == 0 || len(e.VGPU) == 0 {
		t.Errorf("asking for a virtual function has changed the catalogue: %+v", e)
	}
	e, _ = c.Model("NVIDIA A40")
	e.VGPU[0].Max, e.Limits.ComputeUnits = 77, 77
	if again, _ := c.Model("NVIDIA A40"); again.VGPU[0].Max == 77 || again.Limits.ComputeUnits == 77 {
		t.Error("who asks can change the catalogue")
	}
}

func TestMemory(t *testing.T) {
	c := load(t)
	bar := func(size uint64, prefetchable bool) pci.BAR { return pci.BAR{Size: size, Prefetchable: prefetchable} }
	for _, tc := range []struct {
		name, id string
		change   func(*pci.Device)
		want     uint64
		source   catalog.Source
	}{
		{"the driver knows best", "10de:2235", func(d *pci.Device) { d.VideoMemory = 46 << 30 }, 46 << 30, catalog.FromDriver},
		{"the catalogue", "10de:2235", func(d *pci.Device) { d.BARs = []pci.BAR{bar(64<<30, true)} }, 48 << 30, catalog.FromCatalog},
		{"a resizable BAR", "1002:744c", func(d *pci.Device) { d.BARs = []pci.BAR{bar(32<<30, true), bar(1<<20, false)} }, 32 << 30, catalog.FromBAR},
		{"a window says nothing", "1002:744c", func(d *pci.Device) { d.BARs = []pci.BAR{bar(256<<20, true)} }, 0, catalog.Unknown},
		{"an unknown device", "1acc:0001", func(d *pci.Device) { d.BARs = []pci.BAR{bar(8<<30, true)} }, 8 << 30, catalog.FromBAR},
		{"registers are no memory", "1acc:0001", func(d *pci.Device) { d.BARs = []pci.BAR{bar(8<<30, false)} }, 0, catalog.Unknown},
		{"emulated", "1234:1111", func(d *pci.Device) { d.BARs = []pci.BAR{bar(16<<20, true), bar(4096, false)} }, 16 << 20, catalog.FromBAR},
		{"emulated, of registers", "1af4:1050", func(d *pci.Device) { d.BARs = []pci.BAR{bar(16<<10, true)} }, 0, catalog.Unknown},
		{"a virtual function's BAR", "10de:2235", func(d *pci.Device) {
			d.PF, d.BARs = &pci.Address{}, []pci.BAR{bar(8<<30, true)}
		}, 0, catalog.Unknown},
	} {
		d := device(t, tc.id)
		tc.change(d)
		e, ok := c.Lookup(d)
		if got, source := catalog.Memory(d, e, ok); got != tc.want || source != tc.source {
			t.Errorf("%s: %d from %q, want %d from %q", tc.name, got, source, tc.want, tc.source)
		}
	}
}

func TestRanksOrderModels(t *testing.T) {
	c := load(t)
	order := []string{
		"QEMU edu", "QEMU standard VGA", "virtio GPU", "NVIDIA A2", "Tesla T4", "NVIDIA L4", "Tesla V100-PCIE-16GB", "NVIDIA A40",
		"NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA H200",
		"AMD Instinct MI300X",
	}
	for i, name := range order {
		e, ok := c.Model(name)
		if !ok || e.Rank == 0 {
			t.Fatalf("%s: %v, rank %d", name, ok, e.Rank)
		}
		if i > 0 {
			if below, _ := c.Model(order[i-1]); below.Rank >= e.Rank {
				t.Errorf("%s (%d) is no upgrade of %s (%d)", name, e.Rank, order[i-1], below.Rank)
			}
		}
	}
	names := c.Models()
	for i := range names[1:] {
		a, _ := c.Model(names[i])
		b, _ := c.Model(names[i+1])
		if a.Rank > b.Rank {
			t.Errorf("Models: %s (%d) comes before %s (%d)", a.Model, a.Rank, b.Model, b.Rank)
		}
	}
}

// The name of a type says its size.
func TestVGPUTypesAreWhatTheirNamesSay(t *testing.T) {
	c := load(t)
	name := regexp.MustCompile(`^[A-Z0-9]+(-[1-7])?-([0-9]+)[CQ]$`)
	owner := map[string]string{}
	types := 0
	for _, model := range c.Models() {
		e, _ := c.Model(model)
		for _, v := range e.VGPU {
			types++
			m := name.FindStringSubmatch(v.Name)
			if m == nil {
				t.Errorf("%s: type %q", model, v.Name)
				continue
			}
			gib, _ := strconv.Atoi(m[2])
			if got := float64(v.Memory) / (1 << 30); got < float64(gib)-0.1 || got > float64(gib)+0.2 {
				t.Errorf("%s: %s has %.2f GiB", model, v.Name, got)
			}
			if (m[1] != "") != (v.MIG != "") {
				t.Errorf("%s: %s: MIG profile %q", model, v.Name, v.MIG)
			}
			if owner[v.Name] != "" {
				t.Errorf("%s is a type of %s and %s", v.Name, owner[v.Name], model)
			}
			owner[v.Name] = model
		}
	}
	if types < 200 {
		t.Errorf("%d types", types)
	}
	a40, _ := c.Model("NVIDIA A40")
	if v, ok := a40.VGPUType("A40-16C"); !ok || v.Max != 3 || v.Mixed != 2 || v.Memory != 16<<30 {
		t.Errorf("A40-16C: %+v, %v", v, ok)
	}
	if _, ok := a40.VGPUType("A40-17C"); ok {
		t.Error("A40-17C is there")
	}
}

func TestKnownBadResets(t *testing.T) {
	c := load(t)
	for id, want := range map[string][]reset.Method{
		"1002:731f": {reset.PM, reset.Bus}, // Navi 10
		"1002:67df": {reset.PM, reset.Bus}, // Polaris
		"1002:687f": {reset.PM, reset.Bus}, // Vega 10
		"1002:7340": {reset.PM, reset.Bus}, // Navi 14
		"1002:744c": {reset.PM},
		"10de:2342": {reset.Bus},
		"10de:1eb8": nil,
		"10de:2684": nil,
	} {
		e, ok := c.Lookup(device(t, id))
		var got []reset.Method
		for _, a := range e.Avoid() {
			got = append(got, a.Method)
			if !strings.Contains(a.Why, e.Model) {
				t.Errorf("%s: %q does not name the model", id, a.Why)
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if !ok || !slices.Equal(got, want) {
			t.Errorf("%s: avoid %v, want %v", id, got, want)
		}
	}
}

// pciIDs reads the names of devices and subsystems.
func pciIDs(t *testing.T, name string) map[catalog.ID]string {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		return nil
	}
	defer f.Close()
	out := map[catalog.ID]string{}
	var id catalog.ID
	hex := func(s string) uint16 { n, _ := strconv.ParseUint(s, 16, 16); return uint16(n) }
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		l := lines.Text()
		switch {
		case strings.HasPrefix(l, "C "):
			return out
		case l == "" || l[0] == '#':
		case strings.HasPrefix(l, "\t\t") && len(l) > 13:
			id.SubVendor, id.SubDevice, id.Subsystem = hex(l[2:6]), hex(l[7:11]), true
			out[id] = l[13:]
		case l[0] == '\t' && len(l) > 7:
			id = catalog.ID{Vendor: id.Vendor, Device: hex(l[1:5])}
			out[id] = l[7:]
		case len(l) > 6:
			id = catalog.ID{Vendor: hex(l[:4])}
		}
	}
	return out
}

func words(s string) []string {
	return strings.FieldsFunc(strings.ToLower(s), func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
}

// Every id is in the list of PCI ids under a name that has the model's number.
// The machine's own list may be older and lack some.
func TestIDsAreThoseOfTheList(t *testing.T) {
	// QEMU's own ids are in its documentation (docs/specs/standard-vga.rst,
	// docs/specs/edu.rst) and in nobody's list.
	qemu := []string{"1234:1111", "1234:11e8"}
	// Listed without a number, or as H100L, which is sold as H100 NVL.
	nameless := []string{"1002:66a0", "10de:2321"}
	c := load(t)
	for _, list := range []string{"testdata/pci.ids", "/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids"} {
		names := pciIDs(t, list)
		if names == nil {
			if strings.HasPrefix(list, "testdata") {
				t.Fatalf("%s cannot be read", list)
			}
			continue
		}
		found := 0
		for id, model := range c.IDs() {
			if slices.Contains(qemu, id.String()) {
				continue
			}
			name, ok := names[id]
			if !ok && id.Subsystem {
				name, ok = names[catalog.ID{Vendor: id.Vendor, Device: id.Device}]
			}
			if !ok {
				if strings.HasPrefix(list, "testdata") {
					t.Errorf("%s: %s (%s) is not there", list, id, model)
				}
				continue
			}
			found++
			have := words(name)
			shared := func(need func(string) bool) bool {
				return slices.ContainsFunc(words(model), func(w string) bool { return need(w) && slices.Contains(have, w) })
			}
			digits := func(w string) bool { return strings.ContainsAny(w, "0123456789") && !strings.HasSuffix(w, "gb") }
			need := func(string) bool { return true }
			if slices.ContainsFunc(words(model), digits) {
				need = digits
			}
			if !shared(need) && !slices.Contains(nameless, id.String()) {
				t.Errorf("%s: %s is %q, not %q", list, id, name, model)
			}
		}
		if found < 100 {
			t.Errorf("%s: only %d of the ids are there", list, found)
		}
	}
}

func TestOperatorsExtendAndCorrect(t *testing.T) {
	first := catalog.File{Name: "10-site.yaml", Data: []byte(`version: 1
models:
  - model: NVIDIA A40
    rank: 9999
    limits: {computeUnits: 80, version: OpenCL 3.0}
    resets:
      - {method: pm, verdict: no-effect, reason: seen here}
  - model: ACME Render 9
    ids: ["1acc:0009", "1acc:000a:1acc:0001", "10de:1eb8"]
    memory: 12GiB
    rank: 900
  - model: AMD Radeon RX 5600/5700
    resets: []
`)}
	second := catalog.File{Name: "20-site.yaml", Data: []byte(`version: 1
families:
  - name: acme
    limits: {fp64: true, computeUnits: 3}
models:
  - model: ACME Render 9
    family: acme
    memory: 16GiB
  - model: NVIDIA A40
    ids: ["10de:fffe"]
`)}
	c := load(t, first, second)
	a40, _ := c.Model("NVIDIA A40")
	if a40.Rank != 9999 || a40.Limits.ComputeUnits != 80 || a40.Limits.Version != "OpenCL 3.0" || a40.Limits.MaxWorkGroupSize != 1024 || a40.Memory != 48<<30 || len(a40.VGPU) == 0 {
		t.Errorf("A40: what was said does not count, or what was not said is gone: %+v", a40)
	}
	if len(a40.Resets) != 1 || a40.Resets[0].Method != reset.PM || a40.File != "20-site.yaml" {
		t.Errorf("A40: resets %+v of %s", a40.Resets, a40.File)
	}
	for id, model := range map[string]string{
		"10de:2235": "NVIDIA A40", "10de:fffe": "NVIDIA A40", "1acc:0009": "ACME Render 9", "1acc:000a:1acc:0001": "ACME Render 9", "10de:1eb8": "ACME Render 9",
	} {
		if e, _ := c.Lookup(device(t, id)); e.Model != model {
			t.Errorf("%s is %q, want %q", id, e.Model, model)
		}
	}
	acme, _ := c.Model("ACME Render 9")
	if acme.Memory != 16<<30 || acme.Limits.GlobalMemory != 16<<30 || acme.Rank != 900 || !acme.Limits.Fp64 || acme.Limits.ComputeUnits != 3 {
		t.Errorf("ACME: %+v", acme)
	}
	if navi, _ := c.Model("AMD Radeon RX 5600/5700"); len(navi.Avoid()) != 0 {
		t.Errorf("an empty list leaves %v", navi.Resets)
	}
}

func TestOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "models.yaml")
	if _, err := catalog.Open(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	if err := os.WriteFile(path, []byte("version: 7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := catalog.Open(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("the error does not name the file: %v", err)
	}
	if err := os.WriteFile(path, []byte("version: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := catalog.Open(path, path); err != nil {
		t.Error(err)
	}
}
