package access

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// Limits are what one caller may use of this host at a time. A caller is the user of a
// local process, a user of the cluster, a host, or an anonymous caller's address.
type Limits struct {
	Calls   int           // calls in progress
	Streams int           // of these, streams that go on until somebody ends them
	Body    int64         // largest request in bytes; 0: the limit of its procedure
	Time    time.Duration // time in which a request must have arrived; 0: not limited
}

// LimitsOf returns the limits of a caller. Hosts send states of VMs, and forward the
// calls of their own callers.
func LimitsOf(c Caller) Limits {
	switch {
	case c.Kind == Host:
		return Limits{Calls: 2048, Streams: 1024}
	case c.Kind == Anonymous:
		return Limits{Calls: 32, Streams: 1, Body: 32 << 10, Time: 10 * time.Second}
	case c.Role == clusterv1.Role_ROLE_ADMIN:
		return Limits{Calls: 512, Streams: 256, Body: 1 << 20, Time: 30 * time.Second}
	}
	return Limits{Calls: 64, Streams: 32, Body: 1 << 20, Time: 30 * time.Second}
}

// key returns a key that is the same for all callers whose calls are counted together.
func (c Caller) key() string {
	if c.Kind != Anonymous {
		return c.Kind.String() + " " + c.ID
	}
	host, _, err := net.SplitHostPort(c.Address)
	if err != nil {
		return c.Address
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.Unmap().Is6() {
		if p, err := ip.WithZone("").Prefix(64); err == nil { // one subscriber of IPv6 has a /64 network
			return p.String()
		}
	}
	return host
}

// counter counts what is in progress, by caller.
type counter struct {
	mu sync.Mutex
	n  map[string]int
}

// take adds one to the caller's count, unless the count is most already. give subtracts
// it.
func (c *counter) take(key string, most int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n[key] >= most {
		return false
	}
	if c.n == nil {
		c.n = map[string]int{}
	}
	c.n[key]++
	return true
}

func (c *counter) give(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n[key]--; c.n[key] == 0 {
		delete(c.n, key)
	}
}

// count counts a call or stream of a caller, or returns an error if there are too many.
// The caller of count calls end afterwards.
func (g *Gate) count(in *counter, c Caller, what string, most int) (end func(), err *connect.Error) {
	key := c.key()
	if !in.take(key, most) {
		// The call may succeed later, so clients repeat it.
		code := reason.TooManyCalls
		if c.Kind == Anonymous {
			code = reason.TooManyFromStranger
		}
		return nil, reason.Refuse(reason.Errorf(code, "%s has %d %s under way, as many as it may", c, most, what).Do("wait until one has ended"))
	}
	return func() { in.give(key) }, nil
}

// restrict limits the size of a request's body, and the time for reading it.
func restrict(w http.ResponseWriter, r *http.Request, l Limits) {
	if r.Body == nil || r.Body == http.NoBody {
		return
	}
	if l.Body > 0 {
		r.Body = http.MaxBytesReader(w, r.Body, l.Body)
	}
	if l.Time > 0 {
		control := http.NewResponseController(w)
		if control.SetReadDeadline(time.Now().Add(l.Time)) == nil {
			r.Body = &timed{r.Body, control}
		}
	}
}

// compressed returns an error for a request that is compressed. A megabyte can unpack to
// a gigabyte, and would be unpacked to its end even if it is too large. No client of
// gpuctl compresses its requests.
func compressed(r *http.Request) *connect.Error {
	for _, name := range []string{"Content-Encoding", "Connect-Content-Encoding", "Grpc-Encoding"} {
		for _, how := range r.Header.Values(name) {
			if how != "" && how != "identity" {
				return reason.Refuse(reason.Errorf(reason.Invalid, "the request is compressed (%s: %.20q)", name, how).Do("send it as it is"))
			}
		}
	}
	return nil
}

// timed is a body with a read deadline. The deadline ends with the body, because the next
// bytes on the connection belong to another request.
type timed struct {
	io.ReadCloser

	control *http.ResponseController
}

// Read reads the body.
func (t *timed) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		_ = t.control.SetReadDeadline(time.Time{})
	}
	return n, err
}

// window permits failuresEach events in each minute.
type window struct {
	mu    sync.Mutex
	began time.Time
	n     int
}

const failuresEach = 100 // minute

func (w *window) allow(now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if d := now.Sub(w.began); d >= time.Minute || d < 0 {
		w.began, w.n = now, 0
	}
	w.n++
	return w.n <= failuresEach
}
