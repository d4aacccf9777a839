package hostinfo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"strconv"
	"strings"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

const (
	maxFile = 1 << 20
	maxText = 256
	maxCPUs = 1 << 16

	// Values of Host.hypervisor.
	hypervisorXen  = "xen"
	hypervisorKVM  = "kvm"
	hypervisorNone = "none"
)

// Read returns the properties of the host. Name, id, address, labels, version and state
// are not set. If something cannot be read, the error contains it, and the rest is
// returned nevertheless.
func Read(ctx context.Context, root fs.FS, network Network) (*clusterv1.Host, error) {
	h := &clusterv1.Host{BootId: text(root, "proc/sys/kernel/random/boot_id")}
	h.Hypervisor, h.HypervisorVersion = hypervisor(root)
	h.Cpus = count(text(root, "sys/devices/system/cpu/online"))
	h.NumaNodes = max(1, count(text(root, "sys/devices/system/node/online")))
	var failures []error
	if h.GetCpus() == 0 {
		failures = append(failures, errors.New("processors: cannot be read"))
	}
	memory, err := meminfo(root, "MemTotal")
	if err != nil {
		failures = append(failures, err)
	}
	h.Memory = memory
	if h.Nics, err = nics(ctx, root, network); err != nil {
		failures = append(failures, err)
	}
	return h, errors.Join(failures...)
}

// Load returns the load average over one minute, and the free memory in bytes:
// MemAvailable of proc_meminfo(5).
func Load(root fs.FS) (load1 float64, freeMemory uint64, err error) {
	first, _, _ := strings.Cut(text(root, "proc/loadavg"), " ")
	load1, err = strconv.ParseFloat(first, 64)
	if err != nil || math.IsNaN(load1) || load1 < 0 || load1 > 1e9 {
		load1, err = 0, fmt.Errorf("load average: %.20q is not a number", first)
	}
	freeMemory, memoryErr := meminfo(root, "MemAvailable")
	if memoryErr != nil {
		freeMemory, memoryErr = meminfo(root, "MemFree") // Linux before 3.14 has no MemAvailable
	}
	return load1, freeMemory, errors.Join(err, memoryErr)
}

// hypervisor returns Xen only in the control domain. Another domain of Xen is treated
// like any other computer.
func hypervisor(root fs.FS) (name, version string) {
	if text(root, "sys/hypervisor/type") == "xen" && strings.Contains(text(root, "proc/xen/capabilities"), "control_d") {
		major, minor, extra := text(root, "sys/hypervisor/version/major"), text(root, "sys/hypervisor/version/minor"), text(root, "sys/hypervisor/version/extra")
		if major == "" {
			return hypervisorXen, ""
		}
		return hypervisorXen, clip(major + "." + minor + extra)
	}
	if _, err := fs.Stat(root, "dev/kvm"); err == nil {
		// The version of KVM is that of the kernel.
		return hypervisorKVM, text(root, "proc/sys/kernel/osrelease")
	}
	return hypervisorNone, ""
}

// meminfo returns a value of /proc/meminfo in bytes.
func meminfo(root fs.FS, key string) (uint64, error) {
	for line := range strings.Lines(string(read(root, "proc/meminfo"))) {
		f := strings.Fields(line)
		if len(f) >= 2 && f[0] == key+":" {
			kib, err := strconv.ParseUint(f[1], 10, 53)
			if err != nil {
				break
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("memory: no %s in /proc/meminfo", key)
}

// count returns how many numbers a list such as "0-3,8" contains; 0: it is not a list.
func count(list string) uint32 {
	var n uint64
	for part := range strings.SplitSeq(list, ",") {
		low, high, isRange := strings.Cut(part, "-")
		if !isRange {
			high = low
		}
		a, err1 := strconv.ParseUint(low, 10, 32)
		b, err2 := strconv.ParseUint(high, 10, 32)
		if err1 != nil || err2 != nil || b < a {
			return 0
		}
		n += b - a + 1
		if n > maxCPUs {
			return 0
		}
	}
	return uint32(n)
}

func read(root fs.FS, name string) []byte {
	f, err := root.Open(name)
	if err != nil {
		return nil
	}
	defer f.Close()
	data, _ := io.ReadAll(io.LimitReader(f, maxFile))
	return data
}

func text(root fs.FS, name string) string { return clip(string(read(root, name))) }

// clip returns a text as one line of limited length.
func clip(s string) string {
	s = strings.ToValidUTF8(s, "")
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	return strings.ToValidUTF8(s[:min(len(s), maxText)], "")
}
