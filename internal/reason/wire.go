package reason

import (
	"context"
	"errors"
	"net"
	"strings"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// longest is what is sent of an object or an advice, in bytes.
const longest = 1 << 10

// Coded gives an error that leaves hostd the code of Connect's that its reason
// calls for, and the reason as a detail. What is Connect's already stays as it
// is, as another host's answer does.
func Coded(err error) error {
	var done *connect.Error
	if err == nil || errors.As(err, &done) {
		return err
	}
	r := Of(err)
	e, ok := entry(r.Code)
	if !ok {
		e = generic(connect.CodeInternal)
	}
	return attach(connect.NewError(e.Connect, err), r)
}

// Refuse is [Coded] where the error of Connect's itself is needed.
func Refuse(err *Error) *connect.Error {
	e, _ := entry(err.reason.Code)
	return attach(connect.NewError(e.Connect, err), Of(err))
}

func attach(out *connect.Error, r Reason) *connect.Error {
	detail, err := connect.NewErrorDetail(&gpuctlv1.ErrorReason{
		Code: string(r.Code), ObjectKind: limited(r.Kind), Object: limited(r.Object), Next: limited(r.Next), Retry: r.Retry,
	})
	if err == nil { // its texts are UTF-8, so it can be encoded
		out.AddDetail(detail)
	}
	return out
}

func limited(s string) string {
	if len(s) > longest {
		s = s[:longest]
	}
	return strings.ToValidUTF8(s, "")
}

// Of is the reason of an error, on either side. An error of Connect's without
// one has that of its code; one that has neither, Internal's, as far as hostd
// knows nothing better.
func Of(err error) Reason {
	r, ok := find(err)
	var c *connect.Error
	switch {
	case err == nil:
		return Reason{}
	case ok:
	case errors.As(err, &c):
		r.Code = generic(c.Code()).Code
	case errors.Is(err, context.DeadlineExceeded):
		r.Code = TimedOut
	case errors.Is(err, context.Canceled):
		r.Code = Canceled
	default:
		r.Code = Internal
	}
	e, known := entry(r.Code)
	if !known { // of a newer host: what it says of itself
		if errors.As(err, &c) {
			r.Exit = generic(c.Code()).Exit
		}
		return r
	}
	r.Exit, r.Retry = e.Exit, e.Retry
	return r
}

// find looks for the outermost reason.
func find(err error) (Reason, bool) {
	switch e := err.(type) { //nolint:errorlint // it is what goes down the chain
	case nil:
		return Reason{}, false
	case Reasoned:
		return e.Reason(), true
	case *connect.Error:
		if r, ok := received(e); ok {
			return r, true
		}
	}
	switch e := err.(type) { //nolint:errorlint // the same
	case interface{ Unwrap() error }:
		return find(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			if r, ok := find(one); ok {
				return r, true
			}
		}
	}
	return Reason{}, false
}

// received is the reason that an error of Connect's carries.
func received(c *connect.Error) (Reason, bool) {
	for _, d := range c.Details() {
		m, err := d.Value()
		if err != nil {
			continue
		}
		if w, ok := m.(*gpuctlv1.ErrorReason); ok && w.GetCode() != "" {
			return Reason{Code: Code(w.GetCode()), Kind: w.GetObjectKind(), Object: w.GetObject(), Next: w.GetNext(), Retry: w.GetRetry()}, true
		}
	}
	if code, ok := former(c.Meta().Get(formerHeader)); ok {
		return Reason{Code: code, Kind: "leader", Object: c.Meta().Get(formerLeader)}, true
	}
	return Reason{}, false
}

// Where hosts of the version before say which error one is. Hosts are upgraded
// one by one, so these are understood, and not sent.
const (
	formerHeader = "Gpuctl-Reason"
	formerLeader = "Gpuctl-Leader"
)

func former(name string) (Code, bool) {
	code, ok := map[string]Code{
		"no-leader": NoLeader, "not-leader": NotLeader, "timeout": OutcomeUnknown, "not-in-cluster": NotInCluster, "stopped": LogStopped,
		"protocol": HostTooOld, "closed": Stopping, "contended": Contended, "revoked": Revoked,
	}[name]
	return code, ok
}

// Is reports whether an error has this reason.
func Is(err error, code Code) bool { return err != nil && Of(err).Code == code }

// Retry reports whether an error says that nothing was done and that the same
// may be asked again, as when nobody leads.
func Retry(err error) bool { return err != nil && Of(err).Retry }

// Unsent reports whether nothing was sent to a host, as there was no connection.
func Unsent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// Undone reports whether a call's error says that nothing was done. After any
// other one, but for a host's refusal, it may have been.
func Undone(err error) bool { return Retry(err) || Unsent(err) }
