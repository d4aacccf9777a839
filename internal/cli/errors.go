package cli

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

const exitUnavailable = reason.ExitUnavailable

// statusTimeout limits the call that finds out why another call has failed.
const statusTimeout = 2 * time.Second

func unavailable(format string, args ...any) error {
	return cmdutil.WithCode(fmt.Errorf(format, args...), exitUnavailable)
}

// explain converts the error of a call to a text with what to do next, and sets the exit
// status for its reason.
func explain(err error) error {
	var c *connect.Error
	if !errors.As(err, &c) {
		return err
	}
	if err := unreachable(c); err != nil {
		return err
	}
	r, text := reason.Of(c), words(c)
	switch r.Code {
	case reason.Unavailable:
		text = "hostd went away: " + text
	case reason.TimedOut:
		text = "no answer in time: " + text
	default:
		text = withAdvice(text, r)
	}
	return cmdutil.WithCode(errors.New(text), r.Exit)
}

// withAdvice adds what to do next, unless the text contains it.
func withAdvice(text string, r reason.Reason) string {
	if next := r.Advice(); next != "" {
		return text + "; " + next
	}
	return text
}

// words returns an error's message without its sentinels.
func words(c *connect.Error) string {
	text := c.Message()
	for _, prefix := range []string{"not found: ", "invalid: ", "refused: "} {
		text = strings.TrimPrefix(text, prefix)
	}
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = clean(line)
	}
	return strings.Join(lines, "\n")
}

// unreachable returns why there was no answer at all; nil: there was one.
func unreachable(c *connect.Error) error {
	var certificate *tls.CertificateVerificationError
	var alert tls.AlertError
	var network net.Error
	switch {
	case connect.IsWireError(c):
		return nil
	case errors.Is(c, fs.ErrNotExist), errors.Is(c, syscall.ECONNREFUSED):
		return unavailable("hostd does not answer (%w); start hostd --dev, or check --host and $GPUCTL_HOST", c.Unwrap())
	case errors.Is(c, fs.ErrPermission):
		return fmt.Errorf("hostd's socket belongs to somebody else (%w)", c.Unwrap())
	case errors.As(c, &certificate):
		return fmt.Errorf("the host's certificate is not of this cluster (%w); check --host, or enrol anew: gpuctl cluster login TOKEN", certificate.Err)
	case errors.As(c, &alert):
		return fmt.Errorf("the host does not accept your certificate (%w); enrol anew: gpuctl cluster login TOKEN", alert)
	case errors.Is(c, syscall.ECONNRESET), errors.Is(c, syscall.EPIPE), errors.Is(c, io.EOF), errors.Is(c, io.ErrUnexpectedEOF):
		return unavailable("hostd went away in the middle of an answer; its log says why")
	case errors.As(c, &network) && c.Code() == connect.CodeUnavailable:
		return unavailable("hostd does not answer (%w); check --host, $GPUCTL_HOST and the network", c.Unwrap())
	}
	return nil
}

// call makes a call of ClusterService. Its error contains what to do next.
func call[Req, Res any](ctx context.Context, c clusterClient, rpc func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error), req *Req) (*Res, error) {
	res, err := rpc(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, advise(ctx, c, err)
	}
	return res.Msg, nil
}

// advise converts a refusal of the cluster to a text with what to do next, and sets the
// exit status.
func advise(ctx context.Context, c clusterClient, err error) error {
	var e *connect.Error
	if !errors.As(err, &e) {
		return err
	}
	if err := unreachable(e); err != nil {
		return err
	}
	r := reason.Of(e)
	switch r.Code {
	case reason.Unimplemented:
		return errors.New("this hostd knows no clusters, or not this command: it is older than gpuctl")
	case reason.NotJoined, reason.NotInCluster, reason.Refused, reason.Unavailable:
		// An older host does not distinguish these cases.
		if err := memberless(ctx, c); err != nil {
			return err
		}
	}
	if r.Code == reason.Unavailable {
		return unavailable("%s", withAdvice(words(e), r))
	}
	return explain(e)
}

// memberless returns an error if the daemon is in no cluster.
func memberless(ctx context.Context, c clusterClient) error {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	res, err := c.Status(ctx, connect.NewRequest(&clusterv1.StatusRequest{}))
	if err != nil || res.Msg.GetJoined() || res.Msg.GetStandalone() {
		return nil // the error of the first call is reported
	}
	return errNotJoined(res.Msg.GetHost())
}

func errNotJoined(host string) error {
	if host != "" {
		host = " " + clean(host)
	}
	return fmt.Errorf("host%s is in no cluster yet; make one with gpuctl cluster init, or enter one with gpuctl cluster join TOKEN", host)
}

// withSuggestion adds similar names to an error about a name that does not exist.
func withSuggestion(ctx context.Context, c clusterClient, k kind, name string, err error) error {
	hint := suggest.Hint(name, listNames(ctx, c, k))
	if hint == "" {
		return fmt.Errorf("%w; gpuctl get %s lists them", err, k.many)
	}
	return fmt.Errorf("%w%s", err, clean(hint))
}

// callOn does the same as call, for one object. If the object does not exist, the error
// contains similar names.
func callOn[Req, Res any](ctx context.Context, c clusterClient, k kind, name string, rpc func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error), req *Req) (*Res, error) {
	res, err := rpc(ctx, connect.NewRequest(req))
	if err == nil {
		return res.Msg, nil
	}
	advice := advise(ctx, c, err)
	if r := reason.Of(err); r.Code == reason.NotFound && r.Next == "" {
		return nil, withSuggestion(ctx, c, k, name, advice)
	}
	return nil, advice
}

// resolve returns the object with a name, or with a unique prefix of it.
func resolve(ctx context.Context, c clusterClient, k kind, name string, stale bool) (*clusterv1.Object, error) {
	res, err := callOn(ctx, c, k, name, c.List, &clusterv1.ListRequest{Kind: k.kind, Name: name, Stale: stale})
	if err != nil {
		return nil, err
	}
	if len(res.GetObjects()) == 0 {
		return nil, withSuggestion(ctx, c, k, name, fmt.Errorf("there is no %s %q", k.one, name))
	}
	return res.GetObjects()[0], nil
}

// listNames returns the names of one kind, if they can be listed quickly.
func listNames(ctx context.Context, c clusterClient, k kind) []string {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	res, err := c.List(ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: k.kind, Stale: true, Limit: 10_000}))
	if err != nil {
		return nil
	}
	var names []string
	for _, o := range res.Msg.GetObjects() {
		names = append(names, k.name(inner(o)))
	}
	return names
}
