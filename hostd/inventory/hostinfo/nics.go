package hostinfo

import (
	"context"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

const (
	netDir   = "sys/class/net"
	maxNICs  = 256
	maxIPs   = 64 // most addresses of one interface
	maxBelow = 8  // most interfaces on top of each other, such as a VLAN on a bond
	maxMbps  = 10_000_000
)

// Interface is a network interface as the kernel reports it.
type Interface struct {
	Name      string
	MAC       string
	MTU       int
	Up        bool // set up by the operator, and its carrier, if known, is present
	Loopback  bool
	Addresses []netip.Prefix
}

// Network lists the network interfaces.
type Network interface {
	Interfaces(ctx context.Context) ([]Interface, error)
}

func nics(ctx context.Context, root fs.FS, network Network) ([]*clusterv1.NIC, error) {
	interfaces, err := network.Interfaces(ctx)
	if err != nil {
		return nil, fmt.Errorf("network interfaces: %w", err)
	}
	slices.SortFunc(interfaces, func(a, b Interface) int { return strings.Compare(a.Name, b.Name) })
	var out []*clusterv1.NIC
	for _, i := range interfaces {
		// A name that is not a single path element would lead to another folder.
		if !i.Up || i.Loopback || !isName(i.Name) || len(out) == maxNICs {
			continue
		}
		if !physical(root, i.Name) && !slices.ContainsFunc(i.Addresses, routable) {
			continue
		}
		n := &clusterv1.NIC{Name: i.Name, Address: i.MAC, Mtu: uint32(max(0, i.MTU))}
		n.Speed, n.NumaNode = below(root, i.Name, 0)
		for _, a := range i.Addresses[:min(len(i.Addresses), maxIPs)] {
			n.Ips = append(n.Ips, a.String())
		}
		slices.Sort(n.Ips)
		out = append(out, n)
	}
	return out, nil
}

func isName(s string) bool {
	return s != "" && s != "." && s != ".." && !strings.ContainsAny(s, "/\x00")
}

func routable(p netip.Prefix) bool {
	a := p.Addr()
	return a.IsValid() && !a.IsLinkLocalUnicast() && !a.IsLoopback() && !a.IsMulticast()
}

// physical reports whether the interface is that of a hardware device and belongs to this
// host: not a virtual function, and not the host's end of a VM's interface.
func physical(root fs.FS, name string) bool {
	device := path.Join(netDir, name, "device")
	if _, err := fs.Stat(root, device); err != nil {
		return false
	}
	if _, err := fs.Stat(root, path.Join(device, "physfn")); err == nil {
		return false
	}
	bus, err := fs.ReadLink(root, path.Join(device, "subsystem"))
	return err != nil || path.Base(bus) != "xen-backend"
}

// below returns the speed in bits per second and the NUMA node of an interface, or of the
// fastest one below it.
func below(root fs.FS, name string, depth int) (speed uint64, node int32) {
	node = -1
	if n, err := strconv.ParseInt(text(root, path.Join(netDir, name, "device/numa_node")), 10, 16); err == nil && n >= 0 {
		node = int32(n)
	}
	// The kernel's value for an unknown speed is -1, or the same number unsigned. Reading
	// fails while the interface is down.
	if mbps, err := strconv.ParseInt(text(root, path.Join(netDir, name, "speed")), 10, 64); err == nil && mbps > 0 && mbps <= maxMbps {
		speed = uint64(mbps) * 1_000_000
	}
	if (speed > 0 && node >= 0) || depth == maxBelow || physical(root, name) {
		return speed, node
	}
	entries, err := fs.ReadDir(root, path.Join(netDir, name))
	if err != nil {
		return speed, node
	}
	var fastest uint64
	for _, e := range entries {
		lower, ok := strings.CutPrefix(e.Name(), "lower_")
		if !ok || !isName(lower) {
			continue
		}
		s, n := below(root, lower, depth+1)
		// The host's ends of VMs' interfaces report any speed.
		if n < 0 && !physical(root, lower) && !hasLower(root, lower) {
			continue
		}
		if node < 0 || s > fastest {
			if n >= 0 {
				node = n
			}
		}
		fastest = max(fastest, s)
	}
	if speed == 0 {
		speed = fastest
	}
	return speed, node
}

func hasLower(root fs.FS, name string) bool {
	found, _ := fs.Glob(root, path.Join(netDir, name, "lower_*"))
	return len(found) > 0
}
