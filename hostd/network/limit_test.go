package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// namespace is a network of its own.
type namespace struct {
	t  testing.TB
	fd int
}

func newNamespace(t testing.TB) namespace {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, for network namespaces")
	}
	type made struct {
		fd  int
		err error
	}
	got := make(chan made)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with us
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			got <- made{err: err}
			return
		}
		fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		got <- made{fd, err}
	}()
	m := <-got
	if errors.Is(m.err, unix.EPERM) {
		t.Skip("no network namespaces here")
	} else if m.err != nil {
		t.Fatal(m.err)
	}
	t.Cleanup(func() { _ = unix.Close(m.fd) })
	return namespace{t, m.fd}
}

// do runs f on a thread that is in the namespace. Sockets made there stay there.
func (n namespace) do(f func() error) {
	n.t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(n.fd, unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	if err := <-done; err != nil {
		n.t.Fatal(err)
	}
}

// pair is two hosts joined by a cable: 10.9.0.1 and 10.9.0.2, fd09::1 and ::2.
type pair struct {
	a, b namespace
	host *Host // on a
}

func newPair(t testing.TB) *pair {
	t.Helper()
	p := &pair{a: newNamespace(t), b: newNamespace(t)}
	p.a.do(func() error {
		err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0", MTU: 1500, TxQLen: 1000}, PeerName: "v1", PeerNamespace: netlink.NsFd(p.b.fd)})
		return errors.Join(err, address("v0", "10.9.0.1/24", "10.9.0.3/24", "fd09::1/64"))
	})
	p.b.do(func() error { return address("v1", "10.9.0.2/24", "10.9.0.4/24", "fd09::2/64") })
	p.open()
	return p
}

func (p *pair) open() {
	p.a.t.Helper()
	p.a.do(func() (err error) {
		p.host, err = Open(fstest.MapFS{"sys/class/net/v0/speed": &fstest.MapFile{Data: []byte("10000\n")}})
		return err
	})
	p.a.t.Cleanup(p.host.Close)
}

func address(name string, addresses ...string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, s := range addresses {
		a, err := netlink.ParseAddr(s)
		if err != nil {
			return err
		}
		a.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(l, a); err != nil {
			return err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetUp(lo), netlink.LinkSetUp(l))
}

// listen takes all that comes to an address of host b and counts it.
func (p *pair) listen(at string) {
	p.b.t.Helper()
	var l net.Listener
	p.b.do(func() (err error) {
		l, err = net.Listen("tcp", at)
		return err
	})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			// A cable that was cut says nothing.
			cut := context.AfterFunc(ctx, func() { _ = c.Close() })
			_, _ = io.Copy(io.Discard, c)
			cut()
			_ = c.Close()
		}
	}()
	p.b.t.Cleanup(func() { stop(); _ = l.Close(); <-done })
}

// send pushes data to an address for a while and returns the rate in bits per
// second, as the other side has acknowledged it.
func (p *pair) send(to string, d time.Duration) float64 {
	p.a.t.Helper()
	var c net.Conn
	p.a.do(func() (err error) {
		c, err = net.DialTimeout("tcp", to, 5*time.Second)
		return err
	})
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		p.a.t.Fatal(err)
	}
	acked := func() (n uint64) {
		_ = raw.Control(func(fd uintptr) {
			if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
				n = info.Bytes_acked
			}
		})
		return n
	}
	buf := make([]byte, 64<<10)
	write := func(until time.Time) {
		_ = c.SetWriteDeadline(until)
		for time.Now().Before(until) {
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	}
	write(time.Now().Add(300 * time.Millisecond)) // the burst is over
	began, before := time.Now(), acked()
	write(began.Add(d))
	return float64(acked()-before) * 8 / time.Since(began).Seconds()
}

const mbit = 1_000_000

func TestLimit(t *testing.T) {
	p := newPair(t)
	p.listen("10.9.0.2:4000")
	p.listen("10.9.0.2:4001")
	p.listen("[fd09::2]:4000")
	ctx := t.Context()
	c, err := p.host.Limit(ctx, Limit{Link: "v0", To: netip.MustParseAddr("10.9.0.2"), Port: 4000, Rate: 80 * mbit})
	if err != nil {
		t.Fatal(err)
	}
	c6, err := p.host.Limit(ctx, Limit{Link: "v0", To: netip.MustParseAddr("fd09::2"), Port: 4000, Rate: 40 * mbit})
	if err != nil {
		t.Fatal(err)
	}
	// A machine with much else to do can be too slow, never too fast.
	near := func(what, to string, want float64) {
		t.Helper()
		var got float64
		for range 3 {
			got = p.send(to, 2*time.Second)
			t.Logf("%s: %.1f Mbit/s", what, got/mbit)
			if got >= 0.85*want {
				break
			}
		}
		if got < 0.85*want || got > 1.15*want {
			t.Errorf("%s: %.1f Mbit/s, not %.1f", what, got/mbit, want/mbit)
		}
	}
	began := time.Now()
	near("IPv4", "10.9.0.2:4000", 80*mbit)
	took := time.Since(began).Seconds()
	near("IPv6", "[fd09::2]:4000", 40*mbit)
	if got := p.send("10.9.0.2:4001", 500*time.Millisecond); got < 160*mbit {
		t.Errorf("another port has %.1f Mbit/s", got/mbit)
	}
	// What the class counts is what was sent, headers included.
	sent, rate, err := p.host.Sent(ctx, c)
	if got := float64(sent) * 8 / took; err != nil || rate != 80*mbit || got < 0.8*80*mbit || got > 1.2*80*mbit {
		t.Errorf("%d bytes in %.1f s at %d bit/s, %v", sent, took, rate, err)
	}
	if err := p.host.Change(ctx, c, 160*mbit); err != nil {
		t.Fatal(err)
	}
	near("changed", "10.9.0.2:4000", 160*mbit)
	if more, _, err := p.host.Sent(ctx, c); err != nil || more <= sent {
		t.Errorf("a change of rate has the count begin anew: %d, then %d (%v)", sent, more, err)
	}
	if err := p.host.Remove(ctx, c); err != nil {
		t.Fatal(err)
	}
	if got := p.send("10.9.0.2:4000", 500*time.Millisecond); got < 320*mbit {
		t.Errorf("without the limit it has %.1f Mbit/s", got/mbit)
	}
	if _, _, err := p.host.Sent(ctx, c); !errors.Is(err, ErrGone) {
		t.Error(err)
	}
	if err := p.host.Remove(ctx, c); err != nil { // once more
		t.Error(err)
	}
	if err := p.host.Remove(ctx, c6); err != nil {
		t.Error(err)
	}
	p.untouched()
}

// untouched says that nothing of ours is left on host a.
func (p *pair) untouched() {
	p.a.t.Helper()
	p.a.do(func() error {
		l, err := netlink.LinkByName("v0")
		if err != nil {
			return err
		}
		all, err := netlink.QdiscList(l)
		if err != nil {
			return err
		}
		for _, q := range all {
			if q.Attrs().Handle>>16 == major {
				return fmt.Errorf("left behind: %v", q)
			}
		}
		return nil
	})
}

// A hostd is killed: the next one finds its limits, keeps one and lifts the rest.
func TestReconcile(t *testing.T) {
	p := newPair(t)
	ctx := t.Context()
	var caps []Cap
	for port := range uint16(3) {
		c, err := p.host.Limit(ctx, Limit{Link: "v0", To: netip.MustParseAddr("10.9.0.2"), Port: 4000 + port, Rate: mbit})
		if err != nil {
			t.Fatal(err)
		}
		caps = append(caps, c)
	}
	p.open()
	if all, err := p.host.Limits(ctx); err != nil || len(all) != 3 || all[1] != caps[1] {
		t.Errorf("%v, %v", all, err)
	}
	lifted, err := p.host.Reconcile(ctx, caps[1:2])
	if err != nil || len(lifted) != 2 {
		t.Errorf("lifted %v, %v", lifted, err)
	}
	if _, rate, err := p.host.Sent(ctx, caps[1]); err != nil || rate != mbit {
		t.Errorf("the one to keep: %d, %v", rate, err)
	}
	// The numbers of those that are gone are used again.
	if c, err := p.host.Limit(ctx, Limit{Link: "v0", To: netip.MustParseAddr("10.9.0.4"), Rate: mbit}); err != nil || c != caps[0] {
		t.Errorf("%v, %v", c, err)
	}
	if _, err := p.host.Reconcile(ctx, nil); err != nil {
		t.Error(err)
	}
	p.untouched()
	// Killed when there was a discipline and no class yet.
	p.a.do(func() error {
		l, err := netlink.LinkByName("v0")
		if err != nil {
			return err
		}
		return netlink.QdiscAdd(qdisc(l))
	})
	if lifted, err := p.host.Reconcile(ctx, nil); err != nil || len(lifted) > 0 {
		t.Errorf("lifted %v, %v", lifted, err)
	}
	p.untouched()
}

// What the operator set up is not touched.
func TestAnothersDisciplineStays(t *testing.T) {
	p := newPair(t)
	var before netlink.Qdisc
	p.a.do(func() error {
		l, err := netlink.LinkByName("v0")
		if err != nil {
			return err
		}
		before = &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}, Rate: 1 << 20, Limit: 1 << 20, Buffer: 1 << 16}
		return netlink.QdiscAdd(before)
	})
	l := Limit{Link: "v0", To: netip.MustParseAddr("10.9.0.2"), Port: 4000, Rate: mbit}
	if _, err := p.host.Limit(t.Context(), l); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "v0 has tbf 1:0") {
		t.Error(err)
	}
	if err := p.host.Remove(t.Context(), Cap{"v0", 1}); err != nil {
		t.Error(err)
	}
	if _, err := p.host.Reconcile(t.Context(), nil); err != nil {
		t.Error(err)
	}
	p.a.do(func() error {
		link, err := netlink.LinkByName("v0")
		if err != nil {
			return err
		}
		all, err := netlink.QdiscList(link)
		if err != nil || len(all) != 1 || all[0].Type() != "tbf" {
			return fmt.Errorf("left are %v, %w", all, err)
		}
		return nil
	})
}

func TestLimitsThatMakeNoSense(t *testing.T) {
	p := newPair(t)
	to := netip.MustParseAddr("10.9.0.2")
	for name, l := range map[string]Limit{
		"no address": {Link: "v0", Rate: mbit}, "group": {Link: "v0", To: netip.MustParseAddr("224.0.0.1"), Rate: mbit}, "nowhere": {Link: "v0", To: netip.IPv4Unspecified(), Rate: mbit},
		"no rate": {Link: "v0", To: to}, "too fast": {Link: "v0", To: to, Rate: 1 << 50},
	} {
		if c, err := p.host.Limit(t.Context(), l); err == nil {
			t.Errorf("%s: %v", name, c)
		}
	}
	if _, err := p.host.Limit(t.Context(), Limit{Link: "v9", To: to, Rate: mbit}); !errors.Is(err, ErrNoLink) {
		t.Error(err)
	}
	if err := p.host.Remove(t.Context(), Cap{"v9", 1}); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.host.Limit(ctx, Limit{Link: "v0", To: to, Rate: mbit}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	p.untouched()
}

// The fastest cards: the kernel has the rate that was asked for.
func TestFastLimits(t *testing.T) {
	p := newPair(t)
	for _, rate := range []uint64{minRate, 10_000 * mbit, 34_359_738_368, 100_000 * mbit, 400_000 * mbit, maxRate} {
		c, err := p.host.Limit(t.Context(), Limit{Link: "v0", To: netip.MustParseAddr("10.9.0.2"), Port: 1, Rate: rate})
		if err != nil {
			t.Errorf("%d: %v", rate, err)
			continue
		}
		if _, got, err := p.host.Sent(t.Context(), c); err != nil || got < rate || got > rate+8 {
			t.Errorf("%d became %d (%v)", rate, got, err)
		}
		if err := p.host.Remove(t.Context(), c); err != nil {
			t.Error(err)
		}
	}
}

func TestLinkOfThisKernel(t *testing.T) {
	p := newPair(t)
	// The kernel looks after carriers in its own time.
	link := func(carrier bool) (l Link, err error) {
		testkit.Until(t, fmt.Sprint("carrier: ", carrier), func() error {
			l, err = p.host.Link(t.Context(), "v0")
			return testkit.Want(err != nil || l.Carrier == carrier, l)
		})
		return l, err
	}
	l, err := link(true)
	if err != nil || l.Kind != "veth" || !l.Up || !l.Carrier || l.Speed != 10_000*mbit || l.MTU != 1500 || len(l.Problems) > 0 {
		t.Errorf("%+v, %v", l, err)
	}
	p.listen("10.9.0.2:4000")
	p.send("10.9.0.2:4000", 50*time.Millisecond)
	after, err := p.host.Link(t.Context(), "v0")
	if err != nil || after.Counters.TxBytes <= l.Counters.TxBytes {
		t.Errorf("%+v, %v", after, err)
	}
	p.b.do(func() error {
		v1, err := netlink.LinkByName("v1")
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(v1)
	})
	if l, err = link(false); err != nil || l.Carrier || len(l.Problems) != 1 || !strings.Contains(l.Problems[0], "no carrier") {
		t.Errorf("%+v, %v", l, err)
	}
	if _, err := p.host.Link(t.Context(), "v9"); !errors.Is(err, ErrNoLink) {
		t.Error(err)
	}
}

// tc(8) of the machine reads what we set.
func TestWhatTcSays(t *testing.T) {
	p := newPair(t)
	tc, err := exec.LookPath("tc")
	if err != nil {
		t.Fatal("no tc here: make setup")
	}
	if _, err := p.host.Limit(t.Context(), Limit{Link: "v0", To: netip.MustParseAddr("10.9.0.2"), Port: 49152, Rate: 80 * mbit}); err != nil {
		t.Fatal(err)
	}
	var out []byte
	p.a.do(func() (err error) {
		out, err = exec.Command("sh", "-c", tc+" class show dev v0; "+tc+" filter show dev v0").CombinedOutput()
		return err
	})
	for _, part := range []string{"class htb 4750:1 root prio 0 rate 80Mbit ceil 80Mbit", "flowid 4750:1", "match 0a090002/ffffffff at 16", "match 0000c000/0000ffff at 20"} {
		if !strings.Contains(string(out), part) {
			t.Errorf("no %q in\n%s", part, out)
		}
	}
}
