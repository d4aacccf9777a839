package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/lab/guestinit/wire"
)

// device makes a PCI device whose BAR 0 is a file of two pages.
func device(t *testing.T) *server {
	t.Helper()
	root := t.TempDir()
	dir := filepath.Join(root, "0000:00:05.0")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	bar := make([]byte, 2*os.Getpagesize())
	binary.LittleEndian.PutUint32(bar[os.Getpagesize()+8:], 0x010000ed)
	for name, text := range map[string]string{
		"vendor": "0x1234\n", "device": "0x11e8\n", "class": "0x00ff00\n", "enable": "0\n",
		"resource":  "0x00000000fe800000 0x00000000fe801fff 0x0000000000040200\n" + strings.Repeat("0x0 0x0 0x0\n", 12),
		"resource0": string(bar),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return &server{pci: root}
}

func TestDevices(t *testing.T) {
	s := device(t)
	// One that goes away while it is listed.
	if err := os.Mkdir(filepath.Join(s.pci, "0000:00:06.0"), 0o755); err != nil {
		t.Fatal(err)
	}
	a := s.handle(context.Background(), &wire.Request{Op: wire.List})
	if a.Error != "" || len(a.Devices) != 1 {
		t.Fatalf("%+v", a)
	}
	d := a.Devices[0]
	if d.ID != "1234:11e8" || d.Class != "00ff00" || d.Driver != "" || len(d.BARs) != 6 || d.BARs[0] != 0x2000 || d.BARs[1] != 0 {
		t.Errorf("%+v", d)
	}
}

func TestRegister(t *testing.T) {
	s := device(t)
	at := int64(os.Getpagesize() + 8)
	read := func(offset int64, width int) uint64 {
		t.Helper()
		a := s.handle(context.Background(), &wire.Request{Op: wire.Read, Device: "0000:00:05.0", Offset: offset, Width: width})
		if a.Error != "" {
			t.Fatal(a.Error)
		}
		return a.Value
	}
	for width, want := range map[int]uint64{1: 0xed, 2: 0x00ed, 4: 0x010000ed, 8: 0x010000ed} {
		if got := read(at, width); got != want {
			t.Errorf("%d bytes: %#x, want %#x", width, got, want)
		}
	}
	for _, width := range []int{1, 2, 4, 8} {
		v := uint64(0x1122334455667788) & (1<<(8*width-1)<<1 - 1)
		if a := s.handle(context.Background(), &wire.Request{Op: wire.Write, Device: "0000:00:05.0", Offset: 16, Width: width, Value: v}); a.Error != "" {
			t.Fatal(a.Error)
		}
		if got := read(16, width); got != v {
			t.Errorf("%d bytes: wrote %#x, read %#x", width, v, got)
		}
	}
	if b, err := os.ReadFile(filepath.Join(s.pci, "0000:00:05.0", "enable")); err != nil || !strings.HasPrefix(string(b), "1") {
		t.Errorf("the device was not enabled: %q %v", b, err)
	}
}

func TestNoSuchRegister(t *testing.T) {
	s := device(t)
	for name, q := range map[string]wire.Request{
		"width":          {Device: "0000:00:05.0", Width: 3},
		"no width":       {Device: "0000:00:05.0"},
		"unaligned":      {Device: "0000:00:05.0", Offset: 2, Width: 4},
		"negative":       {Device: "0000:00:05.0", Offset: -4, Width: 4},
		"past the end":   {Device: "0000:00:05.0", Offset: int64(2 * os.Getpagesize()), Width: 4},
		"absent BAR":     {Device: "0000:00:05.0", BAR: 1, Width: 4},
		"BAR":            {Device: "0000:00:05.0", BAR: 6, Width: 4},
		"absent device":  {Device: "0000:00:07.0", Width: 4},
		"path":           {Device: "../0000:00:05.0", Width: 4},
		"no device":      {Width: 4},
		"largest offset": {Device: "0000:00:05.0", Offset: 1<<63 - 8, Width: 8},
	} {
		q.Op = wire.Read
		if a := s.handle(context.Background(), &q); a.Error == "" {
			t.Errorf("%s: read %#x", name, a.Value)
		}
	}
}

func TestExec(t *testing.T) {
	s := newServer()
	a := s.handle(context.Background(), &wire.Request{Op: wire.Exec, Argv: []string{"/bin/sh", "-c", "cat; echo no >&2; exit 3"}, Input: []byte("yes")})
	if a.Error != "" || a.Exit != 3 || string(a.Output) != "yes" || string(a.Errors) != "no\n" {
		t.Errorf("%+v", a)
	}
	a = s.handle(context.Background(), &wire.Request{Op: wire.Exec, Argv: []string{"/bin/sleep", "60"}, TimeoutSeconds: 1})
	if a.Error != "" || a.Exit != -1 {
		t.Errorf("a program that takes too long: %+v", a)
	}
	for _, argv := range [][]string{nil, {"/no/such/program"}} {
		if a := s.handle(context.Background(), &wire.Request{Op: wire.Exec, Argv: argv}); a.Error == "" {
			t.Errorf("%q ran", argv)
		}
	}
	a = s.handle(context.Background(), &wire.Request{Op: wire.Exec, Argv: []string{"/bin/sh", "-c", "head -c 1000000 /dev/zero"}})
	if a.Error != "" || a.Exit != 0 || len(a.Output) != maxOutput {
		t.Errorf("a million bytes: %d, %s", len(a.Output), a.Error)
	}
}

// xenstored answers from a tree, in the form of the real one.
type xenstored struct {
	tree map[string]string // path → value, or names with NULs for directories
	out  bytes.Buffer
}

func (x *xenstored) Read(p []byte) (int, error) { return x.out.Read(p) }

func (x *xenstored) Write(p []byte) (int, error) {
	kind, id := binary.LittleEndian.Uint32(p), binary.LittleEndian.Uint32(p[4:])
	path := strings.TrimRight(string(p[16:]), "\x00")
	body, ok := x.tree[path]
	if !ok {
		kind, body = xsError, "ENOENT\x00"
	}
	for _, v := range []uint32{kind, id, 0, uint32(len(body))} {
		x.out.Write(binary.LittleEndian.AppendUint32(nil, v))
	}
	x.out.WriteString(body)
	return len(p), nil
}

func TestChannel(t *testing.T) {
	x := &xenstore{rw: &xenstored{tree: map[string]string{
		"device/console":        "1\x002\x00x\x00",
		"device/console/1/name": "other",
		"device/console/2/name": "lab",
	}}}
	if got, err := x.channel("lab"); err != nil || got != "hvc2" {
		t.Errorf("%q %v", got, err)
	}
	if got, err := x.channel("absent"); err == nil {
		t.Errorf("found %q", got)
	}
	x = &xenstore{rw: &xenstored{}}
	if got, err := x.channel("lab"); err == nil || !strings.Contains(err.Error(), "ENOENT") {
		t.Errorf("without consoles: %q %v", got, err)
	}
}

func FuzzXenstore(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 'l', 'a', 'b'})
	f.Add([]byte{16, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, in []byte) {
		x := &xenstore{rw: struct {
			*bytes.Reader
			discard
		}{bytes.NewReader(in), discard{}}}
		if s, err := x.get(xsRead, "a"); err == nil && len(s) > xsMax {
			t.Errorf("%d bytes", len(s))
		}
	})
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
