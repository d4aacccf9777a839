package vchantest_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/vchan/vchantest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorder is a test whose errors are wanted.
type recorder struct {
	testing.TB
	errors   []string
	cleanups []func()
}

func (r *recorder) Helper()                   {}
func (r *recorder) Error(args ...any)         { r.errors = append(r.errors, fmt.Sprint(args...)) }
func (r *recorder) Errorf(f string, a ...any) { r.errors = append(r.errors, fmt.Sprintf(f, a...)) }
func (r *recorder) Cleanup(f func())          { r.cleanups = append(r.cleanups, f) }

// end runs what the end of the test runs and checks what it complained of.
func (r *recorder) end(t *testing.T, want ...string) {
	t.Helper()
	for i := len(r.cleanups) - 1; i >= 0; i-- {
		r.cleanups[i]()
	}
	if len(r.errors) != len(want) {
		t.Fatalf("%q, want %q", r.errors, want)
	}
	for i, w := range want {
		if !strings.Contains(r.errors[i], w) {
			t.Errorf("%q, want %q", r.errors[i], w)
		}
	}
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func TestGrants(t *testing.T) {
	h := vchantest.New(t, nil)
	guest, dom0, other := h.Domain(5), h.Domain(0), h.Domain(6)
	m := must[vchan.Memory](t)(guest.Grant(0, 2))
	refs := m.Refs()
	for name, c := range map[string]struct {
		who  *vchantest.Domain
		of   uint16
		refs []uint32
	}{
		"another domain": {other, 5, refs},
		"of another":     {dom0, 6, refs},
		"of nobody":      {dom0, 99, refs},
		"no such grant":  {dom0, 5, []uint32{refs[0], refs[1] + 1}},
	} {
		if _, err := c.who.Map(c.of, c.refs, true); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %v", name, err)
		}
	}
	swapped := must[vchan.Memory](t)(dom0.Map(5, []uint32{refs[1], refs[0]}, false))
	copy(m.Bytes()[4096:], "second")
	if got := string(swapped.Bytes()[:6]); got != "second" {
		t.Errorf("%q", got)
	}
	// What somebody maps counts until nobody does.
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := dom0.Map(5, refs, true); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a grant that was taken back: %v", err)
	}
	if _, err := guest.Grant(0, 1023); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("more than the limit: %v", err)
	}
	if err := swapped.Close(); err != nil {
		t.Fatal(err)
	}
	if err := must[vchan.Memory](t)(guest.Grant(0, 1024)).Close(); err != nil {
		t.Error(err)
	}
}

func TestPorts(t *testing.T) {
	h := vchantest.New(t, nil)
	guest, dom0, other := h.Domain(5), h.Domain(0), h.Domain(6)
	p := must[vchan.Port](t)(guest.BindUnbound(0))
	if _, err := other.BindInterdomain(5, p.Number()); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a port that is not meant for it: %v", err)
	}
	q := must[vchan.Port](t)(dom0.BindInterdomain(5, p.Number()))
	if _, err := dom0.BindInterdomain(5, p.Number()); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a port that is bound: %v", err)
	}
	if err := errors.Join(q.Wait(), q.Notify(), q.Notify(), p.Wait()); err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() { waited <- p.Wait() }()
	select {
	case <-waited:
		t.Error("two events before a Wait are two")
	case <-time.After(20 * time.Millisecond):
	}
	// The end of one side leaves the other unbound, without an event.
	if err := errors.Join(q.Close(), p.Notify()); err != nil {
		t.Error(err)
	}
	q = must[vchan.Port](t)(dom0.BindInterdomain(5, p.Number()))
	if err := errors.Join(p.Close(), q.Close()); err != nil {
		t.Error(err)
	}
	if err := <-waited; !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}

// A process that dies clears its byte and sends its event.
func TestKill(t *testing.T) {
	h := vchantest.New(t, nil)
	guest, dom0 := h.Domain(5), h.Domain(0)
	p := must[vchan.Port](t)(guest.BindUnbound(0))
	m := must[vchan.Memory](t)(guest.Grant(0, 1))
	if err := m.NotifyOnUnmap(9, p.Number()+1); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a port that it has not: %v", err)
	}
	if err := m.NotifyOnUnmap(9, p.Number()); err != nil {
		t.Fatal(err)
	}
	q := must[vchan.Port](t)(dom0.BindInterdomain(5, p.Number()))
	seen := must[vchan.Memory](t)(dom0.Map(5, m.Refs(), true))
	m.Bytes()[9], m.Bytes()[10] = 1, 2
	if err := q.Wait(); err != nil { // of the binding
		t.Fatal(err)
	}
	guest.Kill()
	if err := q.Wait(); err != nil {
		t.Fatal(err)
	}
	m.Bytes()[10] = 3 // by a process that is dead
	if b := seen.Bytes(); b[9] != 0 || b[10] != 2 {
		t.Error(b[9:11])
	}
	if err := errors.Join(seen.Close(), q.Close()); err != nil {
		t.Error(err)
	}
}

func TestComplaints(t *testing.T) {
	r := &recorder{TB: t}
	h := vchantest.New(r, nil)
	must[vchan.Port](t)(h.Domain(0).BindUnbound(5))
	must[vchan.Memory](t)(h.Domain(5).Grant(0, 3))
	r.end(t, "domain 5 still has 3 pages", "domain 0 still has port 1")

	r = &recorder{TB: t}
	guest := vchantest.New(r, nil).Domain(5)
	p := must[vchan.Port](t)(guest.BindUnbound(0))
	m := must[vchan.Memory](t)(guest.Grant(0, 1))
	plain := must[vchan.Memory](t)(guest.Grant(0, 1))
	if err := m.NotifyOnUnmap(0, p.Number()); err != nil {
		t.Fatal(err)
	}
	guest.Migrate(6)
	_ = plain.Close()
	_ = m.Close()
	_ = p.Close()
	r.end(t, "closes another device's", "kernel BUG")

	r = &recorder{TB: t}
	guest = vchantest.New(r, nil).Domain(5)
	p = must[vchan.Port](t)(guest.BindUnbound(0))
	m = must[vchan.Memory](t)(guest.Grant(0, 1))
	guest.Migrate(6)
	m.Abandon()
	p.Abandon()
	if err := p.Wait(); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
	r.end(t)
}
