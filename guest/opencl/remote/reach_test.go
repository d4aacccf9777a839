package remote

import (
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/relay"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// silent is a relay that takes connections and says nothing. It tells of each.
func silent(t *testing.T) (socket string, came <-chan net.Conn) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "relay")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	out := make(chan net.Conn, 8)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			out <- conn
		}
	}()
	return socket, out
}

// The network of a VM is gone for a moment, and its host does not answer either, as the VM is on
// its way to another one. The far host is reached as soon as the network is back.
func TestSilentAddressDoesNotKeepTheOthersWaiting(t *testing.T) {
	for _, c := range []struct {
		name   string
		order  func(far string) []string
		resets bool // the far address takes connections, and ends them
	}{
		{"after one that refuses", func(far string) []string { return []string{far, relay.Prefix + far} }, false},
		{"after one that resets", func(far string) []string { return []string{far, relay.Prefix + far} }, true},
		{"before one that refuses", func(far string) []string { return []string{relay.Prefix + far, far} }, false},
		{"before one that resets", func(far string) []string { return []string{relay.Prefix + far, far} }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, a := ends(t)
			l, err := net.Listen("tcp", "127.0.7.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			far := l.Addr().String()
			if c.resets {
				go func() {
					for {
						conn, err := l.Accept()
						if err != nil {
							return
						}
						conn.Close()
					}
				}()
			} else {
				l.Close()
			}
			d.Addresses, d.Timeout = c.order(far), time.Hour
			var came <-chan net.Conn
			d.Relay, came = silent(t)
			dialled := make(chan error, 1)
			go func() {
				conn, err := d.Dial(testkit.Context(t), Bulk)
				if err == nil {
					conn.Close()
				}
				dialled <- err
			}()
			hangs := <-came
			defer hangs.Close()
			l.Close()
			back, err := net.Listen("tcp", far)
			if err != nil {
				t.Fatal(err)
			}
			result := serveOn(t, back, a, nil)
			if err := <-dialled; err != nil {
				t.Fatal(err)
			}
			if err := <-result; err != nil {
				t.Error(err)
			}
			if got := d.Addresses[d.reached.Load()]; got != far {
				t.Errorf("%s was reached", got)
			}
		})
	}
}

// Who takes a connection and does not answer has its time once.
func TestWhoDoesNotAnswerIsGivenUp(t *testing.T) {
	d, _ := ends(t)
	for range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0") // the kernel takes connections
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		d.Addresses = append(d.Addresses, l.Addr().String())
	}
	d.Timeout = 20 * time.Millisecond
	_, err := d.Dial(testkit.Context(t), Bulk)
	if !errors.Is(err, ErrSilent) {
		t.Fatal(err)
	}
	for _, a := range d.Addresses {
		if !strings.Contains(err.Error(), a+": ") {
			t.Errorf("%v says nothing of %s", err, a)
		}
	}
}

func TestEveryAddressThatFailedIsNamed(t *testing.T) {
	d, _ := ends(t)
	d.Addresses = []string{"127.0.7.1:1", "127.0.7.2:1", relay.Prefix + "127.0.7.3:1"}
	_, err := d.Dial(testkit.Context(t), Bulk)
	if err == nil {
		t.Fatal("it was reached")
	}
	for _, a := range d.Addresses {
		if !strings.Contains(err.Error(), a+": ") {
			t.Errorf("%v says nothing of %s", err, a)
		}
	}
	if !errors.Is(err, errNoRelay) || errors.Is(err, ErrSilent) {
		t.Error(err)
	}
}

// moment is a moment of a race, and whether an address may be tried then.
type moment struct {
	left   []int
	passed time.Duration
	failed map[int]error
	want   bool
}

// begins expects an address to be tried as the moments say.
func begins(t *testing.T, d *Dialer, n int, moments map[string]moment) {
	t.Helper()
	for name, c := range moments {
		r := &race{d: d, left: c.left, since: time.Now().Add(-c.passed), failed: c.failed}
		if got := r.mayBegin(n); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// RDMA is tried before TCP, where it may be there.
func TestRDMAComesFirst(t *testing.T) {
	got := WithRDMA([]string{"a:1", relay.Prefix + "a:1", RDMAPrefix + "b:1"})
	if want := []string{RDMAPrefix + "a:1", "a:1", relay.Prefix + "a:1", RDMAPrefix + "b:1"}; !slices.Equal(got, want) {
		t.Fatalf("%v, not %v", got, want)
	}
	broken := errors.New("broken")
	d := &Dialer{Addresses: got[:3]}
	begins(t, d, 1, map[string]moment{
		"at once":             {[]int{0, 1, 2}, 0, nil, false},
		"RDMA has failed":     {[]int{0, 1, 2}, 0, map[int]error{0: broken}, true},
		"RDMA is silent":      {[]int{0, 1, 2}, rdmaFirst, nil, true},
		"it was reached last": {[]int{1, 2, 0}, 0, nil, true},
		"RDMA was given up":   {[]int{2, 1}, 0, nil, true},
	})
}

// A carrier asks gpuguest for a way over RDMA, and takes TCP if there is none.
func TestWithoutRDMATheCarrierTakesTCP(t *testing.T) {
	d, a := ends(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	result := serveOn(t, l, a, nil)
	d.Addresses = WithRDMA([]string{l.Addr().String()})
	var asked <-chan net.Conn
	d.RDMA, asked = silent(t)
	go func() {
		conn := <-asked
		_, _ = conn.Write([]byte("no device\n"))
		conn.Close()
	}()
	conn, err := d.Dial(testkit.Context(t), Bulk)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if err := <-result; err != nil {
		t.Error(err)
	}
}

// The way through the VM's host is slower, and is kept to once it has been taken.
func TestWayThroughTheHostComesLast(t *testing.T) {
	broken := errors.New("broken")
	d := &Dialer{Addresses: []string{"a:1", "b:1", relay.Prefix + "a:1"}}
	begins(t, d, 2, map[string]moment{
		"at once":                         {[]int{0, 1, 2}, 0, nil, false},
		"one has failed":                  {[]int{0, 1, 2}, 0, map[int]error{1: broken}, false},
		"all others have failed":          {[]int{0, 1, 2}, 0, map[int]error{0: broken, 1: broken}, true},
		"the others are silent":           {[]int{0, 1, 2}, relayAfter, nil, true},
		"it was reached last":             {[]int{2, 0, 1}, 0, nil, true},
		"it is the only one that is left": {[]int{2}, 0, nil, true},
	})
}
