package virt_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/virt/virttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const uuid1 = "11111111-1111-1111-1111-111111111111"

func domainXML(name, uuid string) []byte {
	return []byte("<domain type='xen'><name>" + name + "</name><uuid>" + uuid + "</uuid><memory unit='MiB'>64</memory>" +
		"<os><type arch='x86_64' machine='xenfv'>hvm</type></os>" +
		"<features><acpi/><xen><passthrough state='on'/></xen></features><devices/></domain>")
}

func device(bus int) []byte {
	return fmt.Appendf(nil, "<hostdev mode='subsystem' type='pci'><source><address domain='0' bus='%d' slot='0' function='0'/></source></hostdev>", bus)
}

func quick() virt.Timeouts {
	return virt.Timeouts{
		Connect: time.Second, Query: time.Second, Change: time.Second,
		Migrate: 20 * time.Second, Abort: 10 * time.Second, Ping: 20 * time.Millisecond, Backoff: 50 * time.Millisecond,
	}
}

// open starts a server and a client of it that is ready.
func open(t *testing.T, driver string, limits virt.Timeouts) (*virttest.Server, *virt.Client) {
	t.Helper()
	s := virttest.Start(t, driver)
	c := client(t, s, driver, limits)
	return s, c
}

func client(t *testing.T, s *virttest.Server, driver string, limits virt.Timeouts) *virt.Client {
	t.Helper()
	c, err := virt.Open(driver+":///system", virt.WithSocket(s.Socket()), virt.WithTimeouts(limits))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	ready(t, c)
	return c
}

func ready(t *testing.T, c *virt.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := c.Ready(ctx); err != nil {
		t.Fatal(err)
	}
}

func define(t *testing.T, c *virt.Client, name, uuid string) virt.Domain {
	t.Helper()
	d, err := c.Define(t.Context(), domainXML(name, uuid))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func started(t *testing.T, c *virt.Client) virt.Domain {
	t.Helper()
	d, err := c.Start(t.Context(), define(t, c, "vm1", uuid1))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestOpenRefusesOtherURIs(t *testing.T) {
	for _, uri := range []string{"", "lxc:///system", "xen+ssh://host/system", "xen://host/system", "qemu:///session", "test:///default", "xen:%zz"} {
		if c, err := virt.Open(uri); err == nil {
			c.Close()
			t.Errorf("%q was accepted", uri)
		}
	}
}

func TestLifeOfADomain(t *testing.T) {
	s, c := open(t, "xen", quick())
	ctx := t.Context()
	if c.Driver() != virt.Xen {
		t.Errorf("driver %q", c.Driver())
	}
	v, err := c.Version(ctx)
	if err != nil || v.Libvirt.String() != "9.0.0" {
		t.Errorf("version %v, %v", v, err)
	}
	if h, err := c.Hostname(ctx); err != nil || h != "virttest" {
		t.Errorf("hostname %q, %v", h, err)
	}
	if x, err := c.Capabilities(ctx); err != nil || string(x) != "<capabilities/>" {
		t.Errorf("capabilities %q, %v", x, err)
	}
	d := define(t, c, "vm1", uuid1)
	if d.ID != -1 {
		t.Errorf("a domain that does not run has ID %d", d.ID)
	}
	for _, by := range []string{"vm1", uuid1, strings.ReplaceAll(uuid1, "-", "")} {
		if got, err := c.Lookup(ctx, by); err != nil || got != d {
			t.Errorf("lookup %q: %v, %v", by, got, err)
		}
	}
	if d, err = c.Start(ctx, d); err != nil || d.ID < 1 {
		t.Fatalf("start: %v, %v", d, err)
	}
	for _, step := range []struct {
		do   func(context.Context, virt.Domain) error
		want virt.State
	}{{c.Suspend, virt.Paused}, {c.Resume, virt.Running}} {
		if err := step.do(ctx, d); err != nil {
			t.Fatal(err)
		}
		if st, err := c.State(ctx, d); err != nil || st != step.want || !st.Active() {
			t.Errorf("state %v, %v; want %v", st, err, step.want)
		}
	}
	if err := c.Attach(ctx, d, device(1), virt.Live); err != nil {
		t.Fatal(err)
	}
	if got := s.Devices("vm1"); len(got) != 1 || got[0] != "0000:01:00.0" {
		t.Errorf("devices %v", got)
	}
	if err := c.Detach(ctx, d, device(1), virt.Live); err != nil {
		t.Fatal(err)
	}
	if x, err := c.XML(ctx, d, virt.XMLInactive|virt.XMLSecure); err != nil || !strings.Contains(string(x), "vm1") {
		t.Errorf("XML %q, %v", x, err)
	}
	if err := c.Destroy(ctx, d); err != nil {
		t.Fatal(err)
	}
	if st, err := c.State(ctx, d); err != nil || st != virt.ShutOff || st.Active() {
		t.Errorf("state %v, %v", st, err)
	}
	if err := c.Undefine(ctx, d); err != nil {
		t.Fatal(err)
	}
	if all, err := c.Domains(ctx); err != nil || len(all) != 0 {
		t.Errorf("domains %v, %v", all, err)
	}
}

func TestErrorsHaveKindsAndNames(t *testing.T) {
	s, c := open(t, "xen", quick())
	ctx := t.Context()
	d := started(t, c)
	other := define(t, c, "vm2", "22222222-2222-2222-2222-222222222222")
	nobody := virt.Domain{Name: "ghost"}
	if err := c.Attach(ctx, d, device(1), virt.Live); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Start(ctx, other); err != nil {
		t.Fatal(err)
	}
	deny := virttest.Fault{Code: 88, Message: "access denied: 'qemu' denied\nby policy"}
	for name, test := range map[string]struct {
		do    func() error
		kind  error
		words []string
	}{
		"no such domain":  {func() error { _, err := c.Lookup(ctx, "ghost"); return err }, virt.ErrNotFound, []string{"domid", `"ghost"`}},
		"vanished domain": {func() error { return c.Destroy(ctx, nobody) }, virt.ErrNotFound, []string{"destroy", "ghost"}},
		"name taken": {func() error {
			_, err := c.Define(ctx, domainXML("vm1", "33333333-3333-3333-3333-333333333333"))
			return err
		}, virt.ErrExists, []string{"define", "vm1", uuid1[:8]}},
		"bad XML":         {func() error { _, err := c.Define(ctx, []byte("<domain>")); return err }, virt.ErrInvalid, []string{"define"}},
		"too large":       {func() error { _, err := c.Define(ctx, make([]byte, 5<<20)); return err }, virt.ErrInvalid, []string{"5242880"}},
		"running already": {func() error { _, err := c.Start(ctx, d); return err }, virt.ErrState, []string{"start", "vm1", "already running"}},
		"owned by another": {
			func() error { return c.Attach(ctx, other, device(1), virt.Live) }, virt.ErrBusy,
			[]string{"attach-device", "vm2", "in use by driver xenlight, domain vm1"},
		},
		"not attached": {func() error { return c.Detach(ctx, d, device(7), virt.Live) }, virt.ErrNotFound, []string{"detach-device", "vm1", "0000:07:00.0"}},
		"denied": {func() error {
			s.Next("suspend", deny)
			return c.Suspend(ctx, d)
		}, virt.ErrDenied, []string{"suspend", "denied by policy"}},
		"locked by another host": {func() error {
			s.Next("start", virttest.Fault{Code: 87, From: 51, Message: "resource busy: Lockspace resource '/disk' is locked"})
			_, err := c.Start(ctx, d)
			return err
		}, virt.ErrLocked, []string{"start", "vm1", "/disk"}},
		"locked, says sanlock": {func() error {
			s.Next("resume", virttest.Fault{Code: 87, From: 42, Message: "resource busy: Failed to acquire lock: error -243"})
			return c.Resume(ctx, d)
		}, virt.ErrLocked, []string{"resume", "vm1"}},
		"busy otherwise": {func() error {
			s.Next("resume", virttest.Fault{Code: 87, Message: "resource busy: Lockspace resource '/disk' is locked"})
			return c.Resume(ctx, d)
		}, virt.ErrBusy, []string{"resume", "vm1"}},
		"no lock manager": {func() error {
			s.Next("start", virttest.Fault{Code: 1, Message: "internal error: Process exited prior to exec: libvirt: XML-RPC error : Failed to connect socket to '/run/libvirt/virtlockd-sock': Connection refused"})
			_, err := c.Start(ctx, d)
			return err
		}, virt.ErrLockManager, []string{"start", "vm1", "virtlockd-sock"}},
		"a lock manager that was started anew": {func() error {
			s.Next("start", virttest.Fault{Code: 1, Message: "internal error: Lockspace for path /leases does not exist"})
			_, err := c.Start(ctx, d)
			return err
		}, virt.ErrLockManager, []string{"start", "vm1", "/leases"}},
		"abort on Xen": {func() error { return c.Abort(ctx, d) }, virt.ErrUnsupported, []string{"domjobabort", "libxl"}},
		"job on old libvirt": {func() error {
			s.Next("domjobinfo", virttest.Fault{Code: 39, Message: "unknown procedure: 298"})
			_, err := c.Job(ctx, d)
			return err
		}, virt.ErrUnsupported, []string{"too old"}},
		"migrate with a device": {func() error {
			s.Peer("xen+tcp://b/system", s)
			return c.Migrate(ctx, d, virt.Migration{Destination: "xen+tcp://b/system"})
		}, virt.ErrState, []string{"migrate", "vm1", "assigned host devices"}},
		"bandwidth on Xen": {func() error {
			return c.Migrate(ctx, d, virt.Migration{Destination: "xen+tcp://b/system", Bandwidth: 1})
		}, virt.ErrUnsupported, []string{"traffic control"}},
		"no destination": {func() error { return c.Migrate(ctx, d, virt.Migration{Destination: "b"}) }, virt.ErrInvalid, []string{"xen+tls://host/system"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := test.do()
			if !errors.Is(err, test.kind) {
				t.Errorf("%v is not %v", err, test.kind)
			}
			if errors.Is(err, virt.ErrUnknownOutcome) || errors.Is(err, virt.ErrTimeout) {
				t.Errorf("%v: libvirt did answer", err)
			}
			for _, w := range test.words {
				if err == nil || !strings.Contains(err.Error(), w) {
					t.Errorf("%v does not say %q", err, w)
				}
			}
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("%q has two lines", err)
			}
		})
	}
	if ok, err := c.Up(); !ok {
		t.Errorf("down: %v", err)
	}
}

// A call that hangs fails in time, takes no other call with it, and says
// whether the outcome is known.
func TestAHangingCall(t *testing.T) {
	s, c := open(t, "xen", quick())
	d := started(t, c)
	for _, test := range []struct {
		call   string
		do     func() error
		change bool
	}{
		{"dumpxml", func() error { _, err := c.XML(t.Context(), d, 0); return err }, false},
		{"attach-device", func() error { return c.Attach(t.Context(), d, device(1), virt.Live) }, true},
		{"destroy", func() error { return c.Destroy(t.Context(), d) }, true},
	} {
		s.Next(test.call, virttest.Fault{Silent: true})
		began := time.Now()
		var other sync.WaitGroup
		other.Go(func() {
			for time.Since(began) < 200*time.Millisecond {
				if _, err := c.State(t.Context(), d); err != nil {
					t.Errorf("another call while %s hangs: %v", test.call, err)
				}
			}
		})
		err := test.do()
		other.Wait()
		if took := time.Since(began); took < 900*time.Millisecond || took > 5*time.Second {
			t.Errorf("%s took %v", test.call, took)
		}
		if !errors.Is(err, virt.ErrTimeout) || errors.Is(err, virt.ErrUnknownOutcome) != test.change {
			t.Errorf("%s: %v", test.call, err)
		}
		if !strings.Contains(err.Error(), test.call) || !strings.Contains(err.Error(), "vm1") {
			t.Errorf("%v does not say which call on which domain", err)
		}
	}
	if _, err := c.State(t.Context(), d); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

func TestTheCallersContextEndsACall(t *testing.T) {
	s, c := open(t, "xen", virt.Timeouts{})
	d := started(t, c)
	why := errors.New("operator pressed ^C")
	for _, test := range []struct {
		ctx  func() (context.Context, func())
		want []error
	}{
		{func() (context.Context, func()) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			return ctx, cancel
		}, []error{virt.ErrTimeout, context.DeadlineExceeded, virt.ErrUnknownOutcome}},
		{func() (context.Context, func()) {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(why) })
			return ctx, func() { cancel(nil) }
		}, []error{why, virt.ErrUnknownOutcome}},
	} {
		s.Next("suspend", virttest.Fault{Silent: true})
		ctx, cancel := test.ctx()
		err := c.Suspend(ctx, d)
		cancel()
		for _, want := range test.want {
			if !errors.Is(err, want) {
				t.Errorf("%v is not %v", err, want)
			}
		}
	}
}

// Whatever is sent instead of an answer: the call fails, the process lives,
// and the next call works.
func TestGarbage(t *testing.T) {
	head := func(words ...uint32) (b []byte) {
		for _, w := range words {
			b = binary.BigEndian.AppendUint32(b, w)
		}
		return b
	}
	const prog = 0x20008086
	s, c := open(t, "qemu", quick())
	d := started(t, c)
	for name, f := range map[string]virttest.Fault{
		"text":                      {Raw: []byte("HTTP/1.1 400 Bad Request\r\n\r\n")},
		"length of zero":            {Raw: head(0)},
		"length below the header":   {Raw: head(27, prog, 1)},
		"length of 4 GiB":           {Raw: head(0xffffffff, prog, 1, 273, 1, 3, 0)},
		"half a header":             {Raw: head(28, prog)},
		"no such call":              {Raw: head(28, prog, 1, 273, 1, 4711, 0)},
		"another program":           {Raw: head(28, 7, 1, 273, 1, 1, 0)},
		"stream":                    {Raw: head(28, prog, 1, 273, 3, 1, 2)},
		"empty answer":              {Answer: []byte{}},
		"list of two billion":       {Answer: head(0x7fffffff)},
		"list that ends too soon":   {Answer: head(2, 0)},
		"string of two billion":     {Answer: head(1, 0x7fffffff)},
		"too many bytes":            {Answer: head(0, 0, 0)},
		"success called an error":   {Code: 0, Raw: nil, Answer: head(1)},
		"closed before the answer":  {Cut: true},
		"closed after the work":     {Do: true, Cut: true},
		"answered twice":            {Do: true, Twice: true},
		"an answer after its limit": {Do: true, Delay: 1200 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			s.Next("list", f, f) // a call that reads is tried once more
			began := time.Now()
			all, err := c.Domains(t.Context())
			switch {
			case f.Twice:
				if err != nil || len(all) != 1 {
					t.Errorf("%v, %v", all, err)
				}
			case err == nil:
				t.Errorf("it worked: %v", all)
			case !errors.Is(err, virt.ErrDisconnected) && !errors.Is(err, virt.ErrTimeout):
				t.Errorf("%v is neither ErrDisconnected nor ErrTimeout", err)
			}
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("took %v", took)
			}
			s.Next("list") // nothing
			for {          // faults that were not used up
				if _, err = c.State(t.Context(), d); err == nil {
					break
				}
				ready(t, c)
			}
			for end := time.Now().Add(20 * time.Second); time.Now().Before(end); ready(t, c) {
				if all, err = c.Domains(t.Context()); err == nil {
					break
				}
			}
			if err != nil || len(all) != 1 {
				t.Errorf("afterwards: %v, %v", all, err)
			}
		})
	}
}

func TestGarbageAsAnswerToAChange(t *testing.T) {
	s, c := open(t, "xen", quick())
	d := started(t, c)
	for name, f := range map[string]virttest.Fault{
		"closed before": {Cut: true}, "closed after": {Do: true, Cut: true}, "text": {Raw: []byte("no idea what this is, but it is long enough")},
	} {
		s.Next("suspend", f)
		before := len(s.Calls())
		err := c.Suspend(t.Context(), d)
		if !errors.Is(err, virt.ErrUnknownOutcome) || !errors.Is(err, virt.ErrDisconnected) {
			t.Errorf("%s: %v", name, err)
		}
		n := 0
		for _, call := range s.Calls()[before:] {
			if call == "suspend" {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%s: sent %d times", name, n)
		}
	}
}

// libvirtd is killed and started again, over and over, under load.
func TestRestarts(t *testing.T) {
	s, c := open(t, "xen", quick())
	d := started(t, c)
	sub := c.Subscribe()
	defer sub.Close()
	next := func() virt.Event {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		e, err := sub.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	if e := next(); e.Kind != virt.Resync {
		t.Fatalf("first event: %v", e.Kind)
	}
	stop := make(chan struct{})
	var load sync.WaitGroup
	defer load.Wait()
	defer close(stop)
	for range 4 {
		load.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				_, err := c.XML(t.Context(), d, 0)
				if err != nil && !errors.Is(err, virt.ErrDisconnected) {
					t.Errorf("under load: %v", err)
				}
				if err != nil {
					time.Sleep(time.Millisecond) // what a caller does before it tries again
				}
			}
		})
	}
	for range 5 {
		s.Down()
		testkit.Until(t, "it is known to be down", func() error {
			up, _ := c.Up()
			return testkit.Want(!up)
		})
		began := time.Now()
		if err := c.Suspend(t.Context(), d); !errors.Is(err, virt.ErrDisconnected) || errors.Is(err, virt.ErrUnknownOutcome) {
			t.Errorf("while down: %v", err)
		}
		if took := time.Since(began); took > 900*time.Millisecond { // it would wait a second for libvirtd else
			t.Errorf("while down a call took %v", took)
		}
		s.Up()
		for next().Kind != virt.Resync { // what happened before may be told before
		}
		if err := c.Suspend(t.Context(), d); err != nil {
			t.Errorf("after a restart: %v", err)
		}
		for next().Kind != virt.Suspended {
		}
	}
}

// A stopped libvirtd is found out by asking, calls fail at once from then on,
// and all is well when it goes on.
func TestFrozenDaemon(t *testing.T) {
	s, c := open(t, "xen", quick())
	d := started(t, c)
	sub := c.Subscribe()
	defer sub.Close()
	s.Freeze()
	testkit.Until(t, "it is known to be down", func() error {
		up, _ := c.Up()
		return testkit.Want(!up)
	})
	if up, err := c.Up(); up || !errors.Is(err, virt.ErrTimeout) {
		t.Errorf("up %v, %v", up, err)
	}
	began := time.Now()
	err := c.Suspend(t.Context(), d)
	if !errors.Is(err, virt.ErrDisconnected) || time.Since(began) > 100*time.Millisecond {
		t.Errorf("%v after %v", err, time.Since(began))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := c.Ready(ctx); !errors.Is(err, virt.ErrDisconnected) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ready: %v", err)
	}
	s.Thaw()
	ready(t, c)
	if err := c.Suspend(t.Context(), d); err != nil {
		t.Error(err)
	}
}

func TestCloseEndsEverything(t *testing.T) {
	s, c := open(t, "xen", virt.Timeouts{})
	d := started(t, c)
	sub := c.Subscribe()
	s.Always("destroy", &virttest.Fault{Silent: true})
	failed := make(chan error, 3)
	for range 3 {
		go func() { failed <- c.Destroy(t.Context(), d) }()
	}
	testkit.Until(t, "three calls are under way", func() error {
		n := 0
		for _, call := range s.Calls() {
			if call == "destroy" {
				n++
			}
		}
		return testkit.Want(n == 3, n)
	})
	c.Close()
	for range 3 {
		if err := <-failed; !errors.Is(err, virt.ErrClosed) || !errors.Is(err, virt.ErrUnknownOutcome) {
			t.Error(err)
		}
	}
	for {
		_, err := sub.Next(t.Context())
		if errors.Is(err, virt.ErrClosed) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Suspend(t.Context(), d); !errors.Is(err, virt.ErrClosed) {
		t.Error(err)
	}
	if err := c.Ready(t.Context()); !errors.Is(err, virt.ErrClosed) {
		t.Error(err)
	}
	if _, err := c.Subscribe().Next(t.Context()); !errors.Is(err, virt.ErrClosed) {
		t.Error(err)
	}
	c.Close()
}

func TestEventsTellTheStory(t *testing.T) {
	_, c := open(t, "xen", quick())
	sub := c.Subscribe()
	defer sub.Close()
	d := started(t, c)
	if err := c.Destroy(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	seen := map[virt.EventKind]bool{}
	for !seen[virt.Resync] || !seen[virt.Defined] || !seen[virt.Started] || !seen[virt.Stopped] {
		e, err := sub.Next(ctx)
		if err != nil {
			t.Fatalf("%v; seen %v", err, seen)
		}
		if e.Kind != virt.Resync && e.Domain.Name != "vm1" {
			t.Errorf("event of %q", e.Domain.Name)
		}
		seen[e.Kind] = true
	}
}

func TestASlowSubscriberIsToldToLook(t *testing.T) {
	_, c := open(t, "xen", virt.Timeouts{})
	sub, quick := c.Subscribe(), c.Subscribe()
	defer sub.Close()
	defer quick.Close()
	d := started(t, c)
	arrived := func(kind virt.EventKind) {
		for {
			e, err := quick.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if e.Kind == kind {
				return
			}
		}
	}
	for range 600 {
		if err := c.Suspend(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		arrived(virt.Suspended)
		if err := c.Resume(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		arrived(virt.Resumed)
	}
	resyncs, n := 0, 0
	for {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		e, err := sub.Next(ctx)
		cancel()
		if err != nil {
			break
		}
		n++
		if e.Kind == virt.Resync {
			resyncs++
		}
	}
	if n > 1024 || resyncs == 0 {
		t.Errorf("%d events, %d of them resyncs", n, resyncs)
	}
}

func pair(t *testing.T, driver string, limits virt.Timeouts) (a, b *virttest.Server, ca, cb *virt.Client, uri string) {
	t.Helper()
	a, ca = open(t, driver, limits)
	b, cb = open(t, driver, limits)
	uri = driver + "+tcp://b/system"
	a.Peer(uri, b)
	return a, b, ca, cb, uri
}

func TestMigrate(t *testing.T) {
	_, _, ca, cb, uri := pair(t, "qemu", quick())
	d := started(t, ca)
	sub := cb.Subscribe()
	defer sub.Close()
	jobs := 0
	err := ca.Migrate(t.Context(), d, virt.Migration{
		Destination: uri, Bandwidth: 10, XML: domainXML("vm1", uuid1), Every: 10 * time.Millisecond,
		Progress: func(j virt.Job) {
			jobs++
			if j.Elapsed != 100*time.Millisecond || j.Total != 1<<20 && j.Processed != 0 {
				t.Errorf("job %+v", j)
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if jobs == 0 {
		t.Error("no progress was reported")
	}
	if st, err := cb.State(t.Context(), d); err != nil || st != virt.Running {
		t.Errorf("there: %v, %v", st, err)
	}
	if st, err := ca.State(t.Context(), d); err != nil || st != virt.ShutOff {
		t.Errorf("here: %v, %v", st, err)
	}
	for {
		e, err := sub.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if e.Migrated() {
			break
		}
	}
}

// When time is up, qemu's migration is aborted and known to be undone, Xen's
// can't be and its outcome is unknown.
func TestMigrateOutOfTime(t *testing.T) {
	for driver, known := range map[string]bool{"qemu": true, "xen": false} {
		t.Run(driver, func(t *testing.T) {
			_, b, ca, cb, uri := pair(t, driver, quick())
			d := started(t, ca)
			err := ca.Migrate(t.Context(), d, virt.Migration{Destination: uri, Limit: 200 * time.Millisecond})
			if !errors.Is(err, virt.ErrTimeout) || errors.Is(err, virt.ErrUnknownOutcome) == known || errors.Is(err, virt.ErrAborted) != known {
				t.Errorf("%v", err)
			}
			if !known {
				return
			}
			if st, err := ca.State(t.Context(), d); err != nil || st != virt.Running {
				t.Errorf("here: %v, %v", st, err)
			}
			if _, err := cb.State(t.Context(), d); !errors.Is(err, virt.ErrNotFound) {
				t.Errorf("there: %v, %v", b.Devices("vm1"), err)
			}
		})
	}
}

// More calls hang than there are connections: the next one says so in time.
func TestAllConnectionsHang(t *testing.T) {
	limits := quick()
	limits.Change = 5 * time.Second
	s, c := open(t, "xen", limits)
	d := started(t, c)
	s.Always("destroy", &virttest.Fault{Silent: true})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() { c.Destroy(ctx, d) })
	}
	testkit.Until(t, "all connections are in use", func() error { return testkit.Want(s.Conns() >= 33, s.Conns()) })
	if _, err := c.State(t.Context(), d); !errors.Is(err, virt.ErrTimeout) || !strings.Contains(err.Error(), "connections") {
		t.Error(err)
	}
	cancel()
	wg.Wait()
	if _, err := c.State(t.Context(), d); err != nil {
		t.Error(err)
	}
}

func TestNobodyListens(t *testing.T) {
	dir := t.TempDir()
	c, err := virt.Open("xen:///system", virt.WithSocket(dir+"/none"), virt.WithTimeouts(quick()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	began := time.Now()
	_, err = c.Define(t.Context(), domainXML("vm1", uuid1))
	if !errors.Is(err, virt.ErrDisconnected) || errors.Is(err, virt.ErrUnknownOutcome) || time.Since(began) > time.Second {
		t.Errorf("after %v: %v", time.Since(began), err)
	}
	for _, w := range []string{`define "vm1"`, "is libvirtd running?", dir + "/none"} {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%v does not say %q", err, w)
		}
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("%q has two lines", err)
	}
}

// What a lost source has left is ended by the word that libvirt waits for, and
// by nothing else; what runs is not.
func TestCancelArrival(t *testing.T) {
	s, c := open(t, "xen", quick())
	d := started(t, c)
	if err := c.CancelArrival(t.Context(), d); !errors.Is(err, virt.ErrState) {
		t.Errorf("of a domain that runs: %v", err)
	}
	s.Arrive(d.Name)
	if err := c.Destroy(t.Context(), d); err == nil || !strings.Contains(err.Error(), "state change lock") {
		t.Errorf("destroyed: %v", err)
	}
	if err := c.CancelArrival(t.Context(), d); err != nil {
		t.Error(err)
	}
	if _, err := c.LookupUUID(t.Context(), d.UUID); !errors.Is(err, virt.ErrNotFound) {
		t.Errorf("it is still there: %v", err)
	}
	if err := c.CancelArrival(t.Context(), d); !errors.Is(err, virt.ErrNotFound) {
		t.Errorf("again: %v", err)
	}
}
