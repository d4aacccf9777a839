package replay_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/internal/capture"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/test/replay"
)

func take(t testing.TB, root fs.FS) *capture.Archive {
	t.Helper()
	var b bytes.Buffer
	if _, err := capture.Write(context.Background(), &b, root, capture.Options{}); err != nil {
		t.Fatal(err)
	}
	a, err := capture.Open(&b)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// A captured dom0 comes alive: it looks the same, and its kernel keeps its rules.
func TestMachine(t *testing.T) {
	tree := pcitest.New(t).Add(pcitest.Port("0000:64:00.0", "", -1, pci.PortRoot, pcitest.FullACS()))
	tree.Add(pcitest.NVIDIACard("0000:65:00", "0000:64:00.0", -1, 1)...)
	tree.Add(pcitest.Port("0000:80:00.0", "", -1, pci.PortRoot, nil))
	tree.Add(pcitest.SRIOVAccelerator("0000:81", "0000:80:00.0", -1, 0, 16, 3)...)
	tree.Write("proc/cmdline", "quiet\n")
	tree.Write("sys/bus/pci/drivers/pciback/slots", "")
	m, err := replay.Machine(take(t, tree.FS()))
	if err != nil {
		t.Fatal(err)
	}
	want, err := pci.Scan(tree.FS())
	if err != nil {
		t.Fatal(err)
	}
	got, err := pci.Scan(m)
	if d := cmp.Diff(want, got); d != "" || err != nil || len(want) != 2 {
		t.Errorf("%d cards, %v\n%s", len(want), err, d)
	}
	if line, err := m.ReadFile("proc/cmdline"); err != nil || string(line) != "quiet\n" {
		t.Errorf("%q, %v", line, err)
	}
	const gpu = "0000:65:00.0"
	at, err := pci.ParseAddress(gpu)
	if err != nil {
		t.Fatal(err)
	}
	native := m.Driver(at)
	write := func(name, data string) error { return m.Write(t.Context(), "sys/bus/pci/"+name, data) }
	if err := write("drivers/pciback/unbind", gpu); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("unbinding from who has it not: %v", err)
	}
	for _, s := range [][2]string{{"devices/" + gpu + "/driver_override", "pciback"}, {"drivers/" + native + "/unbind", gpu}, {"drivers_probe", gpu}} {
		if err := write(s[0], s[1]); err != nil {
			t.Fatalf("%s: %v", s[0], err)
		}
	}
	if d := m.Driver(at); d != "pciback" || native == "" {
		t.Errorf("%s went from %q to %q", gpu, native, d)
	}
	if v := m.Violations(); len(v) > 0 {
		t.Error(v)
	}
}

func TestThisMachine(t *testing.T) {
	root := os.DirFS("/")
	m, err := replay.Machine(take(t, root))
	if err != nil {
		t.Fatal(err)
	}
	entries, _ := fs.ReadDir(root, "sys/bus/pci/devices")
	for _, e := range entries {
		for _, name := range []string{"vendor", "device", "class", "config", "numa_node"} {
			path := "sys/bus/pci/devices/" + e.Name() + "/" + name
			want, err := fs.ReadFile(root, path)
			if err != nil {
				continue
			}
			if got, err := fs.ReadFile(m, path); err != nil || !bytes.Equal(want, got) {
				t.Errorf("%s: %q, want %q (%v)", path, got, want, err)
			}
		}
	}
}

// What is no machine is an error, not a panic.
func TestNonsense(t *testing.T) {
	type files map[string]string // a value that begins with → is a link
	const dir = "sys/bus/pci/devices/"
	for name, c := range map[string]files{
		"no vendor":      {dir + "0000:65:00.0": "→../../../devices/pci0/0000:65:00.0", "sys/devices/pci0/0000:65:00.0/class": "0x030000"},
		"no tree":        {dir + "0000:65:00.0/vendor": "0x10de"},
		"parent missing": {dir + "0000:65:00.0": "→../../../devices/0000:64:00.0/0000:65:00.0", "sys/devices/0000:64:00.0/0000:65:00.0/vendor": "0x10de"},
		"its own VF": {
			dir + "0000:65:00.0": "→../../../devices/pci0/0000:65:00.0", "sys/devices/pci0/0000:65:00.0/vendor": "0x10de", "sys/devices/pci0/0000:65:00.0/physfn": "→../0000:65:00.0",
		},
	} {
		if m, err := replay.Machine(archive(t, c)); !errors.Is(err, replay.ErrMachine) {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
}

func archive(t testing.TB, files map[string]string) *capture.Archive {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	put := func(name, content string) {
		h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Size: int64(len(content)), Mode: 0o644}
		if len(content) > 3 && content[:3] == "→" {
			h.Typeflag, h.Linkname, h.Size, content = tar.TypeSymlink, content[3:], 0, ""
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	put("manifest.json", `{"format":1}`)
	for name, content := range files {
		put("root/"+name, content)
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	a, err := capture.Open(&b)
	if err != nil {
		t.Fatal(err)
	}
	return a
}
