package reason

import (
	"context"
	"errors"
	"net"
	"strings"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// longest is how many bytes of an object's name or an advice are sent.
const longest = 1 << 10

// Coded converts an error that leaves hostd to a Connect error, with the code for its
// reason, and the reason as a detail. A Connect error, such as another host's answer, is
// returned unchanged.
func Coded(err error) error { return CodedOn(err, "", "") }

// CodedOn does the same as [Coded]. An error that names no object is about this one.
func CodedOn(err error, kind, object string) error {
	var done *connect.Error
	if err == nil || errors.As(err, &done) {
		return err
	}
	r := Of(err)
	if r.Object == "" {
		r.Kind, r.Object = kind, object
	}
	e, ok := entry(r.Code)
	if !ok {
		e = generic(connect.CodeInternal)
	}
	return attach(connect.NewError(e.Connect, err), r)
}

// Refuse does the same as [Coded], and returns a *connect.Error.
func Refuse(err *Error) *connect.Error {
	e, _ := entry(err.reason.Code)
	return attach(connect.NewError(e.Connect, err), Of(err))
}

func attach(out *connect.Error, r Reason) *connect.Error {
	detail, err := connect.NewErrorDetail(&gpuctlv1.ErrorReason{
		Code: string(r.Code), ObjectKind: limited(r.Kind), Object: limited(r.Object), Next: limited(r.Next), Retry: r.Retry,
	})
	if err == nil { // its texts are UTF-8, so encoding does not fail
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

// Of returns the reason of an error, in servers and clients. A Connect error without a
// reason has the generic reason of its code. Any other error without a reason is
// Internal.
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
	if !known { // from a newer host: use what the host has sent
		if errors.As(err, &c) {
			r.Exit = generic(c.Code()).Exit
		}
		return r
	}
	r.Exit, r.Retry = e.Exit, e.Retry
	return r
}

// find returns the outermost reason of an error.
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

// received returns the reason in the details of a Connect error.
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

// Headers in which hosts of the previous version send the reason. Hosts are upgraded one
// by one, so these headers are read, but not written.
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

// Is reports whether an error has a reason with this code.
func Is(err error, code Code) bool { return err != nil && Of(err).Code == code }

// Retry reports whether nothing was done and the call may be repeated, for example
// because there was no leader.
func Retry(err error) bool { return err != nil && Of(err).Retry }

// Unsent reports whether a call was not sent to the host, because there was no
// connection.
func Unsent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// Undone reports whether nothing was done by a call that failed with this error. After
// any other error, except a refusal, the call may have been executed.
func Undone(err error) bool { return Retry(err) || Unsent(err) }
