package mediated

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/server"
	"github.com/gpuctl/gpuctl/mmio/xen/xentest"
)

var errKilled = errors.New("hostd was killed")

// host is a host with a real process of a mediated GPU on a hypervisor of tests.
type host struct {
	t       *testing.T
	name    string
	xen     *xentest.Hypervisor
	client  server.Client
	dir     string
	file    string
	end     func() // the process of the GPU; its parts are left
	domains map[string]Domain
	ended   map[string]bool // migration: whether the VM belongs here
	k       *Keeper
	events  []string

	vm            *truth
	mu            sync.Mutex // of what follows; contents are read and written at once
	calls, killAt int        // of the process's
	after         bool       // it is killed when the call has been done
	killed        bool
}

// truth is what nobody but the VM knows. The hosts' processes fail the test where it is ignored.
type truth struct {
	astray bool // it has run without its part, and written there: no contents are its own
}

var model = server.Model{Memory: 8 << 20, Parts: 2, Policy: timeshare.Fair}

var web = vm.VM{UUID: "uuid-web", Name: "web"}

func newHost(t *testing.T, name string) *host {
	t.Helper()
	dir, err := os.MkdirTemp("", "mmio") // short, as a socket's path is limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	h := &host{
		t: t, name: name, dir: dir, xen: xentest.New(t), client: server.Client{Socket: server.Socket(dir, "soft0")},
		file: filepath.Join(dir, "mediated.json"), domains: map[string]Domain{}, ended: map[string]bool{},
	}
	h.begin()
	t.Cleanup(func() {
		all, _ := h.client.List(context.Background())
		for _, p := range all {
			if err := h.client.Detach(context.Background(), p.ID); err != nil {
				t.Error(err)
			}
		}
		h.end()
	})
	h.restart()
	return h
}

// begin starts the process of the GPU.
func (h *host) begin() {
	h.t.Helper()
	gpu, err := server.NewGPU(model, func(e mediate.Event) {
		if e.Name == "hardware" {
			h.t.Error(e)
		}
	})
	if err != nil {
		h.t.Fatal(err)
	}
	s := &server.Server{Dir: h.dir, Name: "soft0", Model: model, GPU: gpu, Xen: h.xen.Process(), Log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(context.Background())
	ready, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		_ = s.Run(ctx, func() { close(ready) })
	}()
	<-ready
	h.end = func() {
		cancel()
		<-over
	}
}

// dies ends the process of the GPU. The next one knows nothing of its contents.
func (h *host) dies() {
	h.t.Helper()
	h.end()
	h.begin()
}

func (h *host) restart() {
	h.t.Helper()
	h.killed, h.killAt = false, 0
	k, err := New(Config{
		GPUs: []GPU{{"soft0", model}}, File: h.file, Domains: h, VMs: h, Cluster: h, Log: slog.New(slog.DiscardHandler),
		Process: func(context.Context, string) (Process, error) { return h, nil },
		Event:   func(_, kind, message string) { h.events = append(h.events, kind+": "+message) },
		Over: func(_ context.Context, id string) (over, here bool) {
			here, over = h.ended[id]
			return over, here
		},
	})
	if err != nil {
		h.t.Fatal(err)
	}
	h.k = k
}

func (h *host) Of(context.Context) (map[string]Domain, error) { return maps.Clone(h.domains), nil }
func (h *host) HostName() string                              { return h.name }
func (h *host) Settle(context.Context)                        {}
func (h *host) Kick()                                         {}

func (h *host) Find(context.Context, string) (vm.Info, error) {
	return vm.Info{VM: web, State: "shutoff", Type: "hvm"}, nil
}

func (h *host) Claim(context.Context, *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error) {
	return &clusterv1.CreateClaimResponse{Assignments: []*clusterv1.Assignment{{Gpu: h.name + "/soft0"}}}, nil
}

// call does a call of the process, unless hostd is killed before.
func (h *host) call(do func() error) error {
	h.mu.Lock()
	h.calls++
	last := h.calls == h.killAt
	h.killed = h.killed || last && !h.after
	dead := h.killed
	h.mu.Unlock()
	if dead {
		return errKilled
	}
	err := do()
	if last {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.killed = true
		return errKilled
	}
	return err
}

func (h *host) Attach(ctx context.Context, p server.Part) error {
	p.Guest = 16 << 12
	if d := h.domains[web.UUID]; p.Await && (d.ID != p.Domain || d.Ran) {
		h.t.Errorf("%s: domain %d gets a part that awaits contents, and %+v is the VM's", h.name, p.Domain, d)
	}
	return h.call(func() error { return h.client.Attach(ctx, p) })
}

func (h *host) Detach(ctx context.Context, id string) error {
	return h.call(func() error { return h.client.Detach(ctx, id) })
}

func (h *host) List(ctx context.Context) (out []server.Status, err error) {
	err = h.call(func() (err error) { out, err = h.client.List(ctx); return err })
	return out, err
}

func (h *host) Park(ctx context.Context, id string) (config []byte, err error) {
	err = h.call(func() (err error) { config, err = h.client.Park(ctx, id); return err })
	return config, err
}

func (h *host) Save(ctx context.Context, id string, w io.Writer) error {
	return h.call(func() error { return h.client.Save(ctx, id, w) })
}

func (h *host) Restore(ctx context.Context, id string, from io.Reader) error {
	return h.call(func() error { return h.client.Restore(ctx, id, from) })
}

func (h *host) Give(ctx context.Context, id, seal string) error {
	return h.call(func() error { return h.client.Give(ctx, id, seal) })
}

func (h *host) Resume(ctx context.Context, id string) error {
	return h.call(func() error {
		err := h.client.Resume(ctx, id)
		if err == nil && h.vm != nil && h.vm.astray {
			h.t.Errorf("%s: part %s goes on with contents that the VM has gone past", h.name, id)
		}
		return err
	})
}

// far is another host as a source.
type far struct{ of *host }

func (f far) Contents(ctx context.Context, slot uint8, w io.Writer) error {
	return f.of.k.Contents(ctx, web, "m-1", uint32(slot), w)
}

func (f far) Give(ctx context.Context, slot uint8, seal string) error {
	return f.of.k.GivePart(ctx, web, "m-1", uint32(slot), seal)
}

var bars = [6]uint64{0xf0000000, 0xe0000000, 0, 0xd8000000, 0, 0xfe000000}

// arrives has the VM's domain on the host. It runs when libvirt's hook says that it may; while hostd
// is dead, the hook says no.
func (h *host) arrives(id uint16) *xentest.Domain {
	h.t.Helper()
	d := h.xen.Domain(id, 1, 16)
	h.arrivesAgain(id)
	return d
}

func (h *host) arrivesAgain(id uint16) {
	h.t.Helper()
	h.domains[web.UUID] = Domain{ID: id, Paused: true, HVM: true}
	if err := h.k.Reconcile(h.t.Context()); err != nil && !h.killed {
		h.t.Error(err)
	}
	if err := h.k.Arrived(h.t.Context(), web); err == nil && !h.killed {
		h.runs(id)
	} else if !h.killed {
		h.t.Error(err)
	}
}

// runs lets the VM's domain run. Without its part there, it goes astray.
func (h *host) runs(id uint16) {
	h.t.Helper()
	all, err := h.client.List(h.t.Context())
	if err != nil {
		h.t.Fatal(err)
	}
	has := false
	for _, p := range all {
		has = has || p.Domain == id && p.Lost == ""
	}
	if h.vm != nil && !has {
		h.vm.astray = true
	}
	h.domains[web.UUID] = Domain{ID: id, HVM: true, Ran: true}
}

// parks parks what the VM has here, and has another host expect it.
func (h *host) parks(t *testing.T, to *host) []*gpuctlv1.SitePart {
	t.Helper()
	parts, err := h.k.ParkParts(t.Context(), web, "m-1")
	if err == nil {
		err = to.k.ExpectParts(t.Context(), web, "m-1", parts)
	}
	if err != nil {
		t.Fatal(err)
	}
	return parts
}

func (h *host) leaves() { delete(h.domains, web.UUID) }

// served is whether the VM's part works here.
func (h *host) served() bool {
	all, err := h.client.List(context.Background())
	if err != nil {
		h.t.Fatal(err)
	}
	for _, p := range all {
		if p.State == server.Served && p.Lost == "" {
			return true
		}
	}
	return false
}

func (h *host) parts() int {
	all, _ := h.client.List(context.Background())
	return len(all)
}

// pair is two hosts, with a VM on the first that has written a number into its part.
func pair(t *testing.T, number uint64) (home, away *host, d *xentest.Domain) {
	t.Helper()
	home, away = newHost(t, "h1"), newHost(t, "h2")
	home.vm = &truth{}
	away.vm = home.vm
	r := &gpuctlv1.AttachRequest{Machine: "web", Gpu: "soft0", Weight: 3}
	if err := home.k.Attach(t.Context(), r, func(*gpuctlv1.DeviceUpdate) {}); err != nil {
		t.Fatal(err)
	}
	d = home.arrives(7)
	for i, b := range bars {
		if b != 0 {
			d.SetConfig(0, lastSlot, 0x10+4*i, 4, b)
		}
	}
	d.SetConfig(0, lastSlot, 4, 2, 6)
	poke(d, number)
	return home, away, d
}

func poke(d *xentest.Domain, w uint64) {
	d.Store(0, bars[0]+0x1700, 4, 0x30)
	d.Store(0, bars[0]+0x700100, 8, w)
}

func peek(d *xentest.Domain) uint64 { return d.Load(0, bars[0]+0x700100, 8) }

// again repeats a step of a migration until it succeeds, with a new hostd where one was killed.
func again(t *testing.T, hosts []*host, step func() error) {
	t.Helper()
	var err error
	for range 4 {
		if err = step(); err == nil {
			return
		}
		for _, h := range hosts {
			if h.killed {
				h.restart()
			}
		}
	}
	t.Fatal(err)
}

// moves moves the VM's part from one host to the other, as the steps of a migration do.
func moves(t *testing.T, from, to *host, domain uint16) *xentest.Domain {
	t.Helper()
	both := []*host{from, to}
	again(t, both, func() error {
		parts, err := from.k.ParkParts(t.Context(), web, "m-1")
		if err != nil {
			return err
		}
		return to.k.ExpectParts(t.Context(), web, "m-1", parts)
	})
	if from.served() {
		t.Error("the VM leaves while its part works")
	}
	d := to.arrives(domain)
	if to.killed { // the domain is paused until the next hostd has answered its hook
		to.restart()
		to.arrivesAgain(domain)
	}
	from.leaves()
	again(t, both, func() error { return to.k.TakeParts(t.Context(), web, "m-1", far{from}) })
	if from.served() || !to.served() {
		t.Errorf("served on %s: %v, on %s: %v", from.name, from.served(), to.name, to.served())
	}
	return d
}

func TestPartGoesWithItsVM(t *testing.T) {
	home, away, _ := pair(t, 5)
	d := moves(t, home, away, 9)
	if v := peek(d); v != 5 {
		t.Errorf("at the destination: %#x", v)
	}
	if err := home.k.DropParts(t.Context(), web, "m-1"); err != nil {
		t.Fatal(err)
	}
	if home.parts() != 0 || len(home.k.Held()) != 0 || len(away.k.Held()) != 1 {
		t.Errorf("%d parts at home, claims %v and %v", home.parts(), home.k.Held(), away.k.Held())
	}
	away.ended["m-1"] = true
	if err := away.k.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := away.k.of(func(*assignment) bool { return true })[0]; a.moving() || a.Phase != attached || a.Weight != 3 {
		t.Errorf("afterwards %+v", a)
	}
	away.leaves() // the VM is shut down, and started again
	if err := away.k.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if away.arrives(10); !away.served() {
		t.Error("the next start has no part")
	}
}

// TestPartComesHome: with what the VM has done at the destination, or without ever having been
// taken there.
func TestPartComesHome(t *testing.T) {
	t.Run("taken", func(t *testing.T) {
		home, away, _ := pair(t, 5)
		d := moves(t, home, away, 9)
		poke(d, 6)
		d = moves(t, away, home, 8)
		if v := peek(d); v != 6 {
			t.Errorf("at home: %#x", v)
		}
		if err := away.k.DropParts(t.Context(), web, "m-1"); err != nil || away.parts() != 0 || home.parts() != 1 {
			t.Errorf("%v, %d and %d parts", err, home.parts(), away.parts())
		}
	})
	t.Run("not taken", func(t *testing.T) {
		home, away, _ := pair(t, 5)
		home.parks(t, away)
		away.arrives(9)
		home.leaves()
		d := moves(t, away, home, 8)
		if v := peek(d); v != 5 || home.parts() != 1 {
			t.Errorf("at home: %#x, %d parts", v, home.parts())
		}
	})
	t.Run("never left", func(t *testing.T) {
		home, away, d := pair(t, 5)
		for range 2 {
			if _, err := home.k.ParkParts(t.Context(), web, "m-1"); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 {
			if err := home.k.TakeParts(t.Context(), web, "m-1", far{away}); err != nil {
				t.Fatal(err)
			}
		}
		if v := peek(d); v != 5 || !home.served() {
			t.Errorf("%#x", v)
		}
	})
}

// TestHostdIsKilledWhilePartsMove, before or after each thing that it asks of the GPU's process, on
// either host, there and back.
func TestHostdIsKilledWhilePartsMove(t *testing.T) {
	for _, which := range []string{"h1", "h2"} {
		for _, after := range []bool{false, true} {
			for at := 1; ; at++ {
				home, away, _ := pair(t, 5)
				one := map[string]*host{"h1": home, "h2": away}[which]
				one.calls, one.killAt, one.after = 0, at, after
				d := moves(t, home, away, 9)
				if v := peek(d); v != 5 {
					t.Errorf("at the destination: %#x", v)
				}
				poke(d, 6)
				d = moves(t, away, home, 8)
				if v := peek(d); v != 6 {
					t.Errorf("at home: %#x", v)
				}
				again(t, []*host{away}, func() error { return away.k.DropParts(t.Context(), web, "m-1") })
				if home.parts() != 1 || away.parts() != 0 {
					t.Errorf("%d and %d parts", home.parts(), away.parts())
				}
				if t.Failed() {
					t.Fatalf("%s killed at call %d, after it: %v", which, at, after)
				}
				if one.calls < at {
					break
				}
			}
		}
	}
}

// TestMigrationThatEndsWithoutAWord: each host does by itself what is left.
func TestMigrationThatEndsWithoutAWord(t *testing.T) {
	start := func(t *testing.T) (home, away *host, d *xentest.Domain) {
		home, away, d = pair(t, 5)
		home.parks(t, away)
		return home, away, d
	}
	ends := func(t *testing.T, home, away *host, here string) {
		t.Helper()
		for _, h := range []*host{home, away} {
			h.ended["m-1"] = h.name == here
			if err := h.k.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Run("rolled back", func(t *testing.T) {
		home, away, d := start(t)
		ends(t, home, away, "h1")
		if v := peek(d); v != 5 || !home.served() || len(away.k.Held()) != 0 || away.parts() != 0 {
			t.Errorf("%#x, served %v, claims %v", v, home.served(), away.k.Held())
		}
	})
	t.Run("done", func(t *testing.T) {
		home, away, _ := pair(t, 5)
		moves(t, home, away, 9)
		ends(t, home, away, "h2")
		if !away.served() || len(home.k.Held()) != 0 || home.parts() != 0 {
			t.Errorf("served %v, %d parts and claims %v at home", away.served(), home.parts(), home.k.Held())
		}
	})
	t.Run("the contents never came", func(t *testing.T) {
		home, away, _ := start(t)
		d := away.arrives(9)
		home.leaves()
		got := make(chan uint64)
		go func() { got <- peek(d) }() // it waits, and is told
		ends(t, home, away, "h2")
		if v := <-got; v != ^uint64(0) {
			t.Errorf("read %#x", v)
		}
		if !saidIn(away.events, "PartLost") || len(home.k.Held()) != 0 || len(away.k.Held()) != 1 {
			t.Errorf("events %v, claims %v and %v", away.events, home.k.Held(), away.k.Held())
		}
	})
}

func saidIn(events []string, kind string) bool {
	for _, e := range events {
		if len(e) > len(kind) && e[:len(kind)+1] == kind+":" {
			return true
		}
	}
	return false
}

// TestWhatAPartsHostRefuses while a VM moves.
func TestWhatAPartsHostRefuses(t *testing.T) {
	home, away, _ := pair(t, 5)
	parts, err := home.k.ParkParts(t.Context(), web, "m-1")
	if err != nil {
		t.Fatal(err)
	}
	busy := map[string]error{
		"contents of a VM that is here": home.k.Contents(t.Context(), web, "m-1", lastSlot, io.Discard),
		"a part of a VM that is here":   home.k.GivePart(t.Context(), web, "m-1", lastSlot, ""),
		"to drop it":                    home.k.DropParts(t.Context(), web, "m-1"),
	}
	_, busy["another migration"] = home.k.ParkParts(t.Context(), web, "m-2")
	for name, err := range busy {
		if !errors.Is(err, cards.ErrBusy) {
			t.Errorf("%s: %v", name, err)
		}
	}
	err = home.k.Detach(t.Context(), &gpuctlv1.DetachRequest{Machine: "web", Unconfirmed: true}, func(*gpuctlv1.DeviceUpdate) {})
	if !errors.Is(err, cards.ErrRefused) {
		t.Errorf("detached while it moves: %v", err)
	}
	other := map[string]func(p *gpuctlv1.SitePart){
		"of another size": func(p *gpuctlv1.SitePart) { p.Memory *= 2 }, "of other channels": func(p *gpuctlv1.SitePart) { p.Channels++ },
		"at no slot": func(p *gpuctlv1.SitePart) { p.Slot = 32 }, "of a huge weight": func(p *gpuctlv1.SitePart) { p.Weight = 1 << 30 },
	}
	for name, change := range other {
		p := &gpuctlv1.SitePart{Slot: parts[0].Slot, Memory: parts[0].Memory, Channels: parts[0].Channels, Weight: 1, Mode: "lazy", Config: parts[0].Config}
		change(p)
		if err := away.k.ExpectParts(t.Context(), web, "m-1", []*gpuctlv1.SitePart{p}); !errors.Is(err, cards.ErrRefused) {
			t.Errorf("a part %s: %v", name, err)
		}
	}
	if err := away.k.ExpectParts(t.Context(), web, "m-1", parts); err != nil {
		t.Fatal(err)
	}
	if err := away.k.TakeParts(t.Context(), web, "m-1", far{home}); !errors.Is(err, cards.ErrRefused) {
		t.Errorf("taken before the VM is there: %v", err)
	}
	// The domain runs before its part is there: it is told, and nothing is brought.
	away.runs(9)
	home.leaves()
	if err := away.k.TakeParts(t.Context(), web, "m-1", far{home}); !errors.Is(err, cards.ErrRefused) || !saidIn(away.events, "PartLost") {
		t.Errorf("taken late: %v, events %v", err, away.events)
	}
}

// TestVMThatMovesItsBARsWhileItIsParkedGoesOnAtHome: the destination does not know of it, so the
// VM's accesses may have gone astray there.
func TestVMThatMovesItsBARsWhileItIsParkedGoesOnAtHome(t *testing.T) {
	home, away, d := pair(t, 5)
	home.parks(t, away)
	d.SetConfig(0, lastSlot, 0x10, 4, 0xc0000000)
	away.arrives(9)
	home.leaves()
	if err := away.k.TakeParts(t.Context(), web, "m-1", far{home}); !errors.Is(err, server.ErrState) {
		t.Fatalf("taken: %v", err)
	}
	d = moves(t, away, home, 8)
	d.Store(0, 0xc0000000+0x1700, 4, 0x30)
	if v := d.Load(0, 0xc0000000+0x700100, 8); v != 5 {
		t.Errorf("at home: %#x", v)
	}
}
