package xen

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/internal/xenstore"
	"github.com/gpuctl/gpuctl/internal/xenstore/xenstoretest"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func store(t *testing.T) (*xenstoretest.Server, *xenstore.Client) {
	t.Helper()
	server := xenstoretest.New(t)
	c, err := xenstore.Dial(t.Context(), server.Path())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return server, c
}

func TestDetect(t *testing.T) {
	tree := pcitest.XenDom0(pcitest.New(t))
	if err := Detect(tree.FS()); err != nil {
		t.Error(err)
	}
	tree.Write("proc/xen/capabilities", "\n")
	if err := Detect(tree.FS()); !errors.Is(err, ErrNotControl) || !strings.Contains(err.Error(), "mount xenfs") {
		t.Errorf("a guest: %v", err)
	}
	if err := Detect(fstest.MapFS{}); !errors.Is(err, ErrNotControl) {
		t.Errorf("no Xen: %v", err)
	}
	for name, content := range map[string]string{"major": "4\n", "minor": "17\n", "extra": ".7\n"} {
		tree.Write("sys/hypervisor/version/"+name, content)
	}
	if v, err := ReadVersion(tree.FS()); err != nil || v.String() != "4.17.7" {
		t.Errorf("%v, %v", v, err)
	}
	if v, err := ReadVersion(fstest.MapFS{}); err == nil {
		t.Errorf("no version is %v", v)
	}
}

func TestDomains(t *testing.T) {
	server, c := store(t)
	x := &fakeXen{domains: []fakeDomain{{id: 0}, {id: 7, flags: domainHVM, emul: 0x5ff, handle: 1}, {id: 8, flags: domainDying}}}
	server.Set("/local/domain/0/name", "Domain-0", "/local/domain/7/name", "web\x1b[1m")
	got, err := New(fstest.MapFS{}, c, x.privcmd()).Domains(t.Context())
	want := []Domain{
		{ID: 0, Name: "Domain-0", Type: TypePV},
		{ID: 7, Name: "web[1m", Type: TypeHVM, UUID: "01000000-0000-0000-0000-000000000000"},
		{ID: 8, Type: TypePV, Dying: true},
	}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Error(d, err)
	}
	// xl tells less; the store has the rest.
	server.Set("/local/domain/7/vm", "/vm/0c9f", "/libxl/7/type", "pvh", "/libxl/0/type", "nonsense")
	xl := program(t, `echo 'Name ID Mem VCPUs State Time(s)
Domain-0 0 800 1 r----- 10.0
a name with spaces 7 128 1 --p--- 1.5
new 8 128 1 --p--- 0.0'`)
	got, err = New(fstest.MapFS{}, c, xl).Domains(t.Context())
	want = []Domain{{ID: 0, Name: "Domain-0", Ran: true}, {ID: 7, Name: "web[1m", Type: TypePVH, UUID: "0c9f", Paused: true, Ran: true}, {ID: 8, Paused: true}}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Error(d, err)
	}
}

func TestAssigned(t *testing.T) {
	server, c := store(t)
	h := New(pcitest.XenDom0(pcitest.New(t)).FS(), c, nil)
	if got, err := h.Assigned(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("without any: %v, %v", got, err)
	}
	b := "/local/domain/0/backend/pci/"
	server.Set(
		b+"7/0/num_devs", "2", b+"7/0/dev-0", "0000:65:00.0", b+"7/0/state-0", "1", b+"7/0/vdevfn-0", "28", b+"7/0/opts-0", "permissive=0",
		b+"7/0/dev-5", "0000:65:00.1", // a hole, as after a detach
		b+"9/0/dev-0", "0000:65:00.0", b+"9/0/state-0", "6",
		b+"9/0/dev-1", "no address", b+"9/0/dev-x", "", b+"nonsense/0/dev-0", "0000:65:00.2",
	)
	got, err := h.Assigned(t.Context())
	want := []Assigned{
		{Device: addr("0000:65:00.0"), Domain: 7, Slot: 0x28, State: "initialising", Options: "permissive=0"},
		{Device: addr("0000:65:00.0"), Domain: 9, Slot: -1, State: "closed"},
		{Device: addr("0000:65:00.1"), Domain: 7, Slot: -1, State: "unknown"},
	}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Error(d, err)
	}
	free, err := h.Assignable(t.Context())
	if d := cmp.Diff([]pci.Address{addr("0000:65:00.2"), addr("0000:65:00.3")}, free); d != "" || err != nil {
		t.Error(d, err)
	}
	server.Set("/libxl/pciback/0000-65-00-0/driver_path", "/sys/bus/pci/drivers/nvidia")
	for a, want := range map[string]string{"0000:65:00.0": "nvidia", "0000:65:00.1": ""} {
		if got, err := h.NativeDriver(t.Context(), addr(a)); err != nil || got != want {
			t.Errorf("%s: %q, %v", a, got, err)
		}
	}
	// A socket that is not there is no node that is not there. The first call may
	// meet the connection that breaks, the second waits for a new one.
	server.Stop()
	for range 2 {
		short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		if got, err := h.Assigned(short); !errors.Is(err, xenstore.ErrConnection) {
			t.Errorf("without a store: %v, %v", got, err)
		}
		cancel()
	}
}

func TestPciback(t *testing.T) {
	tree := pcitest.XenDom0(pcitest.New(t))
	tree.Write("sys/bus/pci/drivers/pciback/slots", "0000:65:00.0\n0000:65:00.1\nnonsense\n0000:7f:00.0\n")
	tree.Write("sys/bus/pci/drivers/pciback/irq_handlers", "0000:65:00.0:on:acking:12\n0000:65:00.1:off:not acking:0\n0000:65\n")
	p, err := New(tree.FS(), nil, nil).Pciback()
	want := Pciback{
		Loaded: true,
		Bound:  []pci.Address{addr("0000:65:00.0"), addr("0000:65:00.1"), addr("0000:65:00.2"), addr("0000:65:00.3")},
		Slots:  []pci.Address{addr("0000:65:00.0"), addr("0000:65:00.1"), addr("0000:7f:00.0")},
		Interrupts: map[pci.Address]string{
			addr("0000:65:00.0"): "on", addr("0000:65:00.1"): "off",
		},
	}
	if d := cmp.Diff(want, p); d != "" || err != nil {
		t.Error(d, err)
	}
	if p, err := New(pcitest.New(t).FS(), nil, nil).Pciback(); err != nil || p.Loaded {
		t.Errorf("without the module: %+v, %v", p, err)
	}
}

func TestAccess(t *testing.T) {
	grub := "etc/default/grub"
	for _, c := range []struct {
		name                string
		files               map[string]string
		held, free, neither Access // by pciback, by a driver, by nobody
	}{
		{"nothing hidden", nil, AccessEnableOnReboot, AccessEnabled, AccessEnabled},
		{
			"by grub",
			map[string]string{grub: "GRUB_TIMEOUT=5\nGRUB_CMDLINE_LINUX=\"quiet xen-pciback.hide=(0000:65:00.*)(05:00.0)(0000:06:00.0)\"\n"},
			AccessDisabled, AccessDisableOnReboot, AccessDisableOnReboot,
		},
		{
			"now and by modprobe", map[string]string{
				"proc/cmdline":             "root=/dev/sda xen_pciback.hide=(06:00.0)\n",
				"etc/modprobe.d/gpu.conf":  "# a comment\noptions xen_pciback \\\n passthrough=1 hide=(0000:65:00.0)(0000:06:00.0)\n",
				"lib/modprobe.d/gpu.conf":  "options xen-pciback hide=(0000:05:00.0)\n", // hidden by the one above
				"etc/modprobe.d/gpu.old":   "options xen-pciback hide=(0000:05:00.0)\n",
				"etc/modprobe.d/more.conf": "options nouveau modeset=0\nblacklist nvidia\n",
			}, AccessDisabled, AccessEnabled, AccessDisabled,
		},
		{"until the next boot", map[string]string{"proc/cmdline": "xen-pciback.hide=(06:00.0)"}, AccessEnableOnReboot, AccessEnabled, AccessEnableOnReboot},
		{
			"by grub's variables for Xen", map[string]string{
				grub: "GRUB_CMDLINE_LINUX='xen-pciback.hide=(05:00.0)'\nGRUB_CMDLINE_LINUX_DEFAULT=quiet\n",
				"etc/default/grub.d/xen.cfg": `HIDE='(65:00.0)' # and more
GRUB_CMDLINE_LINUX_XEN_REPLACE="${HIDE:-x} $GRUB_CMDLINE_LINUX_DEFAULT xen-pciback.hide=$HIDE(06:00.0)"`,
			}, AccessDisabled, AccessEnabled, AccessDisableOnReboot,
		},
		{
			"by a file that adds to it", map[string]string{
				grub:                       "GRUB_CMDLINE_LINUX=\"quiet\"\n",
				"etc/default/grub.d/1.cfg": "GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX xen-pciback.hide=(05:00.0)\"\n",
				"etc/default/grub.d/2.cfg": "export GRUB_CMDLINE_LINUX+=' quiet'",
			}, AccessEnableOnReboot, AccessDisableOnReboot, AccessEnabled,
		},
		{
			"by a finished grub.cfg", map[string]string{"boot/efi/EFI/xenserver/grub.cfg": `serial --unit=0
menuentry 'XCP-ng' {
	multiboot2 /boot/xen.gz dom0_mem=4096M
	module2 /boot/vmlinuz root=LABEL=root xen-pciback.hide=(0000:65:00.0)(0000:05:00.0)
	module2 /boot/initrd.img
}
menuentry 'safe' {
	multiboot2 /boot/xen.gz
	module2 /boot/vmlinuz xen-pciback.hide=(0000:06:00.0)
}`}, AccessDisabled, AccessDisableOnReboot, AccessEnabled,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			tree := pcitest.XenDom0(pcitest.New(t))
			if err := os.Remove(filepath.Join(tree.Root, tree.Dir("0000:06:00.0"), "driver")); err != nil {
				t.Fatal(err)
			}
			for name, content := range c.files {
				tree.Write(name, content)
			}
			h := New(tree.FS(), nil, nil)
			for a, want := range map[string]Access{"0000:65:00.0": c.held, "0000:05:00.0": c.free, "0000:06:00.0": c.neither} {
				if got, err := h.Access(addr(a)); err != nil || got != want {
					t.Errorf("%s: %q, want %q (%v)", a, got, want, err)
				}
			}
		})
	}
}

const someLog = `(XEN) [VT-D]found ACPI_DMAR_DRHD:
(XEN) [VT-D] endpoint: 0000:00:02.0
(XEN) [VT-D]found ACPI_DMAR_RMRR:
(XEN) [VT-D] endpoint: 0000:03:00.0
(XEN) [VT-D] endpoint: 0000:65:00.0
(XEN) [VT-D]dmar.c:608:   RMRR region: base_addr bdf8f000 end_addr bdf92fff
(XEN) [VT-D]found ACPI_DMAR_RMRR:
(XEN) [VT-D] endpoint: 0000:00:14.0
(XEN) [VT-D]drivers/passthrough/vtd/dmar.c:610:  RMRR: [d9888000,d9894fff]
(XEN) Intel VT-d Interrupt Remapping enabled.
(XEN) I/O virtualisation enabled
(XEN)  - Dom0 mode: Relaxed
(XEN) Interrupt remapping enabled
[2026-08-22 10:09:03] (XEN) [  297.542134] [VT-D] It's disallowed to assign 0000:65:00.0 with shared RMRR at bdf8f000 for Dom32753.
(XEN) [VT-D] It's disallowed to assign 0000:65:00.0 with shared RMRR at bdf8f000 for Dom32753.
(XEN) [VT-D] It's risky to assign 0000:03:00.0 with shared RMRR at bdf8f000 for d10.
(XEN) d[IO]: assign (0000:65:00.0) failed (-1)
(XEN) [VT-D]DMAR:[DMA Write] Request device [0000:04:00.4] fault addr bdf80000
(XEN) [VT-D]DMAR:[DMA Write] Request device [0000:04:00.4] fault addr bdf80000
(XEN) AMD-Vi: IO_PAGE_FAULT: 0000:07:00.0 d1 addr 00000000fffffff0 flags 0x8
`

func TestParseLog(t *testing.T) {
	want := Log{
		IOMMU: On, InterruptRemapping: On,
		Reserved: []Reserved{
			{Start: 0xbdf8f000, End: 0xbdf92fff, Devices: []pci.Address{addr("0000:03:00.0"), addr("0000:65:00.0")}},
			{Start: 0xd9888000, End: 0xd9894fff, Devices: []pci.Address{addr("0000:00:14.0")}},
		},
		Refused: []Refused{
			{Device: addr("0000:03:00.0"), Start: 0xbdf8f000, Domain: "d10", Risky: true},
			{Device: addr("0000:65:00.0"), Start: 0xbdf8f000, Domain: "Dom32753"},
		},
		Faults: map[pci.Address]int{addr("0000:04:00.4"): 2, addr("0000:07:00.0"): 1},
	}
	if d := cmp.Diff(want, ParseLog(someLog)); d != "" {
		t.Error(d)
	}
	off := ParseLog("(XEN) I/O virtualisation disabled\n(XEN) Interrupt remapping disabled\n")
	if off.IOMMU != Off || off.InterruptRemapping != Off || ParseLog("").IOMMU != Unknown {
		t.Errorf("got %+v", off)
	}
}

const someInfo = `host                   : a
virt_caps              : pv hvm hvm_directio pv_directio hap
numa_info              :
node:    memsize    memfree    distances
   0:      1536        321      10
device topology        :
device           node
0000:00:00.0      0
0000:65:00.0      1
0000:66:00.0   N/A
`

// program is an xl that runs a script.
func program(t *testing.T, script string) *XL {
	t.Helper()
	path := filepath.Join(t.TempDir(), "xl")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return &XL{Path: path}
}

func TestXL(t *testing.T) {
	xl := program(t, `case "$*" in
"info"|"info -n") cat <<'EOF'
`+someInfo+`EOF
;;
dmesg) echo '(XEN) I/O virtualisation enabled';;
"destroy 7") ;;
*) echo "what is $*?" >&2; exit 3;;
esac`)
	if got, err := xl.IOMMU(t.Context()); err != nil || got != On {
		t.Errorf("%v, %v", got, err)
	}
	nodes, err := xl.Nodes(t.Context(), []pci.Address{addr("0000:65:00.0"), addr("0000:66:00.0"), addr("0000:67:00.0")})
	if d := cmp.Diff(map[pci.Address]int{addr("0000:65:00.0"): 1}, nodes); d != "" || err != nil {
		t.Error(d, err)
	}
	if log, err := xl.Log(t.Context()); err != nil || ParseLog(log).IOMMU != On {
		t.Errorf("%q, %v", log, err)
	}
	if err := xl.Destroy(t.Context(), 7); err != nil {
		t.Error(err)
	}
	if err := xl.Destroy(t.Context(), 8); err == nil || !strings.Contains(err.Error(), "what is destroy 8?") {
		t.Errorf("got %v", err)
	}
	if _, err := xl.Group(t.Context(), addr("0000:65:00.0")); !errors.Is(err, ErrUnsupported) {
		t.Error(err)
	}
	if _, err := xl.Running(t.Context()); err == nil || err.Error() != "xl list: exit status 3: what is list?" {
		t.Errorf("got %v", err)
	}
	if s := parseInfo("virt_caps : hvm hap\n"); s != Off {
		t.Errorf("an IOMMU that is off is %v", s)
	}
	if s := parseInfo("xen_major : 4\n"); s != Unknown {
		t.Errorf("nothing is %v", s)
	}
	// It hangs when xenstored does, and what it started holds its output.
	xl = program(t, "sleep 5 & exec sleep 5")
	xl.Timeout = 50 * time.Millisecond
	started := time.Now()
	if _, err := xl.Log(t.Context()); !errors.Is(err, context.DeadlineExceeded) || time.Since(started) > 4*time.Second {
		t.Errorf("after %v: %v", time.Since(started), err)
	}
}

func FuzzParseLog(f *testing.F) {
	f.Add(someLog)
	f.Add("(XEN) [VT-D]found ACPI_DMAR_RMRR:\n(XEN) [VT-D]RMRR: [,]\n")
	f.Add("[VT-D] It's risky to assign  with shared RMRR at  for .")
	f.Fuzz(func(t *testing.T, s string) {
		l := ParseLog(s)
		for _, r := range l.Reserved {
			if r.Start > r.End {
				t.Fatalf("%+v", r)
			}
		}
		for a, n := range l.Faults {
			if n <= 0 {
				t.Fatalf("%v: %d", a, n)
			}
		}
	})
}

func FuzzXL(f *testing.F) {
	f.Add(someInfo)
	f.Add("Name ID Mem VCPUs State Time(s)\nDomain-0 0 800 1 r----- 10.0\n")
	f.Add("virt_caps : \n device topology\n:: 1\n")
	f.Fuzz(func(t *testing.T, s string) {
		parseInfo(s)
		for a, n := range parseTopology(s) {
			if n < 0 || n > 0xffff {
				t.Fatalf("%v: %d", a, n)
			}
		}
		if list, err := parseList(s); err == nil && len(list) == 0 {
			t.Fatal("no domain and no error")
		}
	})
}

func FuzzConfiguration(f *testing.F) {
	f.Add("GRUB_CMDLINE_LINUX=\"quiet xen-pciback.hide=(0000:65:00.*)(05:00.0)\"\nA=$GRUB_CMDLINE_LINUX${A}x\\\n")
	f.Add("options xen_pciback hide=(0000:65:00.0)\n0000:65:00.0:on:acking:12")
	f.Add("menuentry\nmultiboot2 x\nmodule2 y hide=")
	f.Fuzz(func(t *testing.T, s string) {
		vars := map[string]string{}
		assignments(s, vars)
		for _, v := range vars {
			hiddenBy(v)
		}
		parseGrub(s)
		parseModprobe([]byte(s))
		parseSlots([]byte(s))
		parseHandlers([]byte(s))
		for _, p := range parseHidden(s) {
			if p.device > 0x1f || p.function > 7 || p.bus > 0xff {
				t.Fatalf("%q: %+v", s, p)
			}
		}
	})
}
