package driver

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
)

// What NVML returns (nvml.h).
const (
	nvmlOK           = 0
	nvmlInsufficient = 7 // the array is too short

	nvmlText = 96 // bytes of a name or UUID

	// nvmlPciInfo_t, version 3: an address of 16 bytes, domain, bus, device, PCI device and
	// vendor id, subsystem, an address of 32 bytes.
	pciInfoSize   = 68
	offPCIChip    = 28
	offPCIAddress = 36

	// nvmlProcessInfo_t, version 2: pid, padding, bytes used, two ids of MIG.
	processSize    = 24
	offProcessUsed = 8
)

// nvml is the library that lists GPUs.
type nvml struct{ *library }

func openNVML() (*nvml, error) {
	lib, err := load("libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1", "/run/opengl-driver/lib/libnvidia-ml.so.1")
	if err != nil {
		return nil, err
	}
	n := &nvml{lib}
	if err := n.ok("nvmlInit_v2"); err != nil {
		return nil, err
	}
	return n, nil
}

func (n *nvml) close() { _, _ = n.call("nvmlShutdown") }

// ok calls a function, and turns what it returns into an error.
func (n *nvml) ok(name string, args ...uintptr) error {
	ret, err := n.call(name, args...)
	if err != nil {
		return err
	}
	if ret != nvmlOK {
		return fmt.Errorf("%s: NVML returns %d", name, ret)
	}
	return nil
}

// number calls a function that writes an unsigned int.
func (n *nvml) number(name string, args ...uintptr) (uint32, error) {
	out := alloc(8)
	defer out.free()
	err := n.ok(name, append(args, out.at())...)
	return binary.NativeEndian.Uint32(out.bytes()), err
}

// text calls a function that writes a string.
func (n *nvml) text(name string, args ...uintptr) (string, error) {
	out := alloc(nvmlText)
	defer out.free()
	err := n.ok(name, append(args, out.at(), nvmlText)...)
	return strings.ToValidUTF8(out.text(0, nvmlText), ""), err
}

// list fills in the GPUs, and who computes on them.
func (n *nvml) list(a *ask.Answer) error {
	a.Driver, _ = n.text("nvmlSystemGetDriverVersion")
	count, err := n.number("nvmlDeviceGetCount_v2")
	if err != nil {
		return err
	}
	for i := range min(count, ask.MostGPUs) {
		device := alloc(8)
		err := n.ok("nvmlDeviceGetHandleByIndex_v2", uintptr(i), device.at())
		handle := uintptr(binary.NativeEndian.Uint64(device.bytes()))
		device.free()
		if err != nil {
			return fmt.Errorf("GPU %d: %w", i, err)
		}
		if err := n.gpu(a, handle); err != nil {
			return fmt.Errorf("GPU %d: %w", i, err)
		}
	}
	return nil
}

func (n *nvml) gpu(a *ask.Answer, handle uintptr) error {
	uuid, err := n.text("nvmlDeviceGetUUID", handle)
	if err != nil {
		return err
	}
	g := ask.GPU{UUID: ask.UUID(uuid), Minor: -1}
	g.Name, _ = n.text("nvmlDeviceGetName", handle)
	if minor, err := n.number("nvmlDeviceGetMinorNumber", handle); err == nil && minor < math.MaxUint16 {
		g.Minor = int(minor)
	}
	pci := alloc(pciInfoSize)
	defer pci.free()
	if err := n.ok("nvmlDeviceGetPciInfo_v3", handle, pci.at()); err != nil {
		return err
	}
	g.Chip = binary.NativeEndian.Uint32(pci.bytes()[offPCIChip:])
	g.Address = strings.ToLower(pci.text(offPCIAddress, pciInfoSize-offPCIAddress))
	mem := alloc(24)
	defer mem.free()
	if err := n.ok("nvmlDeviceGetMemoryInfo", handle, mem.at()); err != nil {
		g.Lost = true // the driver does not answer for it
	}
	g.Total, g.Free = binary.NativeEndian.Uint64(mem.bytes()), binary.NativeEndian.Uint64(mem.bytes()[8:])
	mode := alloc(16)
	defer mode.free()
	if err := n.ok("nvmlDeviceGetMigMode", handle, mode.at(), mode.at()+8); err == nil {
		g.MIG = binary.NativeEndian.Uint32(mode.bytes()) != 0
	}
	if on, err := n.number("nvmlDeviceGetPersistenceMode", handle); err == nil {
		g.Persistent = on != 0
	}
	if m, err := n.number("nvmlDeviceGetComputeMode", handle); err == nil {
		g.ComputeMax = m == 3 // NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
	}
	if m, err := n.number("nvmlDeviceGetVirtualizationMode", handle); err == nil {
		g.Slice = m == 2 // NVML_GPU_VIRTUALIZATION_MODE_VGPU
	}
	ps, err := n.processes("nvmlDeviceGetComputeRunningProcesses_v3", handle, g.UUID, false)
	if err != nil {
		g.NoProcs = true
	}
	mps, _ := n.processes("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle, g.UUID, true)
	a.GPUs = append(a.GPUs, g)
	a.Processes = append(append(a.Processes, ps...), mps...)
	if len(a.Processes) > ask.MostProcesses {
		return fmt.Errorf("more than %d processes use GPUs", ask.MostProcesses)
	}
	return nil
}

// processes asks who computes on a GPU. The list may grow between two calls.
func (n *nvml) processes(name string, handle uintptr, gpu ask.UUID, mps bool) ([]ask.Process, error) {
	for room := uint32(64); room <= ask.MostProcesses; room *= 4 {
		out := alloc(8 + int(room)*processSize)
		binary.NativeEndian.PutUint32(out.bytes(), room)
		ret, err := n.call(name, handle, out.at(), out.at()+8)
		count := min(binary.NativeEndian.Uint32(out.bytes()), room)
		var ps []ask.Process
		for i := range int(count) {
			b := out.bytes()[8+i*processSize:]
			p := ask.Process{PID: int(binary.NativeEndian.Uint32(b)), GPU: gpu, MPS: mps}
			if used := binary.NativeEndian.Uint64(b[offProcessUsed:]); used != math.MaxUint64 {
				p.Used = used
			}
			ps = append(ps, p)
		}
		out.free()
		switch {
		case err != nil:
			return nil, err
		case ret == nvmlOK:
			return ps, nil
		case ret != nvmlInsufficient:
			return nil, fmt.Errorf("%s: NVML returns %d", name, ret)
		}
	}
	return nil, fmt.Errorf("more than %d processes use a GPU", ask.MostProcesses)
}
