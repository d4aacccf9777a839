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

// Enroll shows a token to the first host of its cluster that answers. The
// request's token and secret are filled in. Only a host of the authority that
// the token names gets to see them.
func Enroll(ctx context.Context, token pki.Token, r *clusterv1.EnrollRequest) (*clusterv1.EnrollResponse, error) {
	r.TokenId, r.Secret = token.ID, token.Secret[:]
	c := Client(pki.PinnedClientConfig(token.Fingerprint, time.Now))
	defer c.CloseIdleConnections()
	var errs []error
	for _, address := range token.Addresses {
		res, err := Peer(c, address).Enroll(ctx, connect.NewRequest(r))
		if err == nil {
			return res.Msg, nil
		}
		switch connect.CodeOf(err) {
		case connect.CodeUnavailable, connect.CodeUnknown, connect.CodeDeadlineExceeded:
			errs = append(errs, fmt.Errorf("%s: %w", address, err))
		default:
			return nil, err // an answer
		}
	}
	return nil, fmt.Errorf("no host of the cluster answered: %w", errors.Join(errs...))
}
