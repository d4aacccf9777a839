package main

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"

	driver "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

const (
	maxGPUs      = 256
	maxProcesses = 1024 // of one GPU
	maxEvents    = 1024 // at once
	maxXids      = 32   // kinds, of one GPU
	maxText      = 256
	numaWords    = 16 // of 64 nodes
	noMemory     = math.MaxUint64
)

// library is NVML, loaded.
type library struct {
	driver.Interface
	// has says that the library has a function. Calling one that it does not
	// have ends the process: older drivers lack newer functions.
	has func(symbol string) bool
}

// open loads and initializes the library.
func open() (library, nvml.Status, string) {
	paths := []string{
		"libnvidia-ml.so.1", // where the linker looks
		"/usr/local/nvidia/lib64/libnvidia-ml.so.1", "/run/opengl-driver/lib/libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1",
	}
	for _, path := range paths {
		lib := driver.New(driver.WithLibraryPath(path))
		switch ret := lib.Init(); ret {
		case driver.SUCCESS:
			known := map[string]bool{}
			return library{lib, func(symbol string) bool {
				has, asked := known[symbol]
				if !asked {
					has = lib.Extensions().LookupSymbol(symbol) == nil
					known[symbol] = has
				}
				return has
			}}, nvml.OK, ""
		case driver.ERROR_LIBRARY_NOT_FOUND:
		case driver.ERROR_DRIVER_NOT_LOADED:
			return library{}, nvml.NoDriver, "the kernel module is not loaded"
		default:
			return library{}, nvml.Failed, "initialize: " + text(lib.ErrorString(ret))
		}
	}
	return library{}, nvml.NoDriver, "libnvidia-ml.so.1 is not installed"
}

// collector asks NVML. It opens it for the first request.
type collector struct {
	open   func() (library, nvml.Status, string)
	lib    library
	opened bool
	events driver.EventSet
	cards  []*card
}

// card is what is remembered of a GPU: one that is lost tells its name no more.
type card struct {
	device    driver.Device
	address   string
	uuid      string
	listening bool // for Xids
	xids      []nvml.Xid
}

func newCollector(open func() (library, nvml.Status, string)) *collector {
	return &collector{open: open}
}

// close lets go of the driver.
func (c *collector) close() {
	if !c.opened {
		return
	}
	if c.events != nil {
		_ = c.events.Free()
	}
	_ = c.lib.Shutdown()
	*c = collector{open: c.open}
}

func (c *collector) answer(r nvml.Request) *nvml.Response {
	out := &nvml.Response{Version: nvml.Version, Number: r.Number, Status: nvml.OK}
	fail := func(status nvml.Status, message string) *nvml.Response {
		out.Status, out.Message = status, message
		return out
	}
	if r.Version != nvml.Version {
		return fail(nvml.Failed, fmt.Sprintf("request of version %d, this is %d: install hostd and hostd-nvml of one release", r.Version, nvml.Version))
	}
	switch r.Op {
	case nvml.Release:
		c.close()
		return out
	case nvml.List, nvml.Facts:
	default:
		return fail(nvml.Failed, fmt.Sprintf("unknown request %.40q", r.Op))
	}
	if !c.opened {
		lib, status, message := c.open()
		if status != nvml.OK {
			return fail(status, message)
		}
		c.lib, c.opened = lib, true
	}
	if version, ret := c.lib.SystemGetDriverVersion(); ret == driver.SUCCESS {
		out.Driver = text(version)
	}
	if c.lib.has("nvmlSystemGetCudaDriverVersion") {
		if v, ret := c.lib.SystemGetCudaDriverVersion(); ret == driver.SUCCESS && v > 0 {
			out.CUDA = fmt.Sprintf("%d.%d", v/1000, v%1000/10)
		}
	}
	if ret := c.find(); ret != driver.SUCCESS {
		return fail(nvml.Failed, "count GPUs: "+text(c.lib.ErrorString(ret)))
	}
	c.drain()
	for _, known := range c.cards {
		g := c.gpu(known, r.Op == nvml.List)
		g.Xids = slices.Clone(known.xids)
		out.GPUs = append(out.GPUs, g)
	}
	return out
}

// find brings the cards up to date. One that is lost stays in the list.
func (c *collector) find() driver.Return {
	count, ret := c.lib.DeviceGetCount()
	if ret != driver.SUCCESS {
		return ret
	}
	for i := range min(count, maxGPUs) {
		device, ret := c.lib.DeviceGetHandleByIndex(i)
		if ret != driver.SUCCESS {
			continue
		}
		info, ret := device.GetPciInfo()
		if ret != driver.SUCCESS {
			continue
		}
		address := pciAddress(info)
		at := slices.IndexFunc(c.cards, func(k *card) bool { return k.address == address })
		if at < 0 {
			c.cards = append(c.cards, &card{address: address})
			at = len(c.cards) - 1
		}
		known := c.cards[at]
		known.device = device
		if uuid, ret := device.GetUUID(); ret == driver.SUCCESS {
			known.uuid = text(uuid)
		}
		c.listen(known)
	}
	return driver.SUCCESS
}

func pciAddress(info driver.PciInfo) string {
	if a, err := pci.ParseAddress(chars(info.BusId[:])); err == nil {
		return a.String()
	}
	return pci.Address{Domain: info.Domain, Bus: uint8(info.Bus), Device: uint8(info.Device)}.String()
}

// listen asks to be told of Xids.
func (c *collector) listen(k *card) {
	if k.listening || !c.lib.has("nvmlEventSetCreate") || !c.lib.has("nvmlDeviceRegisterEvents") || !c.lib.has("nvmlEventSetWait") && !c.lib.has("nvmlEventSetWait_v2") {
		return
	}
	if c.events == nil {
		set, ret := c.lib.EventSetCreate()
		if ret != driver.SUCCESS {
			return
		}
		c.events = set
	}
	k.listening = k.device.RegisterEvents(driver.EventTypeXidCriticalError, c.events) == driver.SUCCESS
}

// drain takes the Xids that have come since the last request.
func (c *collector) drain() {
	if c.events == nil {
		return
	}
	for range maxEvents {
		event, ret := c.events.Wait(0)
		if ret != driver.SUCCESS {
			return
		}
		if event.EventType != driver.EventTypeXidCriticalError || nvml.ApplicationXid(event.EventData) {
			continue
		}
		for _, k := range c.cards {
			if k.device == event.Device {
				k.count(event.EventData)
			}
		}
	}
}

func (k *card) count(code uint64) {
	at := slices.IndexFunc(k.xids, func(x nvml.Xid) bool { return x.Code == code })
	if at < 0 {
		if len(k.xids) == maxXids {
			return
		}
		k.xids = append(k.xids, nvml.Xid{Code: code})
		at = len(k.xids) - 1
	}
	k.xids[at].Count++
}

// reader asks one GPU and notes what goes wrong.
type reader struct {
	lib library
	to  *nvml.GPU
}

// ask calls a function if the library has it. What a GPU does not have is nil
// and no error.
func ask[T any](r reader, symbol string, f func() (T, driver.Return)) *T {
	if !r.lib.has(symbol) {
		return nil
	}
	value, ret := f()
	if !r.note(symbol, ret) {
		return nil
	}
	return &value
}

func (r reader) note(symbol string, ret driver.Return) (ok bool) {
	switch ret {
	case driver.SUCCESS:
		return true
	case driver.ERROR_GPU_IS_LOST:
		r.to.Lost = true
	case driver.ERROR_RESET_REQUIRED:
		r.to.ResetRequired = true
	case driver.ERROR_UNKNOWN, driver.ERROR_TIMEOUT, driver.ERROR_IRQ_ISSUE, driver.ERROR_CORRUPTED_INFOROM, driver.ERROR_MEMORY:
		r.to.Errors = append(r.to.Errors, text(symbol+": "+r.lib.ErrorString(ret)))
	}
	return false
}

func (c *collector) gpu(k *card, everything bool) nvml.GPU {
	g := nvml.GPU{UUID: k.uuid, PCIAddress: k.address}
	r, d := reader{c.lib, &g}, k.device
	if memory := ask(r, "nvmlDeviceGetMemoryInfo", d.GetMemoryInfo); memory != nil {
		g.Memory, g.UsedMemory = &memory.Total, &memory.Used
	}
	if use := ask(r, "nvmlDeviceGetUtilizationRates", d.GetUtilizationRates); use != nil {
		g.Utilization, g.MemoryUtilization = &use.Gpu, &use.Memory
	}
	if t := ask(r, "nvmlDeviceGetTemperature", func() (uint32, driver.Return) { return d.GetTemperature(driver.TEMPERATURE_GPU) }); t != nil {
		celsius := int32(*t)
		g.Temperature = &celsius
	}
	g.Power = ask(r, "nvmlDeviceGetPowerUsage", d.GetPowerUsage)
	if g.PowerLimit = ask(r, "nvmlDeviceGetEnforcedPowerLimit", d.GetEnforcedPowerLimit); g.PowerLimit == nil {
		g.PowerLimit = ask(r, "nvmlDeviceGetPowerManagementLimit", d.GetPowerManagementLimit)
	}
	c.ecc(r, d)
	if !everything {
		return g
	}
	if name := ask(r, "nvmlDeviceGetName", d.GetName); name != nil {
		g.Name = text(*name)
	}
	if serial := ask(r, "nvmlDeviceGetSerial", d.GetSerial); serial != nil {
		g.Serial = text(*serial)
	}
	c.link(r, d)
	if nodes := ask(r, "nvmlDeviceGetMemoryAffinity", func() ([]uint, driver.Return) {
		return d.GetMemoryAffinity(numaWords, driver.AFFINITY_SCOPE_NODE)
	}); nodes != nil {
		g.NUMANode = firstBit(*nodes)
	}
	c.processes(r, d)
	c.mig(r, d)
	return g
}

func (c *collector) ecc(r reader, d driver.Device) {
	var e nvml.ECC
	found := false
	if r.lib.has("nvmlDeviceGetEccMode") {
		if current, _, ret := d.GetEccMode(); r.note("nvmlDeviceGetEccMode", ret) {
			e.Enabled, found = current == driver.FEATURE_ENABLED, true
		}
	}
	if e.Enabled {
		e.Uncorrected = ask(r, "nvmlDeviceGetTotalEccErrors", func() (uint64, driver.Return) {
			return d.GetTotalEccErrors(driver.MEMORY_ERROR_TYPE_UNCORRECTED, driver.VOLATILE_ECC)
		})
	}
	if r.lib.has("nvmlDeviceGetRemappedRows") {
		if corrected, uncorrected, pending, failed, ret := d.GetRemappedRows(); r.note("nvmlDeviceGetRemappedRows", ret) {
			e.RemappedRows, e.UncorrectedRemap, e.RemapPending, e.RemapFailed, found = &corrected, &uncorrected, pending, failed, true
		}
	}
	if pending := ask(r, "nvmlDeviceGetRetiredPagesPendingStatus", d.GetRetiredPagesPendingStatus); pending != nil {
		e.RetiredPending, found = *pending == driver.FEATURE_ENABLED, true
	}
	if found {
		r.to.ECC = &e
	}
}

func (c *collector) link(r reader, d driver.Device) {
	number := func(symbol string, f func() (int, driver.Return)) int {
		if n := ask(r, symbol, f); n != nil {
			return *n
		}
		return 0
	}
	l := nvml.Link{
		Generation:    number("nvmlDeviceGetCurrPcieLinkGeneration", d.GetCurrPcieLinkGeneration),
		MaxGeneration: number("nvmlDeviceGetMaxPcieLinkGeneration", d.GetMaxPcieLinkGeneration),
		Width:         number("nvmlDeviceGetCurrPcieLinkWidth", d.GetCurrPcieLinkWidth),
		MaxWidth:      number("nvmlDeviceGetMaxPcieLinkWidth", d.GetMaxPcieLinkWidth),
	}
	if l != (nvml.Link{}) {
		r.to.Link = &l
	}
}

func (c *collector) processes(r reader, d driver.Device) {
	seen := map[uint32]bool{}
	for _, kind := range []struct {
		symbol string
		list   func() ([]driver.ProcessInfo, driver.Return)
	}{
		{"nvmlDeviceGetComputeRunningProcesses", d.GetComputeRunningProcesses},
		{"nvmlDeviceGetGraphicsRunningProcesses", d.GetGraphicsRunningProcesses},
	} {
		symbol := kind.symbol
		for _, version := range []string{"_v2", "_v3"} { // what the binding then calls
			if r.lib.has(kind.symbol + version) {
				symbol = kind.symbol + version
			}
		}
		list := ask(r, symbol, kind.list)
		if list == nil {
			continue
		}
		for _, p := range *list {
			if seen[p.Pid] || len(r.to.Processes) == maxProcesses {
				continue // slices list a process each
			}
			seen[p.Pid] = true
			out := nvml.Process{PID: p.Pid}
			if p.UsedGpuMemory != noMemory {
				used := p.UsedGpuMemory
				out.Memory = &used
			}
			if r.lib.has("nvmlSystemGetProcessName") {
				if name, ret := r.lib.SystemGetProcessName(int(p.Pid)); ret == driver.SUCCESS {
					out.Name = text(name)
				}
			}
			r.to.Processes = append(r.to.Processes, out)
		}
	}
}

func (c *collector) mig(r reader, d driver.Device) {
	if !r.lib.has("nvmlDeviceGetMigMode") {
		return
	}
	current, pending, ret := d.GetMigMode()
	if !r.note("nvmlDeviceGetMigMode", ret) {
		return
	}
	m := &nvml.MIG{Enabled: current == driver.DEVICE_MIG_ENABLE, Pending: pending == driver.DEVICE_MIG_ENABLE}
	r.to.MIG = m
	if !m.Enabled {
		return
	}
	for id := range driver.GPU_INSTANCE_PROFILE_COUNT {
		if p, ok := profile(r, d, id); ok {
			m.Profiles = append(m.Profiles, p)
		}
	}
	most := ask(r, "nvmlDeviceGetMaxMigDeviceCount", d.GetMaxMigDeviceCount)
	if most == nil || !r.lib.has("nvmlDeviceGetMigDeviceHandleByIndex") {
		return
	}
	for i := range min(*most, maxGPUs) {
		slice, ret := d.GetMigDeviceHandleByIndex(i)
		if ret != driver.SUCCESS {
			continue // a place that is not taken
		}
		var out nvml.MIGInstance
		if uuid, ret := slice.GetUUID(); ret == driver.SUCCESS {
			out.UUID = text(uuid)
		}
		if name, ret := slice.GetName(); ret == driver.SUCCESS {
			out.Name = text(name)
		}
		if memory, ret := slice.GetMemoryInfo(); ret == driver.SUCCESS {
			out.Memory = memory.Total
		}
		if id, ret := slice.GetGpuInstanceId(); ret == driver.SUCCESS {
			out.GPU = id
		}
		if id, ret := slice.GetComputeInstanceId(); ret == driver.SUCCESS {
			out.Compute = id
		}
		m.Instances = append(m.Instances, out)
	}
}

// profile names a kind of slice as the vendor does; libraries that do not tell
// the name get one of its size.
func profile(r reader, d driver.Device, id int) (nvml.MIGProfile, bool) {
	if r.lib.has("nvmlDeviceGetGpuInstanceProfileInfoV") {
		if info, ret := d.GetGpuInstanceProfileInfoV(id).V2(); ret == driver.SUCCESS {
			name := strings.TrimPrefix(chars(info.Name[:]), "MIG ")
			return nvml.MIGProfile{ID: info.Id, Name: text(name), Memory: info.MemorySizeMB << 20, Max: info.InstanceCount}, true
		}
	}
	if !r.lib.has("nvmlDeviceGetGpuInstanceProfileInfo") {
		return nvml.MIGProfile{}, false
	}
	info, ret := d.GetGpuInstanceProfileInfo(id)
	if ret != driver.SUCCESS {
		return nvml.MIGProfile{}, false
	}
	name := fmt.Sprintf("%dg.%dgb", info.SliceCount, (info.MemorySizeMB+1023)/1024)
	return nvml.MIGProfile{ID: info.Id, Name: name, Memory: info.MemorySizeMB << 20, Max: info.InstanceCount}, true
}

func firstBit(words []uint) *int {
	for i, w := range words {
		if w != 0 {
			n := i*bits.UintSize + bits.TrailingZeros(w)
			return &n
		}
	}
	return nil
}

// chars is a C string.
func chars(c []int8) string {
	var b []byte
	for _, x := range c {
		if x == 0 {
			break
		}
		b = append(b, byte(x))
	}
	return string(b)
}

// text bounds what the library says.
func text(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return -1
		}
		return r
	}, strings.ToValidUTF8(s, ""))
	return strings.ToValidUTF8(s[:min(len(s), maxText)], "")
}
