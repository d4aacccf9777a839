package endpoint

import (
	"compress/gzip"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/guest/vm/channel/channeltest"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// guestAgent is a VM's agent.
type guestAgent struct {
	gpuctlv1connect.UnimplementedAgentServiceHandler

	console *channeltest.Console
	devices []*gpuctlv1.GuestDevice
}

func (v *guestAgent) Channel(context.Context, string) (string, error) { return v.console.Socket(), nil }

func (v *guestAgent) Hello(context.Context, *connect.Request[gpuctlv1.HelloRequest]) (*connect.Response[gpuctlv1.HelloResponse], error) {
	return connect.NewResponse(&gpuctlv1.HelloResponse{Devices: v.devices}), nil
}

// A VM's agent tells of GPUs alone. What it does not mention has left the VM
// only if it would have been mentioned.
func TestGuestHas(t *testing.T) {
	v := &guestAgent{console: channeltest.New(t), devices: []*gpuctlv1.GuestDevice{
		{Address: "0000:00:05.0", VendorId: 0x10de, DeviceId: 0x2330},
		{Address: "0000:00:06.0", VendorId: 0x1002, DeviceId: 1},
		{Address: "0000:00:07.0", VendorId: 0x1002, DeviceId: 1},
	}}
	root := t.TempDir()
	v.console.Root(root, channel.Name)
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error)
	go func() {
		_, handler := gpuctlv1connect.NewAgentServiceHandler(v)
		over <- channel.Serve(ctx, channel.Port{Root: root}.Open, handler)
	}()
	defer func() {
		cancel()
		if err := <-over; err != nil {
			t.Error(err)
		}
	}()

	const display, sound, nvme = 0x030200, 0x040300, 0x010802
	devices := []*pci.Device{
		{VendorID: 0x10de, DeviceID: 0x2330, Class: display},
		{VendorID: 0x10de, DeviceID: 0x22bb, Class: sound},
		{VendorID: 0x8086, DeviceID: 0x56c0, Class: display},
		{VendorID: 0x1b36, DeviceID: 0x0010, Class: nvme, Named: true},
		{VendorID: 0x1002, DeviceID: 1, Class: display},
	}
	for i, d := range devices {
		d.Address = pci.Address{Bus: 1, Device: uint8(i)}
	}
	g := NewGuests(GuestsConfig{Channels: v, Cards: func() ([]*pci.Card, error) { return []*pci.Card{{Functions: devices}}, nil }, Log: slog.New(slog.DiscardHandler)})
	defer func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}()
	for i, want := range []struct {
		name string
		has  bool
		err  bool
	}{
		{"a GPU that is there", true, false},
		{"the sound of a card", false, true},
		{"a GPU that is not there", false, false},
		{"a GPU by its id alone, for which the VM has no profile", false, true},
		{"one of two alike", false, true},
		{"a function that the host has not got", false, true},
	} {
		has, err := g.Has(t.Context(), "vm", pci.Address{Bus: 1, Device: uint8(i)})
		if has != want.has || (err != nil) != want.err {
			t.Errorf("%s: %v, %v", want.name, has, err)
		}
	}
}

// A guest's answer that is compressed all the same is not unpacked: a few of its
// bytes could be gigabytes.
func TestNothingCompressedIsTakenFromAGuest(t *testing.T) {
	v := &guestAgent{console: channeltest.New(t)}
	root := t.TempDir()
	v.console.Root(root, channel.Name)
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error)
	asked := make(chan string, 16)
	go func() {
		over <- channel.Serve(ctx, channel.Port{Root: root}.Open, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked <- r.Header.Get("Accept-Encoding")
			w.Header().Set("Content-Type", "application/proto")
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			data, _ := proto.Marshal(&gpuctlv1.HelloResponse{Version: "unpacked"})
			_, _ = z.Write(data)
			_ = z.Close()
		}))
	}()
	g := NewGuests(GuestsConfig{Channels: v, Cards: func() ([]*pci.Card, error) { return nil, nil }, Log: slog.New(slog.DiscardHandler)})
	defer func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		cancel()
		if err := <-over; err != nil {
			t.Error(err)
		}
	}()
	if hello, err := g.Hello(t.Context(), "vm"); err == nil {
		t.Errorf("it was unpacked: %v", hello)
	}
	if s := <-asked; strings.Contains(s, "gzip") {
		t.Errorf("compression is asked for: %q", s)
	}
}

// The folder of VMs' sockets is written to by the VMs' processes: nothing is made
// there, nor through a link that one of them has put there.
func TestNothingIsMadeWhereAVMsSocketLies(t *testing.T) {
	sockets, target, locks := t.TempDir(), t.TempDir(), t.TempDir()
	if err := os.Symlink(target, filepath.Join(sockets, "target")); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{filepath.Join(sockets, "x.sock"), filepath.Join(sockets, "target", "x.sock"), filepath.Join(sockets, "target", "sub", "x.sock")} {
		g := NewGuests(GuestsConfig{Channels: socketAt(path), Locks: locks, Log: slog.New(slog.DiscardHandler)})
		if _, err := g.get(t.Context(), "vm"); err != nil {
			t.Fatal(err)
		}
		other := NewGuests(GuestsConfig{Channels: socketAt(path), Locks: locks, Log: slog.New(slog.DiscardHandler)})
		if _, err := other.get(t.Context(), "vm"); !errors.Is(err, channel.ErrBusy) {
			t.Errorf("two have the channel %s: %v", path, err)
		}
		for dir, want := range map[string]int{sockets: 1, target: 0, locks: 1} {
			if found, err := os.ReadDir(dir); err != nil || len(found) != want {
				t.Errorf("%s: in %s are %v, %v", path, dir, found, err)
			}
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
}

type socketAt string

func (s socketAt) Channel(context.Context, string) (string, error) { return string(s), nil }
