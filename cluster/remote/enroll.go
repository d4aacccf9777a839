package remote

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/internal/reason"
)

const dialTimeout = 5 * time.Second

// Client returns an HTTP client for hosts with this TLS configuration.
func Client(config *tls.Config) *http.Client {
	return &http.Client{Transport: transport(config)}
}

func transport(config *tls.Config) *http.Transport {
	config = config.Clone()
	config.NextProtos = []string{pki.ProtoHTTP2, pki.ProtoHTTP1}
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSClientConfig:     config,
		TLSHandshakeTimeout: dialTimeout,
		ForceAttemptHTTP2:   true,
		IdleConnTimeout:     time.Minute,
		MaxIdleConnsPerHost: 2,
		// A host that is gone is noticed although nothing says so.
		HTTP2: &http.HTTP2Config{SendPingTimeout: 2 * time.Second, PingTimeout: 2 * time.Second},
	}
}

// Peer is the service that an address has for hosts.
func Peer(c *http.Client, address string) clusterv1connect.PeerServiceClient {
	return clusterv1connect.NewPeerServiceClient(c, "https://"+address)
}

const (
	enrollPatience = time.Minute            // when the caller says none
	enrollAttempt  = 12 * time.Second       // of one host: longer than that waits for a leader
	enrollPause    = 200 * time.Millisecond // between rounds
)

// Enroll shows a token to the first host of its cluster that answers. While none
// does, or there is no leader, it asks again until ctx ends, or for a minute: the
// same request is answered again if its answer was lost. The request's token and
// secret are filled in. Only a host of the authority that the token names gets to
// see them.
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
				// Not as a host says it that knows of no leader: who hears that asks
				// again, with another request, for which the token is used up.
				err = connect.NewError(connect.CodeUnavailable, errors.New(err.Error()))
			}
			return nil, err
		case <-time.After(enrollPause):
		}
	}
}

// errSilent says that asking again may help.
var errSilent = errors.New("no host of the cluster let this one in")

// enrollRound asks each host once. maybe says that one may have let this one in,
// and its answer was lost.
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
			return nil, false, err // an answer
		}
	}
	err = errors.Join(errs...)
	if !hope {
		return nil, false, fmt.Errorf("no host of the cluster answered: %w", err)
	}
	return nil, maybe, fmt.Errorf("%w: %w", errSilent, err)
}

// stranger reports whether somebody answered who is no host of the cluster: it
// will not become one.
func stranger(err error) bool {
	for _, e := range []error{pki.ErrUntrusted, pki.ErrNotHost, pki.ErrMalformed, pki.ErrWrongCluster, pki.ErrNoCertificate} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
