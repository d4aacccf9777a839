package server

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/mmiotest"
	"github.com/gpuctl/gpuctl/mmio/xen"
	"github.com/gpuctl/gpuctl/mmio/xen/xentest"
)

// rig is a host with a mediated GPU.
type rig struct {
	t      *testing.T
	xen    *xentest.Hypervisor
	dir    string
	log    testkit.Log
	client Client
	over   func(xen.Hypervisor) xen.Hypervisor // nil: nothing is between the server and Xen
}

func newRig(t *testing.T) *rig {
	dir, err := os.MkdirTemp("", "mmio") // short, as a socket's path is limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &rig{t: t, xen: xentest.New(t), dir: dir, client: Client{Socket: Socket(dir, "g")}}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(r.log.String())
		}
	})
	return r
}

// process is a running server.
type process struct {
	of   *xentest.Process
	stop func()
}

func (r *rig) start() *process {
	r.t.Helper()
	model := Model{Memory: 16 << 20, Parts: 4, Policy: timeshare.Fair}
	log := slog.New(slog.NewTextHandler(&r.log, nil))
	gpu, err := NewGPU(model, func(e mediate.Event) {
		if e.Name == "hardware" {
			r.t.Error(e)
		}
	})
	if err != nil {
		r.t.Fatal(err)
	}
	p := &process{of: r.xen.Process()}
	s := &Server{Dir: r.dir, Name: "g", Model: model, GPU: gpu, Xen: p.of, Log: log}
	if r.over != nil {
		s.Xen = r.over(p.of)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- s.Run(ctx, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-ended:
		r.t.Fatal(err)
	}
	var once sync.Once
	p.stop = func() {
		once.Do(func() {
			cancel()
			<-ended
		})
	}
	r.t.Cleanup(p.stop)
	return p
}

// function is the function at a slot of a domain, with its BARs where firmware would put
// them.
type function struct {
	d    *xentest.Domain
	slot uint8
}

var bases = [6]uint64{0xf0000000, 0xe0000000, 0, 0xd8000000, 0, 0xfe000000}

func plug(d *xentest.Domain, slot uint8) function {
	for i, b := range bases {
		if b != 0 {
			d.SetConfig(0, slot, 0x10+4*i, 4, b)
		}
	}
	d.SetConfig(0, slot, 4, 2, 6)
	return function{d, slot}
}

func (f function) Read(a mmio.Access) uint64 {
	return f.d.Load(0, bases[a.BAR]+a.Offset, int(a.Size))
}

func (f function) Write(a mmio.Access) {
	f.d.Store(0, bases[a.BAR]+a.Offset, int(a.Size), a.Data)
}

func partOf(id string, domain uint16) Part {
	return Part{ID: id, Name: id, Domain: domain, Slot: 0x1f, Memory: 4 << 20, Guest: 16 << 12}
}

func (r *rig) attach(p Part) {
	r.t.Helper()
	if err := r.client.Attach(r.t.Context(), p); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) detach(id string) {
	r.t.Helper()
	if err := r.client.Detach(context.Background(), id); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) list() []Status {
	r.t.Helper()
	l, err := r.client.List(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	return l
}

func TestTwoVMsComputeBesideAHostileOne(t *testing.T) {
	r := newRig(t)
	r.start()
	doms := map[string]*xentest.Domain{}
	for i, id := range []string{"a", "b", "bad"} {
		doms[id] = r.xen.Domain(uint16(7+i), 1, 16)
		r.attach(partOf(id, uint16(7+i)))
		defer r.detach(id)
	}
	stop := make(chan struct{})
	var wg, hostile sync.WaitGroup
	hostile.Go(func() {
		f := plug(doms["bad"], 0x1f)
		for i := uint64(0); ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			x := i * 0x9e3779b97f4a7c15
			f.Write(mmio.Access{BAR: 0, Size: 4, Offset: x >> 20 & 0x1fffffc, Data: x})
			f.Write(mmio.Access{BAR: 0, Size: 4, Offset: 0x1700, Data: x >> 7})
			f.Write(mmio.Access{BAR: 0, Size: 4, Offset: 0x700000 + x>>30&0xffffc, Data: x})
			f.Write(mmio.Access{BAR: 1, Size: 8, Offset: x >> 40 & 0x7fffff8, Data: x})
		}
	})
	for i, id := range []string{"a", "b"} {
		wg.Go(func() {
			f := plug(doms[id], 0x1f)
			for n := range uint64(2) {
				if err := mmiotest.Compute(f, 0, uint64(i)<<8|n, 40, nil); err != nil {
					t.Errorf("VM %s: %v", id, err)
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	hostile.Wait()
	for _, s := range r.list() {
		switch refused := s.Phases["other"].Refused; {
		case s.ID == "bad" && refused == 0:
			t.Error("nothing of the hostile VM was refused")
		case s.ID != "bad" && (s.Phases["launch"].Commands == 0 || s.Phases["copy"].Exits == 0 || s.Lost != ""):
			t.Errorf("status %+v", s)
		}
	}
}

func TestKilledServerIsAReasonToTellTheVM(t *testing.T) {
	r := newRig(t)
	first := r.start()
	d := r.xen.Domain(7, 1, 16)
	r.attach(partOf("a", 7))
	f := plug(d, 0x1f)
	if err := mmiotest.Compute(f, 0, 1, 8, nil); err != nil {
		t.Fatal(err)
	}
	first.of.Kill()
	first.stop()
	got := make(chan uint64)
	go func() { got <- f.Read(mmio.Access{BAR: 0, Size: 4}) }()
	testkit.Parked(t, "xentest.(*Domain).Ask", 1)
	if _, err := r.client.List(t.Context()); !errors.Is(err, ErrNoServer) {
		t.Errorf("without a process: %v", err)
	}
	r.start()
	if v := <-got; v != 0xffffffff {
		t.Errorf("the VM reads %#x", v)
	}
	if l := r.list(); len(l) != 1 || l[0].Lost == "" || l[0].ID != "a" {
		t.Errorf("parts %+v", l)
	}
	if err := r.client.Attach(t.Context(), partOf("a", 7)); !errors.Is(err, ErrExists) {
		t.Errorf("a lost part was given again: %v", err)
	}
	r.detach("a")
	r.detach("a")
	if d.Servers() != 0 || len(r.list()) != 0 {
		t.Errorf("%d servers, parts %+v", d.Servers(), r.list())
	}
	r.attach(partOf("a2", 7))
	if err := mmiotest.Compute(plug(d, 0x1f), 0, 2, 8, nil); err != nil {
		t.Errorf("the next part: %v", err)
	}
	r.detach("a2")
}

func TestPartThatIsTakenBackIsScrubbed(t *testing.T) {
	r := newRig(t)
	r.start()
	var seen [2]uint64
	for i := range seen {
		d := r.xen.Domain(uint16(7+i), 1, 16)
		r.attach(partOf("a", uint16(7+i)))
		f := plug(d, 0x1f)
		f.Write(mmio.Access{BAR: 0, Size: 4, Offset: 0x1700})
		seen[i] = f.Read(mmio.Access{BAR: 0, Size: 4, Offset: 0x700100})
		f.Write(mmio.Access{BAR: 0, Size: 4, Offset: 0x700100, Data: 0xdeadbeef})
		if v := f.Read(mmio.Access{BAR: 0, Size: 4, Offset: 0x700100}); v != 0xdeadbeef {
			t.Fatalf("memory reads %#x", v)
		}
		r.detach("a")
		if v := f.Read(mmio.Access{BAR: 0, Size: 4}); v != 0xffffffff {
			t.Errorf("after it was taken back: %#x", v)
		}
	}
	if seen != [2]uint64{} {
		t.Errorf("a VM found %#x in its memory", seen)
	}
}

func TestImpossiblePartsLeaveNothing(t *testing.T) {
	r := newRig(t)
	r.start()
	d := r.xen.Domain(7, 1, 16)
	for name, change := range map[string]func(*Part){
		"too much memory": func(p *Part) { p.Memory = 1 << 30 },
		"crooked memory":  func(p *Part) { p.Memory = 5 },
		"no such mode":    func(p *Part) { p.Mode = "x" },
		"negative weight": func(p *Part) { p.Weight = -1 },
		"slot 32":         func(p *Part) { p.Slot = 32 },
		"dom0":            func(p *Part) { p.Domain = 0 },
		"no id":           func(p *Part) { p.ID = "" },
		"a long id":       func(p *Part) { p.ID = strings.Repeat("x", 65) },
	} {
		p := partOf("a", 7)
		change(&p)
		if err := r.client.Attach(t.Context(), p); !errors.Is(err, ErrRefused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	p := partOf("a", 99)
	if err := r.client.Attach(t.Context(), p); err == nil {
		t.Error("a domain that does not exist has a part")
	}
	if d.Servers() != 0 || len(r.list()) != 0 {
		t.Errorf("%d servers, parts %+v", d.Servers(), r.list())
	}
	data, err := os.ReadFile(filepath.Join(r.dir, "g.json"))
	if err != nil || strings.TrimSpace(string(data)) != "null" {
		t.Errorf("journal %q, %v", data, err)
	}
}

func TestOneProcessHasAGPU(t *testing.T) {
	r := newRig(t)
	r.start()
	s := &Server{Dir: r.dir, Name: "g", Log: slog.New(slog.DiscardHandler)}
	if err := s.Run(t.Context(), func() { t.Error("a second process is ready") }); !errors.Is(err, ErrBusy) {
		t.Error(err)
	}
}

func TestDamagedJournalIsNotIgnored(t *testing.T) {
	for _, text := range []string{"", "{", `[{"id":""}]`, `[{"id":"a","domain":1},{"id":"a","domain":2}]`, `[{"id":"a"}]`} {
		if _, err := decodeJournal([]byte(text)); err == nil {
			t.Errorf("%q", text)
		}
	}
}

func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"op":"attach","part":{"id":"a","domain":7,"slot":31,"memory":4194304}}`))
	f.Add([]byte(`{"op":"detach","part":{"id":"a"}}`))
	f.Add([]byte(`{"op":"list"}`))
	f.Add([]byte(`[1]`))
	f.Fuzz(func(t *testing.T, line []byte) {
		r, err := parse(line)
		if err != nil {
			if !errors.Is(err, ErrRefused) {
				t.Error(err)
			}
			return
		}
		if r.Op == "attach" && (r.Part.Domain == 0 || r.Part.Slot == 0 || r.Part.Slot > 31 || r.Part.ID == "") {
			t.Errorf("%+v", r)
		}
	})
}

func FuzzJournal(f *testing.F) {
	f.Add([]byte(`[{"id":"a","domain":7,"server":1}]`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, data []byte) {
		all, err := decodeJournal(data)
		if err == nil && len(all) > 2*MaxParts {
			t.Error(len(all))
		}
	})
}
