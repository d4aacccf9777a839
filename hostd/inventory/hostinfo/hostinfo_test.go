package hostinfo

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"google.golang.org/protobuf/testing/protocmp"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

type fakeNetwork struct {
	interfaces []Interface
	err        error
}

func (f fakeNetwork) Interfaces(context.Context) ([]Interface, error) { return f.interfaces, f.err }

func machine(files map[string]string) fstest.MapFS {
	root := fstest.MapFS{}
	for name, content := range map[string]string{
		"proc/sys/kernel/random/boot_id": "0f5ab4a4-8c4a-44e0-a2c4-1a4ff1a1f001\n", "proc/meminfo": "MemTotal:       16384 kB\nMemFree:         100 kB\nMemAvailable:    4096 kB\n",
		"sys/devices/system/cpu/online": "0-3,8\n", "sys/devices/system/node/online": "0-1\n", "proc/loadavg": "0.75 0.50 0.25 1/99 4242\n",
		"proc/sys/kernel/osrelease": "6.1.0-18-amd64\n",
	} {
		root[name] = &fstest.MapFile{Data: []byte(content)}
	}
	for name, content := range files {
		root[name] = &fstest.MapFile{Data: []byte(content)}
	}
	return root
}

func TestRead(t *testing.T) {
	xen := map[string]string{
		"sys/hypervisor/type": "xen\n", "sys/hypervisor/version/major": "4\n", "sys/hypervisor/version/minor": "17\n", "sys/hypervisor/version/extra": ".4-pre\n",
		"dev/kvm": "",
	}
	dom0 := map[string]string{"proc/xen/capabilities": "control_d\n"}
	for name, content := range xen {
		dom0[name] = content
	}
	for _, c := range []struct {
		name, hypervisor, version string
		files                     map[string]string
	}{
		{"nothing", "none", "", nil},
		{"kvm", "kvm", "6.1.0-18-amd64", map[string]string{"dev/kvm": ""}},
		{"xen dom0", "xen", "4.17.4-pre", dom0},
		{"guest of xen", "kvm", "6.1.0-18-amd64", xen},
	} {
		got, err := Read(t.Context(), machine(c.files), fakeNetwork{})
		want := &clusterv1.Host{
			Hypervisor: c.hypervisor, HypervisorVersion: c.version, Cpus: 5, NumaNodes: 2, Memory: 16 << 20, BootId: "0f5ab4a4-8c4a-44e0-a2c4-1a4ff1a1f001",
		}
		if d := cmp.Diff(want, got, protocmp.Transform()); d != "" || err != nil {
			t.Errorf("%s: %v\n%s", c.name, err, d)
		}
	}
}

// What cannot be read is named and keeps nothing else from being read.
func TestReadNamesWhatFails(t *testing.T) {
	root := machine(map[string]string{"proc/meminfo": "MemTotal: lots kB\n", "sys/devices/system/cpu/online": "3-1"})
	h, err := Read(t.Context(), root, fakeNetwork{err: errors.New("no netlink here")})
	for _, part := range []string{"processors", "MemTotal", "no netlink here"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %v", part, err)
		}
	}
	if h.GetNumaNodes() != 2 || h.GetBootId() == "" {
		t.Errorf("got %v", h)
	}
}

func TestLoad(t *testing.T) {
	load, free, err := Load(machine(nil))
	if load != 0.75 || free != 4<<20 || err != nil {
		t.Errorf("got %v, %v, %v", load, free, err)
	}
	_, free, err = Load(machine(map[string]string{"proc/meminfo": "MemFree: 7 kB\n", "proc/loadavg": "NaN"}))
	if free != 7<<10 || err == nil {
		t.Errorf("got %v, %v", free, err)
	}
}

func TestCount(t *testing.T) {
	for in, want := range map[string]uint32{"0": 1, "0-3": 4, "0-3,8,10-11": 7, "": 0, "a": 0, "3-1": 0, "0-4294967295": 0, "-1": 0, "0,": 0} {
		if got := count(in); got != want {
			t.Errorf("%q: %d, want %d", in, got, want)
		}
	}
}

// network builds sys/class/net of files; a value that begins with → is a link.
func network(t *testing.T, files map[string]string) fs.FS {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		p := filepath.Join(dir, "sys/class/net", name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, ok := strings.CutPrefix(content, "→"); ok {
			err = os.Symlink(target, p)
		} else {
			err = os.WriteFile(p, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return os.DirFS(dir)
}

func TestNICs(t *testing.T) {
	address, local := netip.MustParsePrefix("192.0.2.7/24"), netip.MustParsePrefix("fe80::1/64")
	up := func(name string, addresses ...netip.Prefix) Interface {
		return Interface{Name: name, MAC: "02:00:00:00:00:01", MTU: 1500, Up: true, Addresses: addresses}
	}
	root := network(t, map[string]string{
		"eth0/speed": "100000\n", "eth0/device/numa_node": "1\n",
		"eth1/speed": "25000\n", "eth1/device/numa_node": "0\n",
		"down/device/numa_node": "0\n",
		"slow/speed":            "-1\n", "slow/device/numa_node": "-1\n",
		"odd/speed": "4294967295\n", "odd/device/x": "",
		"vf/speed": "25000\n", "vf/device/physfn/x": "", "vf/device/numa_node": "0\n",
		"vif1.0/device/subsystem": "→../../bus/xen-backend", "vif1.0/speed": "10000\n",
		"bond0/speed": "200000\n", "bond0/lower_eth0": "→../eth0", "bond0/lower_eth1": "→../eth1",
		"vlan7/lower_bond0": "→../bond0",
		"br0/lower_eth1":    "→../eth1", "br0/lower_tap0": "→../tap0", "br0/lower_vlan7": "→../vlan7",
		"tap0/speed": "10000000\n",
		"br1/speed":  "-1\n", "br1/lower_tap0": "→../tap0",
		"veth0/speed": "10000\n",
		"loop/speed":  "1\n", "loop/lower_loop": "→../loop",
	})
	lo := up("lo", netip.MustParsePrefix("127.0.0.1/8"))
	lo.Loopback = true
	down := up("down", address)
	down.Up = false
	got, err := nics(t.Context(), root, fakeNetwork{interfaces: []Interface{
		lo, down, up("eth1", local), up("eth0"), up("slow", address, local), up("odd"), up("vf"), up("vif1.0"), up("tap0", local), up("bond0", address), up("vlan7", address),
		up("br0", address), up("br1", address), up("veth0", address), up("veth1"), up("../../x", address), up("..", address), up("loop", address),
	}})
	if err != nil {
		t.Fatal(err)
	}
	nic := func(name string, speed uint64, node int32, ips ...string) *clusterv1.NIC {
		return &clusterv1.NIC{Name: name, Address: "02:00:00:00:00:01", Mtu: 1500, Speed: speed * 1e9, NumaNode: node, Ips: ips}
	}
	want := []*clusterv1.NIC{
		nic("bond0", 200, 1, "192.0.2.7/24"),
		nic("br0", 200, 1, "192.0.2.7/24"),
		nic("br1", 0, -1, "192.0.2.7/24"),
		nic("eth0", 100, 1),
		nic("eth1", 25, 0, "fe80::1/64"),
		nic("loop", 0, -1, "192.0.2.7/24"),
		nic("odd", 0, -1),
		nic("slow", 0, -1, "192.0.2.7/24", "fe80::1/64"),
		nic("veth0", 10, -1, "192.0.2.7/24"),
		nic("vlan7", 200, 1, "192.0.2.7/24"),
	}
	want[5].Speed = 1e6
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Error(d)
	}
}

func TestInterruptedDumpsAreRepeated(t *testing.T) {
	n := 0
	out, err := whole(t.Context(), func() ([]int, error) {
		if n++; n < 4 {
			return []int{1}, netlink.ErrDumpInterrupted
		}
		return []int{1, 2}, nil
	})
	if err != nil || len(out) != 2 || n != 4 {
		t.Errorf("got %v, %v after %d", out, err, n)
	}
	n = 0
	_, err = whole(t.Context(), func() ([]int, error) { n++; return nil, netlink.ErrDumpInterrupted })
	if !errors.Is(err, netlink.ErrDumpInterrupted) || n != dumpAttempts {
		t.Errorf("%v after %d", err, n)
	}
	n = 0
	_, err = whole(t.Context(), func() ([]int, error) { n++; return nil, errors.New("no permission") })
	if err == nil || n != 1 {
		t.Errorf("%v after %d", err, n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err = whole(ctx, func() ([]int, error) { return nil, netlink.ErrDumpInterrupted }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestPrefix(t *testing.T) {
	for _, s := range []string{"192.0.2.7/24", "2001:db8::1/64"} {
		ip, n, err := net.ParseCIDR(s)
		if err != nil {
			t.Fatal(err)
		}
		n.IP = ip // in its long form
		if p, ok := prefix(n); !ok || p.String() != s {
			t.Errorf("%s became %v, %v", s, p, ok)
		}
	}
	if _, ok := prefix(nil); ok {
		t.Error("nothing is a prefix")
	}
	if _, ok := prefix(&net.IPNet{IP: net.IP{1}, Mask: net.IPMask{1, 2, 3}}); ok {
		t.Error("nonsense is a prefix")
	}
}

func TestReadThisMachine(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux")
	}
	h, err := Read(t.Context(), os.DirFS("/"), Netlink{})
	if err != nil {
		t.Fatal(err)
	}
	if h.GetCpus() == 0 || h.GetMemory() < 1<<20 || h.GetNumaNodes() == 0 || len(h.GetBootId()) != 36 || h.GetHypervisor() == "" {
		t.Errorf("got %v", h)
	}
	for _, n := range h.GetNics() {
		if n.GetName() == "lo" || n.GetMtu() == 0 {
			t.Errorf("NIC %v", n)
		}
	}
	if _, free, err := Load(os.DirFS("/")); err != nil || free == 0 || free > h.GetMemory() {
		t.Errorf("free memory %d of %d: %v", free, h.GetMemory(), err)
	}
}

func FuzzCount(f *testing.F) {
	f.Add("0-3,8")
	f.Add("0-4294967295,1")
	f.Fuzz(func(t *testing.T, s string) {
		if n := count(s); n > maxCPUs {
			t.Fatalf("%q: %d", s, n)
		}
	})
}
