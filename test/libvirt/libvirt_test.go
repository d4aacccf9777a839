package libvirt_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/passthrough/domxml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/test/libvirt"
)

// The hosts are shared by all tests, which run one after the other.
type shared struct {
	once sync.Once
	rig  *libvirt.Rig
	err  error
}

var hosts shared

func TestMain(m *testing.M) {
	code := m.Run()
	if hosts.rig != nil {
		if err := hosts.rig.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func rig(t *testing.T) (r *libvirt.Rig, a, b *libvirt.Host) {
	t.Helper()
	hosts.once.Do(func() { hosts.rig, hosts.err = libvirt.Start("hosta", "hostb") })
	libvirt.Need(t, hosts.err)
	a, b = hosts.rig.Hosts[0], hosts.rig.Hosts[1]
	t.Cleanup(func() {
		if t.Failed() {
			for _, h := range hosts.rig.Hosts {
				t.Logf("libvirtd of %s:\n%s", h.Name, h.Log())
			}
		}
	})
	return hosts.rig, a, b
}

// limits are generous to a loaded machine but for the connection itself.
func limits() virt.Timeouts {
	return virt.Timeouts{Connect: 3 * time.Second, Query: 10 * time.Second, Change: 30 * time.Second, Ping: time.Second, Backoff: time.Second}
}

func client(t *testing.T, h *libvirt.Host, l virt.Timeouts) *virt.Client {
	t.Helper()
	c, err := virt.Open("qemu:///system", virt.WithSocket(h.Socket()), virt.WithTimeouts(l))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	ready(t, c)
	return c
}

func ready(t *testing.T, c *virt.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if err := c.Ready(ctx); err != nil {
		t.Fatal(err)
	}
}

// guest defines and starts a guest and waits until it counts.
func guest(t *testing.T, c *virt.Client, h *libvirt.Host, number int, devices string) virt.Domain {
	t.Helper()
	r, _, _ := rig(t)
	name := fmt.Sprintf("vm%d", number)
	xml, err := r.Guest(name, fmt.Sprintf("aaaaaaaa-0000-4000-8000-%012d", number), devices)
	if err != nil {
		t.Fatal(err)
	}
	d, err := c.Define(t.Context(), xml)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.Background()
		c.Destroy(ctx, d)
		c.Undefine(ctx, d)
	})
	if d, err = c.Start(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	counts(t, h, name, 1)
	return d
}

// counts waits until a guest has counted to a number.
func counts(t *testing.T, h *libvirt.Host, name string, least int) int {
	t.Helper()
	var n int
	testkit.Until(t, fmt.Sprintf("%s on %s counts to %d", name, h.Name, least), func() (err error) {
		n, err = h.Count(name)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		return testkit.Want(n >= least, n)
	})
	return n
}

func await(t *testing.T, s *virt.Subscription, what string, is func(virt.Event) bool) virt.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var seen []string
	for {
		e, err := s.Next(ctx)
		if err != nil {
			t.Fatalf("no event %s: %v; seen %v", what, err, seen)
		}
		if is(e) {
			return e
		}
		seen = append(seen, e.Kind.String())
	}
}

func kind(k virt.EventKind) func(virt.Event) bool {
	return func(e virt.Event) bool { return e.Kind == k }
}

func TestLifeOfADomain(t *testing.T) {
	r, a, _ := rig(t)
	c := client(t, a, limits())
	ctx := t.Context()
	events := c.Subscribe()
	defer events.Close()
	await(t, events, "resync", kind(virt.Resync))

	v, err := c.Version(ctx)
	if err != nil || v.Libvirt < 7_000_000 || v.Hypervisor < 5_000_000 {
		t.Errorf("version %v, %v", v, err)
	}
	if name, err := c.Hostname(ctx); err != nil || name != "hosta" {
		t.Errorf("hostname %q, %v", name, err)
	}
	if caps, err := c.Capabilities(ctx); err != nil || !strings.Contains(string(caps), "67707563-746c-4000-8000-000000000001") {
		t.Errorf("capabilities without the host's UUID: %v", err)
	}
	d := guest(t, c, a, 1, "    <controller type='virtio-serial'/>\n")
	await(t, events, "defined", kind(virt.Defined))
	if e := await(t, events, "started", kind(virt.Started)); e.Domain.Name != "vm1" || e.Domain.UUID != d.UUID || e.Migrated() {
		t.Errorf("%+v", e)
	}
	if got, err := c.Lookup(ctx, "vm1"); err != nil || got != d {
		t.Errorf("lookup: %v, %v; want %v", got, err, d)
	}
	if got, err := c.Lookup(ctx, d.UUID.String()); err != nil || got != d {
		t.Errorf("lookup: %v, %v; want %v", got, err, d)
	}
	if all, err := c.Domains(ctx); err != nil || len(all) != 1 || all[0] != d {
		t.Errorf("domains: %v, %v", all, err)
	}

	// Paused it does not count.
	if err := c.Suspend(ctx, d); err != nil {
		t.Fatal(err)
	}
	await(t, events, "suspended", kind(virt.Suspended))
	before, err := a.Count("vm1")
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond) // nothing tells that it does not count
	if after, err := a.Count("vm1"); err != nil || after != before {
		t.Errorf("counted from %d to %d while paused, %v", before, after, err)
	}
	if s, err := c.State(ctx, d); err != nil || s != virt.Paused {
		t.Errorf("state %v, %v", s, err)
	}
	if err := c.Resume(ctx, d); err != nil {
		t.Fatal(err)
	}
	counts(t, a, "vm1", before+1)

	devicesComeAndGo(t, r, c, d, events)
	refusals(t, r, c, d)

	if err := c.Destroy(ctx, d); err != nil {
		t.Fatal(err)
	}
	await(t, events, "stopped", kind(virt.Stopped))
	if s, err := c.State(ctx, d); err != nil || s != virt.ShutOff {
		t.Errorf("state %v, %v", s, err)
	}
	if err := c.Destroy(ctx, d); !errors.Is(err, virt.ErrState) {
		t.Errorf("destroyed twice: %v", err)
	}
}

func devicesComeAndGo(t *testing.T, r *libvirt.Rig, c *virt.Client, d virt.Domain, events *virt.Subscription) {
	t.Helper()
	ctx := t.Context()
	disk, err := r.Disk("second", false)
	if err != nil {
		t.Fatal(err)
	}
	for _, device := range []struct{ xml, mark string }{
		{"<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='" + disk + "'/><target dev='vdb' bus='virtio'/></disk>", "second.img"},
		{"<channel type='unix'><source mode='bind' path='/run/vm1.channel'/><target type='virtio' name='org.gpuctl.0'/></channel>", "org.gpuctl.0"},
	} {
		if err := c.Attach(ctx, d, []byte(device.xml), virt.Live|virt.Config); err != nil {
			t.Fatal(err)
		}
		for _, flags := range []virt.XMLFlags{0, virt.XMLInactive | virt.XMLSecure} {
			if x, err := c.XML(ctx, d, flags); err != nil || !strings.Contains(string(x), device.mark) {
				t.Errorf("XML %d does not have %s, %v", flags, device.mark, err)
			}
		}
		if err := c.Attach(ctx, d, []byte(device.xml), virt.Live); err == nil || errors.Is(err, virt.ErrUnknownOutcome) {
			t.Errorf("attached twice: %v", err)
		}
		if err := c.Detach(ctx, d, []byte(device.xml), virt.Live|virt.Config); err != nil {
			t.Fatal(err)
		}
		await(t, events, "device removed", kind(virt.DeviceRemoved))
		if x, err := c.XML(ctx, d, 0); err != nil || strings.Contains(string(x), device.mark) {
			t.Errorf("%s is still there, %v", device.mark, err)
		}
		if err := c.Detach(ctx, d, []byte(device.xml), virt.Live); !errors.Is(err, virt.ErrNotFound) {
			t.Errorf("detached twice: %v", err)
		}
	}
}

// refusals checks what must fail, and how.
func refusals(t *testing.T, r *libvirt.Rig, c *virt.Client, d virt.Domain) {
	t.Helper()
	ctx := t.Context()
	if _, err := c.Start(ctx, d); !errors.Is(err, virt.ErrState) {
		t.Errorf("started twice: %v", err)
	}
	xml, err := r.Guest("vm1", "bbbbbbbb-0000-4000-8000-000000000001", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Define(ctx, xml); !errors.Is(err, virt.ErrExists) {
		t.Errorf("name taken: %v", err)
	}
	if _, err := c.Define(ctx, []byte("<domain type='qemu'><name>")); !errors.Is(err, virt.ErrInvalid) {
		t.Errorf("half an XML: %v", err)
	}
	if _, err := c.Lookup(ctx, "ghost"); !errors.Is(err, virt.ErrNotFound) || !strings.Contains(err.Error(), "ghost") {
		t.Errorf("no such domain: %v", err)
	}
	if j, err := c.Job(ctx, d); err != nil || j.State != virt.NoJob {
		t.Errorf("job %+v, %v", j, err)
	}
	if err := c.Abort(ctx, d); !errors.Is(err, virt.ErrState) {
		t.Errorf("aborted nothing: %v", err)
	}
}

func TestKilledUnderLoad(t *testing.T) {
	_, a, b := rig(t)
	c := client(t, a, limits())
	d := guest(t, c, a, 2, "")
	events := c.Subscribe()
	defer events.Close()
	await(t, events, "resync", kind(virt.Resync))

	busy := &busy{failures: map[string]int{}}
	stop := busy.start(t, c, d)
	defer stop()
	serves := func() { // while it is under load
		t.Helper()
		before := busy.worked()
		testkit.Until(t, "some calls work", func() error { return testkit.Want(busy.worked() > before+20, busy.worked(), before) })
	}
	for range 3 {
		serves()
		if err := a.Kill(); err != nil {
			t.Fatal(err)
		}
		testkit.Until(t, "its end is noticed", func() error {
			up, _ := c.Up()
			return testkit.Want(!up)
		})
		began := time.Now()
		if err := c.Suspend(t.Context(), d); !errors.Is(err, virt.ErrDisconnected) || errors.Is(err, virt.ErrUnknownOutcome) {
			t.Errorf("while it is gone: %v", err)
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("while it is gone a call took %v", took)
		}
		if err := a.StartDaemon(); err != nil {
			t.Fatal(err)
		}
		await(t, events, "resync", kind(virt.Resync))
		ready(t, c)
	}
	serves()
	stop()
	t.Logf("%d calls worked, failed: %v", busy.successes, busy.failures)
	if busy.successes == 0 || busy.failures["disconnected"] == 0 {
		t.Errorf("%d calls worked, failed: %v", busy.successes, busy.failures)
	}

	// The guest lived through it.
	if s, err := c.State(t.Context(), d); err != nil || !s.Active() {
		t.Fatalf("state %v, %v", s, err)
	}
	if err := c.Resume(t.Context(), d); err != nil && !errors.Is(err, virt.ErrState) {
		t.Error(err)
	}
	n, err := a.Count("vm2")
	if err != nil {
		t.Fatal(err)
	}
	counts(t, a, "vm2", n+1)

	// A destination that is gone is no reason to lose anything.
	if err := b.Kill(); err != nil {
		t.Fatal(err)
	}
	err = c.Migrate(t.Context(), d, virt.Migration{Destination: b.URI(), Data: b.DataURI(), Unsafe: true})
	if err == nil || errors.Is(err, virt.ErrUnknownOutcome) || !strings.Contains(err.Error(), b.Address) {
		t.Errorf("destination is down: %v", err)
	}
	if err := b.StartDaemon(); err != nil {
		t.Fatal(err)
	}
	counts(t, a, "vm2", n+10)
}

// busy calls libvirtd from four goroutines, and counts what came of it.
type busy struct {
	mu        sync.Mutex
	failures  map[string]int
	successes int
}

func (b *busy) worked() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.successes
}

// start begins; stop waits until all of it has ended.
func (b *busy) start(t *testing.T, c *virt.Client, d virt.Domain) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var load sync.WaitGroup
	for i := range 4 {
		load.Go(func() {
			for ctx.Err() == nil {
				if err := b.call(t, c, d, i%2 == 0); err != nil {
					time.Sleep(5 * time.Millisecond) // what a caller does before it tries again
				}
			}
		})
	}
	return func() {
		cancel()
		load.Wait()
	}
}

func (b *busy) call(t *testing.T, c *virt.Client, d virt.Domain, change bool) error {
	var err error
	if change {
		if err = c.Suspend(t.Context(), d); err == nil {
			err = c.Resume(t.Context(), d)
		}
	} else {
		_, err = c.XML(t.Context(), d, 0)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case err == nil:
		b.successes++
	case errors.Is(err, virt.ErrUnknownOutcome) && change:
		b.failures["unknown outcome"]++
	case errors.Is(err, virt.ErrDisconnected):
		b.failures["disconnected"]++
	case errors.Is(err, virt.ErrState) && change: // two of them toggle
	default:
		t.Errorf("under load: %v", err)
	}
	return err
}

// A stopped libvirtd: nothing waits longer than it said.
func TestHung(t *testing.T) {
	_, a, _ := rig(t)
	l := limits()
	l.Query, l.Change, l.Connect, l.Ping = time.Second, time.Second, time.Second, time.Hour
	c := client(t, a, l)
	d := guest(t, client(t, a, limits()), a, 3, "")
	if _, err := c.State(t.Context(), d); err != nil { // so that there is an idle connection
		t.Fatal(err)
	}
	if err := a.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer a.Signal(syscall.SIGCONT)
	began := time.Now()
	err := c.Suspend(t.Context(), d)
	if !errors.Is(err, virt.ErrTimeout) || !errors.Is(err, virt.ErrUnknownOutcome) || !strings.Contains(err.Error(), `suspend "vm3"`) {
		t.Errorf("suspend: %v", err)
	}
	if took := time.Since(began); took < time.Second || took > 4*time.Second {
		t.Errorf("suspend took %v", took)
	}
	testkit.Until(t, "it is noticed that libvirtd hangs", func() error {
		up, _ := c.Up()
		return testkit.Want(!up)
	})
	began = time.Now()
	for name, do := range map[string]func() error{
		"state":   func() error { _, err := c.State(t.Context(), d); return err },
		"destroy": func() error { return c.Destroy(t.Context(), d) },
		"xml":     func() error { _, err := c.XML(t.Context(), d, 0); return err },
	} {
		if err := do(); !errors.Is(err, virt.ErrDisconnected) || errors.Is(err, virt.ErrUnknownOutcome) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("three calls to a libvirtd known to hang took %v", took)
	}
	if err := a.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	ready(t, c)
	// The outcome was unknown indeed: libvirtd has read the call meanwhile.
	s, err := c.State(t.Context(), d)
	if err != nil || !s.Active() {
		t.Errorf("%v, %v", s, err)
	}
	t.Logf("the call without an answer left it %v", s)
}

func TestMigrate(t *testing.T) {
	_, a, b := rig(t)
	ca, cb := client(t, a, limits()), client(t, b, limits())
	d := guest(t, ca, a, 4, "")
	ea, eb := ca.Subscribe(), cb.Subscribe()
	defer ea.Close()
	defer eb.Close()
	const slow = 1 // MiB/s

	// Out of time: aborted, and the guest goes on here.
	err := ca.Migrate(t.Context(), d, virt.Migration{Destination: b.URI(), Data: b.DataURI(), Unsafe: true, Bandwidth: slow, Limit: 300 * time.Millisecond})
	if !errors.Is(err, virt.ErrTimeout) || errors.Is(err, virt.ErrUnknownOutcome) {
		t.Errorf("out of time: %v", err)
	}
	if s, err := ca.State(t.Context(), d); err != nil || s != virt.Running {
		t.Errorf("here after an abort: %v, %v", s, err)
	}
	if _, err := cb.State(t.Context(), d); !errors.Is(err, virt.ErrNotFound) {
		t.Errorf("there after an abort: %v", err)
	}
	n, err := a.Count("vm4")
	if err != nil {
		t.Fatal(err)
	}
	counts(t, a, "vm4", n+2)

	// Without a hurry, watched.
	var jobs []virt.Job
	began := time.Now()
	err = ca.Migrate(t.Context(), d, virt.Migration{
		Destination: b.URI(), Data: b.DataURI(), Unsafe: true, Bandwidth: slow, Persist: true, UndefineSource: true, Every: 50 * time.Millisecond,
		Progress: func(j virt.Job) { jobs = append(jobs, j) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("migrated in %v, %d reports, last %+v", time.Since(began), len(jobs), jobs[max(0, len(jobs)-1):])
	if len(jobs) < 3 {
		t.Fatalf("%d reports", len(jobs))
	}
	for i := range jobs[1:] {
		if jobs[i+1].Elapsed < jobs[i].Elapsed || jobs[i+1].Processed < jobs[i].Processed {
			t.Errorf("progress goes back: %+v then %+v", jobs[i], jobs[i+1])
		}
	}
	if last := jobs[len(jobs)-1]; last.Processed == 0 || last.Total < 64<<20 {
		t.Errorf("last report %+v", last)
	}
	if e := await(t, eb, "started by migration", virt.Event.Migrated); e.Domain.UUID != d.UUID {
		t.Errorf("%+v", e)
	}
	await(t, ea, "iteration", kind(virt.MigrationIteration))
	await(t, ea, "stopped by migration", virt.Event.Migrated)
	if _, err := ca.State(t.Context(), d); !errors.Is(err, virt.ErrNotFound) {
		t.Errorf("it is still defined here: %v", err)
	}
	there, err := cb.LookupUUID(t.Context(), d.UUID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cb.Destroy(context.Background(), there)
		cb.Undefine(context.Background(), there)
	})
	left, err := a.Count("vm4")
	if err != nil {
		t.Fatal(err)
	}
	if on := counts(t, b, "vm4", left+5); on < left {
		t.Errorf("it counted to %d here and to %d there", left, on)
	}

	// And back, at full speed.
	if err := cb.Migrate(t.Context(), there, virt.Migration{Destination: a.URI(), Data: a.DataURI(), Unsafe: true}); err != nil {
		t.Fatal(err)
	}
	counts(t, a, "vm4", left+6)
}

// A destination that hangs before libvirt has reached it is no reason to hang, although libvirt
// does not end the call: nothing of the guest is sent. The outcome is unknown then, and
// libvirt says that the guest has a job. When the destination goes on, the guest stays.
func TestMigrateToAHungHost(t *testing.T) {
	_, a, b := rig(t)
	l := limits()
	l.Abort, l.Silence = 2*time.Second, time.Second
	ca, cb := client(t, a, l), client(t, b, limits())
	d := guest(t, ca, a, 5, "")
	if err := b.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	err := ca.Migrate(t.Context(), d, virt.Migration{Destination: b.URI(), Data: b.DataURI(), Unsafe: true})
	took := time.Since(began)
	if j, err := ca.Job(t.Context(), d); err != nil || j.State != virt.JobUnbounded {
		t.Errorf("its job: %+v, %v", j, err)
	}
	if sig := b.Signal(syscall.SIGCONT); sig != nil {
		t.Fatal(sig)
	}
	t.Logf("after %v: %v", took, err)
	if !errors.Is(err, virt.ErrNothingSent) || !errors.Is(err, virt.ErrUnknownOutcome) || took > 8*time.Second {
		t.Errorf("after %v: %v", took, err)
	}
	ready(t, cb)
	t.Cleanup(func() {
		if there, err := cb.LookupUUID(context.Background(), d.UUID); err == nil {
			cb.Destroy(context.Background(), there)
		}
	})
	running := func(c *virt.Client) bool {
		s, err := c.State(t.Context(), d)
		if err != nil && !errors.Is(err, virt.ErrNotFound) && !errors.Is(err, virt.ErrBusy) {
			t.Errorf("look: %v", err)
		}
		return err == nil && s == virt.Running
	}
	testkit.Until(t, "it runs here, without a job", func() error {
		j, err := ca.Job(t.Context(), d)
		here, there := running(ca), running(cb)
		return testkit.Want(err == nil && j.State == virt.NoJob && here && !there, here, there, j, err)
	})
}

// What domxml writes real libvirt takes, and means the same by it.
func TestEditedXML(t *testing.T) {
	r, a, _ := rig(t)
	c := client(t, a, limits())
	xml, err := r.Guest("vm6", "aaaaaaaa-0000-4000-8000-000000000006", "    <!-- nothing else -->\n")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := domxml.Parse(xml)
	if err != nil {
		t.Fatal(err)
	}
	var sources []domxml.Source
	for bus := range uint8(3) {
		sources = append(sources, domxml.Source{PCI: pci.Address{Domain: 1, Bus: 0xf0 + bus, Function: 3}})
	}
	use := domxml.Use{Add: sources}
	if problems := doc.Check(use); len(problems) != 0 {
		t.Errorf("%+v", problems)
	}
	for _, s := range sources {
		if err := doc.Add(domxml.HostDevice{Source: s}); err != nil {
			t.Fatal(err)
		}
	}
	if err := doc.AddChannel(domxml.Channel{Name: "org.gpuctl.0", Path: "/run/vm6.channel"}); err != nil {
		t.Fatal(err)
	}
	d, err := c.Define(t.Context(), doc.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Undefine(context.Background(), d) })
	read := func() *domxml.Document {
		x, err := c.XML(t.Context(), d, virt.XMLInactive|virt.XMLSecure)
		if err != nil {
			t.Fatal(err)
		}
		got, err := domxml.Parse(x)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	got := read()
	for i, h := range got.HostDevices() {
		if h.Source != sources[i] || h.Managed || h.Guest == nil {
			t.Errorf("%+v, want %s", h, sources[i])
		}
	}
	if n := len(got.HostDevices()); n != len(sources) {
		t.Errorf("%d devices", n)
	}
	if ch := got.Channels(); len(ch) != 1 || ch[0] != (domxml.Channel{Name: "org.gpuctl.0", Path: "/run/vm6.channel"}) {
		t.Errorf("channels %+v", ch)
	}
	// What libvirt wrote can be edited as well, and what the guest sees stays.
	was := got.HostDevices()[1].Guest
	other := domxml.Source{PCI: pci.Address{Bus: 0xee}}
	if err := got.Replace(sources[1], other); err != nil {
		t.Fatal(err)
	}
	if err := got.Remove(sources[0]); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Define(t.Context(), got.Bytes()); err != nil {
		t.Fatal(err)
	}
	devices := read().HostDevices()
	if len(devices) != 2 || devices[0].Source != other || *devices[0].Guest != *was || devices[1].Source != sources[2] {
		t.Errorf("%+v, want %s at %s and %s", devices, other, was, sources[2])
	}
}
