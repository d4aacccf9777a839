package remote

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/internal/reason"
)

const dialTimeout = 5 * time.Second

// Limits of a host's answer, in bytes.
const (
	maxAnswer       = 16 << 20 // the results of the largest request; each message of a stream
	maxAnswerHeader = 64 << 10
)

// Client returns an HTTP client for hosts, with this TLS configuration. Answers are
// bounded, whatever a host sends.
func Client(config *tls.Config) *http.Client {
	return newClient(bounded{transport(config, defaultPing)})
}

// newClient returns a client that does not follow redirections. A host could redirect a
// call to another host as a different call, which would have the rights of the caller.
func newClient(t http.RoundTripper) *http.Client {
	return &http.Client{
		Transport:     t,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Options limit what a host may answer to another host. Answers are not compressed: a
// few compressed bytes could keep the caller busy for long.
func Options() []connect.ClientOption {
	return []connect.ClientOption{connect.WithReadMaxBytes(maxAnswer), connect.WithAcceptCompression("gzip", nil, nil)}
}

// bounded ends the body of an answer that is too long. Connect reads the rest of a
// message that is too large, to its end. Streams have no limit as a whole.
type bounded struct{ *http.Transport }

// RoundTrip implements http.RoundTripper.
func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := b.Transport.RoundTrip(r)
	if err == nil && !strings.HasPrefix(res.Header.Get("Content-Type"), "application/connect+") {
		res.Body = &boundedBody{res.Body, maxAnswer + 1}
	}
	return res, err
}

type boundedBody struct {
	io.ReadCloser
	left int
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.EOF
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// HostClient does the same as Client, for a host that calls others. config returns the TLS
// configuration for the host at an address. A host that has been silent for ping is asked
// whether it is there; its connection is lost if it does not answer for as long. Zero: 2 s.
func HostClient(config func(address string) *tls.Config, ping time.Duration) *http.Client {
	t := transport(&tls.Config{MinVersion: tls.VersionTLS13}, cmp.Or(ping, defaultPing))
	t.DialTLSContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		c := config(address)
		c.NextProtos = t.TLSClientConfig.NextProtos
		return dial(ctx, network, address, c, false)
	}
	return newClient(bounded{t})
}

// defaultPing is how long a connection may be silent before the other end is asked, and
// then until it is lost.
const defaultPing = 2 * time.Second

func transport(config *tls.Config, ping time.Duration) *http.Transport {
	config = config.Clone()
	config.NextProtos = []string{pki.ProtoHTTP2, pki.ProtoHTTP1}
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSClientConfig:     config,
		TLSHandshakeTimeout: dialTimeout,
		ForceAttemptHTTP2:   true,
		IdleConnTimeout:     time.Minute,
		MaxIdleConnsPerHost: 2,

		MaxResponseHeaderBytes: maxAnswerHeader,
		// Pings detect a host that has failed without closing the connection.
		HTTP2: &http.HTTP2Config{SendPingTimeout: ping, PingTimeout: ping},
	}
}

// Watched returns an HTTP client like Client, and a function that returns the connections
// that it has made.
func Watched(config *tls.Config) (*http.Client, func() []net.Conn) {
	var mu sync.Mutex
	var conns []net.Conn
	t := transport(config, defaultPing)
	dial := t.DialContext
	t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if err == nil {
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
		}
		return c, err
	}
	return newClient(bounded{t}), func() []net.Conn {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(conns)
	}
}

// Peer returns a client for PeerService at an address.
func Peer(c *http.Client, address string) clusterv1connect.PeerServiceClient {
	return clusterv1connect.NewPeerServiceClient(c, "https://"+address, Options()...)
}

const (
	enrollPatience = time.Minute            // limit if the caller's context has none
	enrollAttempt  = 12 * time.Second       // limit for one host; longer than it waits for a leader
	enrollPause    = 200 * time.Millisecond // pause between rounds
)

// Enroll sends a join token to the hosts of its cluster until one answers. If none
// answers, or there is no leader, it tries again until ctx ends, or for a minute. If an
// answer was lost, the same request gets the same answer again. Enroll sets the request's
// token and secret. It sends them only to a host whose authority the token names.
func Enroll(ctx context.Context, token pki.Token, r *clusterv1.EnrollRequest) (*clusterv1.EnrollResponse, error) {
	r.TokenId, r.Secret = token.ID, token.Secret[:]
	c := Client(pki.PinnedClientConfig(token.Fingerprint, time.Now))
	defer c.CloseIdleConnections()
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, enrollPatience)
		defer cancel()
	}
	maybe := false
	for {
		res, taken, err := enrollRound(ctx, c, token.Addresses, r)
		if err == nil || !errors.Is(err, errSilent) {
			return res, err
		}
		maybe = maybe || taken
		select {
		case <-ctx.Done():
			if maybe {
				// Not the code for "no leader": a caller that gets that code tries again
				// with another request, but the token may be used up.
				err = connect.NewError(connect.CodeUnavailable, errors.New(err.Error()))
			}
			return nil, err
		case <-time.After(enrollPause):
		}
	}
}

// errSilent means that trying again may succeed.
var errSilent = errors.New("no host of the cluster let this one in")

// enrollRound asks each host once. maybe reports that one may have admitted the caller,
// but its answer was lost.
func enrollRound(ctx context.Context, c *http.Client, addresses []string, r *clusterv1.EnrollRequest) (res *clusterv1.EnrollResponse, maybe bool, err error) {
	var errs []error
	hope := false
	for _, address := range addresses {
		one, cancel := context.WithTimeout(ctx, enrollAttempt)
		res, err := Peer(c, address).Enroll(one, connect.NewRequest(r))
		cancel()
		if err == nil {
			return res.Msg, false, nil
		}
		switch connect.CodeOf(err) {
		case connect.CodeUnavailable, connect.CodeUnknown, connect.CodeDeadlineExceeded:
			errs = append(errs, fmt.Errorf("%s: %w", address, err))
			if !stranger(err) {
				hope, maybe = true, maybe || !reason.Undone(err)
			}
		default:
			return nil, false, err // the host has decided
		}
	}
	err = errors.Join(errs...)
	if !hope {
		return nil, false, fmt.Errorf("no host of the cluster answered: %w", err)
	}
	return nil, maybe, fmt.Errorf("%w: %w", errSilent, err)
}

// stranger reports whether the server is not a host of the cluster, so that trying again
// is of no use.
func stranger(err error) bool {
	for _, e := range []error{pki.ErrUntrusted, pki.ErrNotHost, pki.ErrMalformed, pki.ErrWrongCluster, pki.ErrNoCertificate} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
