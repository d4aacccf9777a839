package discover

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/internal/expr"
	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

const (
	vendorNVIDIA = 0x10de
	driverNVIDIA = "nvidia"
)

// Input is what the sources have found on a host.
type Input struct {
	Host     string          // the host's name
	Cards    []*pci.Card     // of the PCI scan
	NVML     *nvml.Response  // NVML's last answer; nil: none
	NVMLErr  error           // why NVML has not answered, or not lately
	Runtimes []*gpuctlv1.GPU // GPUs of the OpenCL runtimes
	// RuntimeKey returns the same key for all GPUs that one executor can use together;
	// nil: none can.
	RuntimeKey func(*gpuctlv1.GPU) string
	// Catalog finds a model by its PCI ids; nil: no catalogue.
	Catalog func(*pci.Device) (catalog.Entry, bool)
	// Profiles returns the profiles of a card's slices for VMs; nil: none.
	Profiles func(*pci.Card) []*clusterv1.Profile
	// Ours reports whether a process uses a GPU for an assignment; nil: none does.
	Ours func(pid uint32) bool
}

// Merge returns the GPUs, sorted by id, and a warning for each GPU that was found twice.
func Merge(in Input) (gpus []*clusterv1.GPU, warnings []string) {
	m := &merge{in: in, byAddress: map[string]*entry{}, byUUID: map[string]*entry{}}
	for _, c := range in.Cards {
		m.card(c)
	}
	for i := range in.NVML.GetGPUs() {
		m.nvml(&in.NVML.GPUs[i])
	}
	for _, g := range in.Runtimes {
		m.runtime(g)
	}
	names := map[string]bool{}
	for _, e := range m.entries {
		g := e.gpu(in)
		if g == nil {
			continue
		}
		if names[g.GetName()] {
			m.warn("gpu %s: there is another of that name: left out", g.GetName())
			continue
		}
		names[g.GetName()] = true
		g.Host, g.Id = in.Host, in.Host+"/"+g.GetName()
		gpus = append(gpus, g)
	}
	slices.SortFunc(gpus, func(a, b *clusterv1.GPU) int { return strings.Compare(a.GetId(), b.GetId()) })
	return gpus, m.warnings
}

// entry is one card, with what each source has about it.
type entry struct {
	card    *pci.Card
	nvml    *nvml.GPU
	runtime *gpuctlv1.GPU
}

type merge struct {
	in        Input
	entries   []*entry
	byAddress map[string]*entry
	byUUID    map[string]*entry
	warnings  []string
}

func (m *merge) warn(format string, args ...any) {
	m.warnings = append(m.warnings, fmt.Sprintf(format, args...))
}

func (m *merge) add(e *entry) *entry {
	m.entries = append(m.entries, e)
	return e
}

func (m *merge) card(c *pci.Card) {
	e := m.add(&entry{card: c})
	// The address of any of its functions identifies the card.
	for _, d := range slices.Concat(c.Functions, c.VFs) {
		m.byAddress[d.Address.String()] = e
	}
}

// known returns the entry with this address or UUID, in any spelling.
func (m *merge) known(address, uuid string) *entry {
	if e := m.byAddress[canonical(address)]; e != nil {
		return e
	}
	return m.byUUID[plain(uuid)]
}

func (m *merge) remember(e *entry, address, uuid string) {
	if a := canonical(address); a != "" {
		m.byAddress[a] = e
	}
	if u := plain(uuid); u != "" {
		m.byUUID[u] = e
	}
}

func (m *merge) nvml(g *nvml.GPU) {
	e := m.known(g.PCIAddress, g.UUID)
	switch {
	case e == nil:
		e = m.add(&entry{nvml: g})
	case e.nvml != nil:
		m.warn("NVML lists %s twice", g.PCIAddress)
		return
	default:
		e.nvml = g
	}
	m.remember(e, g.PCIAddress, g.UUID)
	if g.MIG != nil {
		for _, i := range g.MIG.Instances {
			m.remember(e, "", i.UUID)
		}
	}
}

func (m *merge) runtime(g *gpuctlv1.GPU) {
	e := m.known(g.GetPciAddress(), g.GetUuid())
	switch {
	case e == nil:
		e = m.add(&entry{runtime: g})
		// Runtimes that compute on processors may all have the same UUID, so only the
		// address identifies a card here.
		m.remember(e, g.GetPciAddress(), "")
	case e.runtime != nil:
		m.warn("gpu %s is the same card as %s: left out", g.GetId(), e.runtime.GetId())
	default:
		e.runtime = g
		m.remember(e, g.GetPciAddress(), "")
	}
}

// canonical returns an address as sysfs writes it; empty: it is not an address.
func canonical(address string) string {
	a, err := pci.ParseAddress(address)
	if err != nil {
		return ""
	}
	return a.String()
}

// plain returns the hexadecimal digits of a UUID. NVML and OpenCL write UUIDs
// differently.
func plain(uuid string) string {
	digits := strings.ReplaceAll(strings.TrimPrefix(strings.TrimPrefix(strings.ToLower(uuid), "gpu-"), "mig-"), "-", "")
	if strings.Trim(digits, "0") == "" {
		return ""
	}
	return digits
}

// gpu returns the entry in the form of the inventory; nil: it is not a GPU.
func (e *entry) gpu(in Input) *clusterv1.GPU {
	g := &clusterv1.GPU{NumaNode: -1, Present: true, Health: clusterv1.Health_HEALTH_OK, Limits: &gpuctlv1.Limits{}, Type: "gpu"}
	if e.card != nil {
		if e.runtime == nil && e.nvml == nil && console(e.card.Main()) {
			return nil
		}
		e.fromCard(g)
		if in.Catalog != nil {
			e.fromCatalog(g, in.Catalog)
		}
	}
	if n := e.nvml; n != nil {
		o := n.Object(g.GetDriver())
		g.Model, g.Vendor, g.Uuid, g.Limits, g.Profiles = o.GetModel(), o.GetVendor(), o.GetUuid(), o.GetLimits(), o.GetProfiles()
		g.Driver, g.PciAddress = or(g.GetDriver(), driverNVIDIA), or(g.GetPciAddress(), o.GetPciAddress())
		g.Name = or(g.GetPciAddress(), o.GetUuid())
		if g.GetNumaNode() < 0 {
			g.NumaNode = o.GetNumaNode()
		}
		for _, p := range o.GetProcesses() {
			if in.Ours == nil || !in.Ours(p.GetPid()) {
				g.Processes = append(g.Processes, p)
			}
		}
	}
	if r := e.runtime; r.GetRuntime() == nil && r.GetDriverGpu() != nil {
		// Only NVIDIA's driver serves it to sessions, and NVML and the catalogue know more.
		g.Name, g.Model, g.Runtime, g.Engines = r.GetId(), or(g.GetModel(), r.GetModel()), r.GetRuntimeName(), expr.Engines(r)
		if g.GetRank() == 0 {
			g.Rank = r.GetRank()
		}
		if in.RuntimeKey != nil {
			g.RuntimeKey = in.RuntimeKey(r)
		}
	} else if r != nil {
		g.Name, g.Model, g.Type, g.Engines = r.GetId(), r.GetModel(), or(r.GetType(), g.GetType()), expr.Engines(r)
		g.Vendor, g.Platform, g.Runtime, g.Rank = or(r.GetVendor(), g.GetVendor()), r.GetPlatform(), r.GetRuntimeName(), r.GetRank()
		g.Driver, g.Uuid = or(g.GetDriver(), r.GetDriver()), or(g.GetUuid(), r.GetUuid())
		g.PciAddress = or(g.GetPciAddress(), canonical(r.GetPciAddress()))
		// Applications get what the runtime has, so its limits count.
		if r.GetLimits() != nil {
			g.Limits = r.GetLimits()
		}
		if in.RuntimeKey != nil {
			g.RuntimeKey = in.RuntimeKey(r)
		}
	}
	if e.card != nil && in.Profiles != nil {
		g.Profiles = profiles(in.Profiles(e.card), g.GetProfiles())
	}
	g.Kinds = e.kinds(g)
	g.Health, g.HealthReason = e.health(in)
	return g
}

// kinds returns the ways in which the GPU can be given away.
func (e *entry) kinds(g *clusterv1.GPU) (out []string) {
	if e.card != nil {
		out = append(out, state.KindPassthrough)
	}
	if len(g.GetProfiles()) > 0 {
		out = append(out, state.KindSlice)
	}
	if e.runtime != nil {
		out = append(out, state.KindRemote)
	}
	return out
}

// profiles joins the profiles for VMs with those of MIG. If both have the same name, the
// profile for VMs counts, because it contains what VMs have.
func profiles(machines, mig []*clusterv1.Profile) []*clusterv1.Profile {
	out := machines
	for _, p := range mig {
		if !slices.ContainsFunc(machines, func(m *clusterv1.Profile) bool { return m.GetName() == p.GetName() }) {
			if len(machines) > 0 {
				p.Apart = "mig" // as in vgpu.Profile
			}
			out = append(out, p)
		}
	}
	return out
}

func (e *entry) fromCard(g *clusterv1.GPU) {
	c, d := e.card, e.card.Main()
	g.Name, g.PciAddress = c.Address.String(), c.Address.String()
	g.Model, g.Vendor, g.Driver = modelName(d), d.VendorName, d.Driver
	g.NumaNode, g.IsolationGroup = int32(d.NUMANode), c.Group
	g.Limits.GlobalMemory = d.VideoMemory
	if d.Class>>8 == pci.ClassAccelerator {
		g.Type = "accelerator"
	}
}

// fromCatalog adds what the catalogue knows about the model.
func (e *entry) fromCatalog(g *clusterv1.GPU, lookup func(*pci.Device) (catalog.Entry, bool)) {
	d := e.card.Main()
	model, ok := lookup(d)
	if ok {
		g.Model, g.Rank = model.Model, model.Rank
		if model.Limits != nil {
			g.Limits = proto.CloneOf(model.Limits)
		}
	}
	g.Limits.GlobalMemory, _ = catalog.Memory(d, model, ok)
}

// modelName returns the product name, which pci.ids has in brackets. Without one, it
// returns the chip's name, or the ids.
func modelName(d *pci.Device) string {
	if d.DeviceName == fmt.Sprintf("%04x", d.DeviceID) {
		return fmt.Sprintf("%04x:%04x", d.VendorID, d.DeviceID)
	}
	if _, after, ok := strings.Cut(d.DeviceName, "["); ok {
		if name, _, ok := strings.Cut(after, "]"); ok && name != "" {
			return name
		}
	}
	return d.DeviceName
}

// health returns the worst health that any source reports, with all reasons for it.
func (e *entry) health(in Input) (clusterv1.Health, string) {
	worst, reasons := clusterv1.Health_HEALTH_OK, []string(nil)
	say := func(h clusterv1.Health, reason string) {
		if h > worst {
			worst, reasons = h, nil
		}
		if h == worst && h != clusterv1.Health_HEALTH_OK {
			reasons = append(reasons, reason)
		}
	}
	if e.nvml != nil {
		say(e.nvml.Health())
	}
	if e.card != nil {
		d := e.card.Main()
		if d.Dead() {
			say(clusterv1.Health_HEALTH_FAILED, "its configuration space reads all ones: it does not answer")
		}
		for _, f := range e.card.Functions {
			if f != d && f.Dead() {
				say(clusterv1.Health_HEALTH_DEGRADED, fmt.Sprintf("function %s does not answer", f.Address))
			}
		}
		switch {
		case d.Driver == "" && e.runtime == nil:
			say(clusterv1.Health_HEALTH_DEGRADED, "no driver is bound")
		case d.VendorID == vendorNVIDIA && d.Driver == driverNVIDIA && e.nvml == nil:
			say(withoutNVML(in))
		}
	}
	if e.nvml != nil && in.NVMLErr != nil && !errors.Is(in.NVMLErr, nvml.ErrReleased) {
		say(clusterv1.Health_HEALTH_DEGRADED, in.NVMLErr.Error())
	}
	return worst, strings.Join(reasons, "; ")
}

// withoutNVML judges a card that is bound to NVIDIA's driver and that NVML did not list.
func withoutNVML(in Input) (clusterv1.Health, string) {
	switch {
	case errors.Is(in.NVMLErr, nvml.ErrReleased): // released on purpose, for a moment
		return clusterv1.Health_HEALTH_OK, ""
	case in.NVMLErr != nil:
		return clusterv1.Health_HEALTH_DEGRADED, "its health is not known: " + in.NVMLErr.Error()
	case in.NVML != nil:
		return clusterv1.Health_HEALTH_FAILED, "the NVIDIA driver is bound but does not list it"
	}
	return clusterv1.Health_HEALTH_OK, "" // NVML was not asked
}

// console reports whether a display controller is not a GPU.
func console(d *pci.Device) bool {
	switch d.VendorID {
	case 0x1a03, 0x102b, 0x18ca: // ASPEED, Matrox, XGI: management controllers
		return true
	case 0x19e5: // HiSilicon's
		return d.DeviceID == 0x1711
	case 0x1234, 0x1013, 0x15ad, 0x1b36: // emulated VGA: Bochs, Cirrus, VMware, QXL
		return d.Class>>8 == pci.ClassVGA
	}
	return false
}

// Facts returns what changes often, for the GPUs that NVML knows.
func Facts(gpus []*clusterv1.GPU, answer *nvml.Response) []*clusterv1.GPUFacts {
	byAddress, byUUID := map[string]*nvml.GPU{}, map[string]*nvml.GPU{}
	for i := range answer.GetGPUs() {
		g := &answer.GPUs[i]
		if a := canonical(g.PCIAddress); a != "" {
			byAddress[a] = g
		}
		if u := plain(g.UUID); u != "" {
			byUUID[u] = g
		}
	}
	var out []*clusterv1.GPUFacts
	for _, g := range gpus {
		n := byAddress[canonical(g.GetPciAddress())]
		if n == nil {
			n = byUUID[plain(g.GetUuid())]
		}
		if n != nil {
			out = append(out, n.Facts(g.GetId()))
		}
	}
	return out
}

func or(s, t string) string {
	if s != "" {
		return s
	}
	return t
}
