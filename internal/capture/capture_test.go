package capture_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/internal/capture"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func take(t testing.TB, root fs.FS, o capture.Options) (*capture.Archive, []byte) {
	t.Helper()
	var b bytes.Buffer
	m, err := capture.Write(context.Background(), &b, root, o)
	if err != nil {
		t.Fatal(err)
	}
	a, err := capture.Open(bytes.NewReader(b.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(m, a.Manifest); d != "" {
		t.Errorf("the manifest is another one:\n%s", d)
	}
	return a, b.Bytes()
}

// host is a dom0 with cards of three kinds, and names for them.
func host(t *testing.T) *pcitest.Tree {
	t.Helper()
	tree := pcitest.New(t).Add(pcitest.Port("0000:64:00.0", "", -1, pci.PortRoot, pcitest.FullACS()))
	tree.Add(pcitest.NVIDIACard("0000:65:00", "0000:64:00.0", -1, 1)...)
	tree.Add(pcitest.Port("0000:80:00.0", "", -1, pci.PortRoot, nil))
	tree.Add(pcitest.SRIOVAccelerator("0000:81", "0000:80:00.0", -1, 0, 16, 3)...)
	for name, content := range map[string]string{
		"usr/share/misc/pci.ids":                   "# list\n10de  NVIDIA Corporation\n\t2236  GA102GL [A10]\n\t\t10de 1482  A10 board\n8086  Intel Corporation\n\t1234  Thing\n1fff  Nobody\n\t0001  Nothing\nC 03  Display controller\n\t00  VGA\n",
		"proc/sys/kernel/hostname":                 "gpu7.example.org\n",
		"proc/sys/kernel/osrelease":                "6.1.0-18-amd64\n",
		"proc/cmdline":                             "root=/dev/xvda console=hvc0 iommu.passthrough=1 rd.luks.key=geheim0 ds.token=geheim1\n",
		"proc/xen/capabilities":                    "control_d\n",
		"sys/hypervisor/type":                      "xen\n",
		"sys/module/vfio/version":                  "0.3\n",
		"sys/module/brd/version":                   "1\n",
		"etc/gpuctl/hostd.yaml":                    "version: 1\nlisten: 10.1.2.3:7480\njoin-token: geheim2\ntls:\n  key: |\n    geheim3\n    geheim3b\n  name: h1\nweb:\n  password:\n  - geheim3c\n",
		"etc/modprobe.d/vfio.conf":                 "options vfio-pci ids=10de:2236\n",
		"etc/modprobe.d/README":                    "not a .conf\n",
		"etc/shadow":                               "root:geheim4\n",
		"lib/modules/6.1.0-18-amd64/modules.alias": "alias vfio_pci:v000015B3d mlx5_vfio_pci\nalias pci:v00001AF4d virtio_pci\n",
	} {
		tree.Write(name, content)
	}
	tree.Write("sys/bus/pci/devices/0000:65:00.0/vpd", "geheim5")
	tree.Write("sys/bus/pci/devices/0000:65:00.0/resource0", "geheim6")
	tree.Write("sys/bus/pci/devices/0000:65:00.0/rom", "geheim7")
	return tree
}

// What pci.Scan sees of the picture is what it sees of the machine.
func TestReplayIsTheMachine(t *testing.T) {
	for name, root := range map[string]fs.FS{
		"dom0": host(t).FS(), "empty": fstest.MapFS{}, "this machine": os.DirFS("/"),
	} {
		a, _ := take(t, root, capture.Options{Version: "1.2"})
		want, err := pci.Scan(root)
		if err != nil {
			t.Fatal(err)
		}
		got, err := pci.Scan(a.Host())
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%s: %v\n%s", name, err, d)
		}
		if name == "dom0" && (len(got) != 2 || got[0].Main().DeviceName == "" || len(got[1].VFs) != 3) {
			t.Errorf("that was no test: %d cards", len(got))
		}
		var names []string
		_ = fs.WalkDir(a.Host(), ".", func(name string, _ fs.DirEntry, _ error) error {
			if names = append(names, name); name == "." {
				names = nil
			}
			return nil
		})
		if err := fstest.TestFS(a.Host(), names...); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// On a machine with PCI devices that are no GPUs there is nothing to scan;
// so every file is compared.
func TestEveryFileIsThatOfTheMachine(t *testing.T) {
	root := os.DirFS("/")
	a, _ := take(t, root, capture.Options{})
	n := 0
	for _, e := range must(fs.ReadDir(a.Host(), "sys/bus/pci/devices")) {
		for _, name := range []string{"class", "vendor", "device", "config", "resource", "power_state"} {
			path := "sys/bus/pci/devices/" + e.Name() + "/" + name
			want, err := fs.ReadFile(root, path)
			if err != nil {
				continue
			}
			n++
			if got, err := fs.ReadFile(a.Host(), path); err != nil || !bytes.Equal(want, got) {
				t.Errorf("%s: %v, %d bytes of %d", path, err, len(got), len(want))
			}
		}
		path := "sys/bus/pci/devices/" + e.Name()
		if want, _ := fs.ReadLink(root, path+"/driver"); want != "" {
			if got, err := fs.ReadLink(a.Host(), path+"/driver"); got != want {
				t.Errorf("%s is bound to %s, not %s (%v)", path, want, got, err)
			}
		}
	}
	if _, err := os.Stat("/sys/bus/pci/devices/0000:00:00.0"); err == nil && n == 0 {
		t.Error("nothing was compared")
	}
}

func must[T any](v T, err error) T {
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		panic(err)
	}
	return v
}

func TestSameStateSameArchive(t *testing.T) {
	root := host(t).FS()
	for _, redact := range []bool{false, true} {
		o := capture.Options{Redact: redact, Run: xenHost(t)}
		_, first := take(t, root, o)
		_, second := take(t, root, o)
		if !bytes.Equal(first, second) {
			t.Errorf("redact %v: two archives of one state", redact)
		}
	}
}

const (
	vmUUID  = "11111111-aaaa-bbbb-cccc-0123456789ab"
	vm2UUID = "22222222-aaaa-bbbb-cccc-0123456789ab"
	vm3UUID = "33333333-aaaa-bbbb-cccc-0123456789ab"
)

const vmXML = `<domain type='xen' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>payroll</name><uuid>` + vmUUID + `</uuid><title>geheim10</title>
  <metadata><x:cloud xmlns:x='y'>geheim11</x:cloud></metadata>
  <os><type>hvm</type><cmdline>root=x pw=geheim12</cmdline></os>
  <sysinfo type='smbios'><oemStrings><entry>geheim13</entry></oemStrings></sysinfo>
  <devices>
    <disk type='network'><source protocol='https' name='x' query='sig=geheim14'><cookies><cookie name='c'>geheim15</cookie></cookies></source>
      <auth username='geheim16'><secret type='ceph' uuid='` + vm2UUID + `'/></auth><serial>WD-SN77</serial><target dev='xvda' bus='xen'/></disk>
    <interface type='bridge'><mac address='00:16:3e:aa:bb:cc'/></interface>
    <graphics type='vnc' port='-1' listen='10.1.2.3' passwd='geheim17' keymap='de'/>
    <hostdev mode='subsystem' type='pci'><source><address domain='0x0000' bus='0x65' slot='0x00' function='0x0'/></source></hostdev>
    <!-- geheim18 -->
  </devices>
  <qemu:commandline><qemu:env name='A' value='geheim19'/></qemu:commandline>
</domain>
`

// xenHost answers commands as a host with three domains.
func xenHost(*testing.T) capture.Runner {
	return func(_ context.Context, argv ...string) ([]byte, error) {
		switch line := strings.Join(argv, " "); {
		case line == "xl info -n":
			return []byte("host                   : gpu7.example.org\nrelease                : 6.1.0-18-amd64\nxen_commandline        : console=com1 password=geheim20\n"), nil
		case line == "xl list":
			return []byte("Name           ID   Mem VCPUs      State   Time(s)\nDomain-0        0   800     1     r-----      12.3\npayroll         1   192     1     -b----      1.0\n"), nil
		case line == "xl dmesg":
			return []byte("(XEN) Xen version 4.17\n(XEN) payroll: serial=77SN\n"), nil
		case argv[0] == "dmesg":
			return []byte("[1.0] pci 0000:65:00.0: reset\n[2.0] eth0: 00:16:3e:aa:bb:cc geheim21\n[3.0] vfio: iscsi://admin:geheim22@gpu7/x from fe80::216:3eff:feaa:bbcc\n"), nil
		case strings.HasSuffix(line, "list --all --uuid"):
			return []byte(vmUUID + "\n" + vm2UUID + "\n" + vm3UUID + "\n../../etc/passwd\n\n"), nil
		case strings.HasSuffix(line, "dumpxml "+vmUUID):
			return []byte(vmXML), nil
		case strings.HasSuffix(line, "dumpxml "+vm2UUID):
			return []byte("<domain><description>geheim23"), nil
		case strings.HasSuffix(line, "dumpxml "+vm3UUID):
			return nil, errors.New("virsh: exit status 1: no domain; token=geheim24")
		case strings.HasSuffix(line, "nodedev-dumpxml pci_0000_65_00_0"):
			return []byte("<device><name>pci_0000_65_00_0</name></device>"), nil
		case argv[0] == "virsh" && strings.HasSuffix(line, "passwd"):
			return nil, errors.New("asked for a domain that libvirt did not name")
		case argv[0] == "virsh":
			return []byte("ok\n"), nil
		}
		return nil, fmt.Errorf("%s: %w", argv[0], exec.ErrNotFound)
	}
}

// everything is all that an archive says, unpacked.
func everything(t *testing.T, archive []byte) string {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	return string(must(io.ReadAll(z)))
}

func TestSecretsStayWhereTheyAre(t *testing.T) {
	root := host(t).FS()
	for _, redact := range []bool{false, true} {
		a, archive := take(t, root, capture.Options{
			Redact: redact, Run: xenHost(t),
			Extra: map[string][]byte{"hook.json": []byte("{\n  \"hostd\": \"1.2\",\n  \"apiKey\": \"geheim30\"\n}\n-----BEGIN PRIVATE KEY-----\ngeheim31\n-----END PRIVATE KEY-----\n")},
		})
		all := everything(t, archive)
		for at := strings.Index(all, "geheim"); at >= 0; at = strings.Index(all, "geheim") {
			t.Errorf("redact %v: %q", redact, all[max(0, at-60):min(len(all), at+20)])
			all = all[at+6:]
		}
		// And yet there is something left to look at.
		if !strings.Contains(string(a.Facts["dmesg.txt"]), "pci 0000:65:00.0: reset") || !strings.Contains(string(a.Facts["xl-info.txt"]), "console=com1") {
			t.Errorf("facts: %s, %s", a.Facts["dmesg.txt"], a.Facts["xl-info.txt"])
		}
		cmdline := string(must(a.Host().ReadFile("proc/cmdline")))
		if cmdline != "root=/dev/xvda console=hvc0 iommu.passthrough=1 rd.luks.key=REMOVED ds.token=REMOVED\n" {
			t.Errorf("cmdline %q", cmdline)
		}
		if yaml := string(must(a.Host().ReadFile("etc/gpuctl/hostd.yaml"))); !strings.Contains(yaml, "  name: h1\n") || !strings.HasPrefix(yaml, "version: 1\n") {
			t.Errorf("configuration %q", yaml)
		}
		if _, err := a.Host().Stat("etc/modprobe.d/vfio.conf"); err != nil {
			t.Error(err)
		}
	}
}

func TestDomainsKeepWhatMatters(t *testing.T) {
	a, _ := take(t, host(t).FS(), capture.Options{Run: xenHost(t)})
	xml := string(a.Facts["domain/"+vmUUID+".xml"])
	for _, part := range []string{
		"<name>payroll</name>", "<address domain='0x0000' bus='0x65' slot='0x00' function='0x0'/></source></hostdev>", `passwd="REMOVED" keymap="de"/>`,
		"<!-- auth removed --><serial>WD-SN77</serial>", "<!-- commandline removed -->", `query="REMOVED">`, "<type>hvm</type>",
	} {
		if !strings.Contains(xml, part) {
			t.Errorf("no %s in\n%s", part, xml)
		}
	}
	var broken, failed bool
	for _, f := range a.Manifest.Facts {
		broken = broken || f.Name == "domain/"+vm2UUID+".xml" && strings.Contains(f.Error, "left out")
		failed = failed || f.Name == "domain/"+vm3UUID+".xml" && strings.Contains(f.Error, "no domain")
		if strings.Contains(f.Name, "..") {
			t.Errorf("fact %q", f.Name)
		}
	}
	if !broken || !failed || a.Facts["domain/"+vm2UUID+".xml"] != nil {
		t.Errorf("facts %+v", a.Manifest.Facts)
	}
}

func TestRedaction(t *testing.T) {
	tree := host(t)
	tree.Write("sys/bus/pci/devices/0000:65:00.0/mdev_supported_types/nvidia-1/available_instances", "2\n")
	tree.Write("sys/bus/pci/devices/0000:65:00.0/mdev_supported_types/nvidia-1/name", vmUUID+"\n")
	a, archive := take(t, tree.FS(), capture.Options{Redact: true, Run: xenHost(t)})
	all := everything(t, archive)
	for _, who := range []string{"payroll", "gpu7", "example.org", vmUUID, vm2UUID, "00:16:3e:aa:bb:cc", "10.1.2.3", "fe80::216:3eff:feaa:bbcc", "77SN", "WD-SN77"} {
		if at := strings.Index(strings.ToLower(all), strings.ToLower(who)); at >= 0 {
			t.Errorf("%s: %q", who, all[max(0, at-60):min(len(all), at+40)])
		}
	}
	// The same is still the same.
	list, info := string(a.Facts["xl-list.txt"]), string(a.Facts["xl-info.txt"])
	if !strings.Contains(list, "domain-1 ") || !strings.Contains(info, "host-") || !strings.Contains(string(a.Facts["domain/00000000-0000-4000-8000-000000000001.xml"]), "<name>domain-1</name>") {
		t.Errorf("%s%s%v", list, info, a.Manifest.Facts)
	}
	// The machine is the same, but for serial numbers.
	want, got := must(pci.Scan(tree.FS())), must(pci.Scan(a.Host()))
	serial := false
	for _, c := range want {
		for _, d := range slices.Concat(c.Functions, c.VFs) {
			serial = serial || d.Config.Serial != 0
			d.Config.Serial = 0
		}
	}
	if d := cmp.Diff(want, got); d != "" || !serial {
		t.Errorf("had a serial number: %v\n%s", serial, d)
	}
}

// Libvirt hangs: it is asked once.
func TestWhoDoesNotAnswerIsNotAskedAgain(t *testing.T) {
	asked := map[string]int{}
	run := func(_ context.Context, argv ...string) ([]byte, error) {
		asked[argv[0]]++
		return nil, fmt.Errorf("%s: %w", argv[0], exec.ErrNotFound)
	}
	a, _ := take(t, host(t).FS(), capture.Options{Run: run})
	if asked["virsh"] != 1 || asked["xl"] != 1 || asked["dmesg"] != 1 || len(a.Facts) > 0 || len(a.Manifest.Facts) < 5 {
		t.Errorf("asked %v; facts %v", asked, a.Manifest.Facts)
	}
}

func TestCommands(t *testing.T) {
	if out, err := capture.Commands(t.Context(), "sh", "-c", "echo out; echo said >&2; echo $LC_ALL"); err != nil || string(out) != "out\nC\n" {
		t.Errorf("%q, %v", out, err)
	}
	if _, err := capture.Commands(t.Context(), "sh", "-c", "echo why >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "exit status 3: why") {
		t.Error(err)
	}
	if _, err := capture.Commands(t.Context(), "no-such-command-here"); !errors.Is(err, exec.ErrNotFound) {
		t.Error(err)
	}
	// What hangs is killed, with its children.
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	began := time.Now()
	if _, err := capture.Commands(ctx, "sh", "-c", "sleep 60 & sleep 60"); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > 10*time.Second {
		t.Errorf("%v after %v", err, time.Since(began))
	}
	if out, err := capture.Commands(t.Context(), "sh", "-c", "yes | head -c 9000000"); err != nil || len(out) != 4<<20 {
		t.Errorf("%d bytes, %v", len(out), err)
	}
}

// A file that can't be read, or is too long, is named, and keeps nothing else
// from being taken.
func TestWhatCannotBeReadIsNamed(t *testing.T) {
	tree := host(t)
	tree.Write("proc/iomem", strings.Repeat("x", 70<<10))
	a, _ := take(t, denied{tree.FS()}, capture.Options{})
	missing := strings.Join(a.Manifest.Missing, "\n")
	if !strings.Contains(missing, "proc/iomem: has more than 65536 bytes") || !strings.Contains(missing, "0000:65:00.0/config: only root can read it") {
		t.Errorf("missing: %s", missing)
	}
	if _, err := a.Host().Stat("sys/bus/pci/devices/0000:65:00.0/class"); err != nil {
		t.Error(err)
	}
}

type denied struct{ fs.FS }

func (d denied) Open(name string) (fs.File, error) {
	if strings.HasSuffix(name, "65:00.0/config") {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return d.FS.Open(name)
}
func (d denied) ReadLink(name string) (string, error)   { return fs.ReadLink(d.FS, name) }
func (d denied) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(d.FS, name) }

func TestCaptureEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := capture.Write(ctx, io.Discard, host(t).FS(), capture.Options{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

type item struct {
	name, link, data string
	kind             byte
}

const goodManifest = `{"format":1}`

func archive(t testing.TB, items ...item) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for _, i := range items {
		h := &tar.Header{Name: i.name, Linkname: i.link, Typeflag: i.kind, Size: int64(len(i.data)), Mode: 0o644}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
			if i.link != "" {
				h.Typeflag = tar.TypeSymlink
			}
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, i.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestHostileArchivesAreRefused(t *testing.T) {
	m := item{name: "manifest.json", data: goodManifest}
	for name, items := range map[string][]item{
		"empty":                     {},
		"no manifest":               {{name: "root/a", data: "x"}},
		"manifest not first":        {{name: "root/a", data: "x"}, m},
		"two manifests":             {m, m},
		"another format":            {{name: "manifest.json", data: `{"format":2}`}},
		"no JSON":                   {{name: "manifest.json", data: `{`}},
		"out of the root":           {m, {name: "root/../../etc/passwd", data: "x"}},
		"absolute":                  {m, {name: "/etc/passwd", data: "x"}},
		"dots":                      {m, {name: "root/./a", data: "x"}},
		"backslash":                 {m, {name: `root/a\b`, data: "x"}},
		"neither root nor fact":     {m, {name: "etc/passwd", data: "x"}},
		"link out of the root":      {m, {name: "root/a", link: "../b"}},
		"link far out":              {m, {name: "root/a/b", link: "../../../../etc/passwd"}},
		"absolute link":             {m, {name: "root/a", link: "/etc/passwd"}},
		"link among facts":          {m, {name: "facts/a", link: "b"}},
		"hard link":                 {m, {name: "root/a", link: "root/b", kind: tar.TypeLink}},
		"device":                    {m, {name: "root/a", kind: tar.TypeChar}},
		"FIFO":                      {m, {name: "root/a", kind: tar.TypeFifo}},
		"folder":                    {m, {name: "root/a/", kind: tar.TypeDir}},
		"file twice":                {m, {name: "root/a", data: "x"}, {name: "root/a", data: "y"}},
		"fact twice":                {m, {name: "facts/a", data: "x"}, {name: "facts/a", data: "y"}},
		"below a file":              {m, {name: "root/a", data: "x"}, {name: "root/a/b", data: "y"}},
		"below a link":              {m, {name: "root/a", link: "b"}, {name: "root/a/b", data: "y"}},
		"file in place of a folder": {m, {name: "root/a/b", data: "y"}, {name: "root/a", data: "x"}},
		"too deep":                  {m, {name: "root/" + strings.Repeat("a/", 70) + "b", data: "x"}},
		"long name":                 {m, {name: "root/" + strings.Repeat("a", 2000), data: "x"}},
		"large file":                {m, {name: "root/a", data: strings.Repeat("x", 5<<20)}},
		"large fact":                {m, {name: "facts/a", data: strings.Repeat("x", 5<<20)}},
	} {
		if a, err := capture.Open(bytes.NewReader(archive(t, items...))); !errors.Is(err, capture.ErrArchive) {
			t.Errorf("%s: %v, %v", name, a, err)
		}
	}
	for _, data := range []string{"", "PK\x03\x04", string(archive(t, m)[:20])} {
		if _, err := capture.Open(strings.NewReader(data)); !errors.Is(err, capture.ErrArchive) {
			t.Errorf("%q: %v", data, err)
		}
	}
}

// A few kilobytes that unpack to much more: gzip streams one after the other are
// one, and the same one serves for every file's contents.
func TestBombsAreRefused(t *testing.T) {
	const size = 4 << 20
	pack := func(data []byte) []byte {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, _ = z.Write(data)
		_ = z.Close()
		return b.Bytes()
	}
	header := func(name string, size int64) []byte {
		var b bytes.Buffer
		if err := tar.NewWriter(&b).WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Size: size, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	bomb := pack(append(header("manifest.json", int64(len(goodManifest))), append([]byte(goodManifest), make([]byte, 512-len(goodManifest))...)...))
	zeros := pack(make([]byte, size))
	for i := range 20 {
		bomb = append(append(bomb, pack(header(fmt.Sprintf("root/%d", i), size))...), zeros...)
	}
	if _, err := capture.Open(bytes.NewReader(bomb)); !errors.Is(err, capture.ErrArchive) || !strings.Contains(err.Error(), "unpacks to more") || len(bomb) > 200<<10 {
		t.Errorf("%d bytes: %v", len(bomb), err)
	}
}

func TestLinksStayInside(t *testing.T) {
	a, err := capture.Open(bytes.NewReader(archive(t,
		item{name: "manifest.json", data: goodManifest},
		item{name: "root/d/file", data: "x"}, item{name: "root/good", link: "d/../d/./file"}, item{name: "root/dir", link: "d"},
		item{name: "root/self", link: "self"}, item{name: "root/one", link: "two"}, item{name: "root/two", link: "one"},
		item{name: "root/d/up", link: ".."}, item{name: "root/escape", link: "d/up/up2"}, item{name: "root/up2", link: "d/up/d/up/d/file"},
		// Taken by its text it stays inside, through the link it would not.
		item{name: "root/a/b/out", link: "../../d/up/.."},
	)))
	if err != nil {
		t.Fatal(err)
	}
	h := a.Host()
	for name, want := range map[string]error{
		"good": nil, "dir/file": nil, "d/up/d/up/good": nil, "escape": nil, "up2": nil, "self": syscall.ELOOP, "one": syscall.ELOOP, "one/x": syscall.ELOOP,
		"a/b/out": fs.ErrNotExist, "a/b/out/d": fs.ErrNotExist, "nothing": fs.ErrNotExist, "d/file/x": syscall.ENOTDIR, "../x": fs.ErrInvalid, "/d": fs.ErrInvalid,
	} {
		if _, err := h.ReadFile(name); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	if _, err := h.ReadFile("d"); !errors.Is(err, syscall.EISDIR) {
		t.Error(err)
	}
	if target, err := h.ReadLink("dir"); target != "d" || err != nil {
		t.Errorf("%q, %v", target, err)
	}
	if _, err := h.ReadLink("d/file"); !errors.Is(err, fs.ErrInvalid) {
		t.Error(err)
	}
}

func FuzzOpen(f *testing.F) {
	var b bytes.Buffer
	root := fstest.MapFS{"proc/cmdline": &fstest.MapFile{Data: []byte("quiet\n")}, "sys/bus/pci/devices/0000:65:00.0": &fstest.MapFile{Data: []byte("../../../devices/pci0"), Mode: fs.ModeSymlink}}
	if _, err := capture.Write(context.Background(), &b, root, capture.Options{}); err != nil {
		f.Fatal(err)
	}
	f.Add(unpack(b.Bytes()))
	f.Add(unpack(archive(f, item{name: "manifest.json", data: goodManifest}, item{name: "root/a/b", link: "../c"}, item{name: "root/c", link: "a/b"})))
	f.Add([]byte("manifest.json"))
	// The fuzzer works on what is inside: it would never get past the checksum.
	f.Fuzz(func(t *testing.T, inside []byte) {
		var packed bytes.Buffer
		z := gzip.NewWriter(&packed)
		_, _ = z.Write(inside)
		_ = z.Close()
		a, err := capture.Open(&packed)
		if err != nil {
			if !errors.Is(err, capture.ErrArchive) {
				t.Fatal(err)
			}
			return
		}
		_ = fs.WalkDir(a.Host(), ".", func(name string, e fs.DirEntry, err error) error {
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			_, _ = a.Host().ReadFile(name) // ends
			return nil
		})
		if _, err := pci.Scan(a.Host()); err != nil && !errors.As(err, new(*fs.PathError)) {
			t.Fatal(err)
		}
		if _, err := json.Marshal(a.Manifest); err != nil {
			t.Fatal(err)
		}
	})
}

func unpack(data []byte) []byte {
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		panic(err)
	}
	return must(io.ReadAll(z))
}

// Writing to a full disk fails, and says so.
func TestWriteErrors(t *testing.T) {
	full, err := os.OpenFile(filepath.Join("/dev", "full"), os.O_WRONLY, 0)
	if err != nil {
		t.Skip("no /dev/full here")
	}
	defer full.Close()
	if _, err := capture.Write(t.Context(), full, host(t).FS(), capture.Options{}); !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
}
