package virt

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/digitalocean/go-libvirt"
)

// Errors of calls. All are wrapped in an *Error that names call and object.
var (
	// ErrTimeout says that libvirtd did not answer in time.
	ErrTimeout = errors.New("libvirtd did not answer in time")
	// ErrUnknownOutcome says that a call that changes something was sent and
	// not answered: look at the domain before trying again.
	ErrUnknownOutcome = errors.New("whether it was done is unknown, look before trying again")
	// ErrDisconnected says that there is no connection to libvirtd.
	ErrDisconnected = errors.New("no connection to libvirtd")
	// ErrProtocol says that libvirtd sent what its protocol does not allow.
	ErrProtocol = errors.New("libvirtd broke its protocol")
	// ErrClosed says that the client was closed.
	ErrClosed = errors.New("libvirt client is closed")

	// ErrNotFound says that there is no such domain or device.
	ErrNotFound = errors.New("not found")
	// ErrExists says that the name or UUID is taken.
	ErrExists = errors.New("already exists")
	// ErrDenied says that libvirtd does not let this user.
	ErrDenied = errors.New("denied by libvirtd")
	// ErrUnsupported says that this driver or version of libvirt can't.
	ErrUnsupported = errors.New("not supported by this libvirt")
	// ErrBusy says that another job or domain is in the way: it may work later.
	ErrBusy = errors.New("busy")
	// ErrState says that the domain is not in a state for that.
	ErrState = errors.New("domain is in the wrong state")
	// ErrInvalid says that libvirt does not accept the XML or an argument.
	ErrInvalid = errors.New("not accepted by libvirt")
	// ErrAborted says that the job was aborted and undone.
	ErrAborted = errors.New("aborted")
)

// Error is a call that failed. errors.Is finds what is documented above, and
// the end of the caller's context.
type Error struct {
	// Call is what was asked of libvirt, in virsh's words.
	Call string
	// Object is the name of the domain or device, or empty.
	Object string
	// Code is libvirt's number for the error, zero when libvirt said nothing.
	// https://libvirt.org/html/libvirt-virterror.html
	Code uint32
	// Message is libvirt's, or empty.
	Message string

	why []error
}

// Error names call, object and reason.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("libvirt: ")
	b.WriteString(e.Call)
	if e.Object != "" {
		fmt.Fprintf(&b, " %.100q", e.Object)
	}
	if e.Message != "" {
		b.WriteString(": " + e.Message)
	}
	for _, err := range e.why {
		// A kind adds nothing to what libvirt wrote.
		if e.Message == "" || !isKind(err) {
			b.WriteString(": " + err.Error())
		}
	}
	return b.String()
}

// Unwrap is the kind and the causes.
func (e *Error) Unwrap() []error { return e.why }

func isKind(err error) bool {
	for _, kind := range []error{ErrNotFound, ErrExists, ErrDenied, ErrUnsupported, ErrBusy, ErrState, ErrInvalid, ErrAborted} {
		if err == kind { //nolint:errorlint // the value itself
			return true
		}
	}
	return false
}

// failed is the error of a call for these reasons.
func (o op) failed(why ...error) *Error {
	return &Error{Call: o.name, Object: o.object, why: why}
}

// several are errors in one line.
type several []error

func (s several) Error() string {
	words := make([]string, len(s))
	for i, err := range s {
		words[i] = err.Error()
	}
	return strings.Join(words, ": ")
}

func (s several) Unwrap() []error { return s }

// expired says how long libvirtd had.
func expired(after time.Duration) error {
	return fmt.Errorf("%w (%v)", ErrTimeout, after.Round(time.Millisecond))
}

// ended is why ctx ended, ErrTimeout included when it was by its deadline.
func ended(ctx context.Context, after time.Duration) []error {
	if errors.Is(context.Cause(ctx), errLimit) {
		return []error{expired(after)}
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return []error{expired(after), ctx.Err()}
	}
	return []error{context.Cause(ctx)}
}

// errLimit is the cause of a context that ended by the call's own limit.
var errLimit = errors.New("time limit of the call")

// answered makes libvirt's error ours, or gives nil when err is none of its.
func (o op) answered(err error) *Error {
	if errors.Is(err, libvirt.ErrUnsupported) {
		return &Error{Call: o.name, Object: o.object, Message: "libvirtd does not know this call, it is too old", why: []error{ErrUnsupported}}
	}
	var e libvirt.Error
	if !errors.As(err, &e) {
		return nil
	}
	our := &Error{Call: o.name, Object: o.object, Code: e.Code, Message: clean(e.Message)}
	if k := kind(libvirt.ErrorNumber(e.Code), e.Message); k != nil {
		our.why = []error{k}
	}
	return our
}

// kind sorts libvirt's errors by their codes. Only for two of these its text is
// asked, as libvirt has no codes of their own for what they say: a domain that
// exists and a device that is not there are "operation failed" like any other
// failure, a PCI device that another domain has is "operation invalid" like a
// domain that does not run. The daemon writes English unless it was given a
// language; a text that is not known is the code's general meaning.
func kind(code libvirt.ErrorNumber, message string) error {
	switch code {
	case libvirt.ErrNoDomain, libvirt.ErrNoNodeDevice, libvirt.ErrDeviceMissing:
		return ErrNotFound
	case libvirt.ErrDomExist:
		return ErrExists
	case libvirt.ErrOperationDenied, libvirt.ErrAccessDenied, libvirt.ErrAuthFailed, libvirt.ErrAuthCancelled, libvirt.ErrAuthUnavailable:
		return ErrDenied
	case libvirt.ErrNoSupport, libvirt.ErrConfigUnsupported, libvirt.ErrArgumentUnsupported, libvirt.ErrOperationUnsupported:
		return ErrUnsupported
	case libvirt.ErrResourceBusy, libvirt.ErrOperationTimeout: // the latter: no state change lock
		return ErrBusy
	case libvirt.ErrOperationAborted:
		return ErrAborted
	case libvirt.ErrXMLError, libvirt.ErrXMLDetail, libvirt.ErrInvalidArg:
		return ErrInvalid
	case libvirt.ErrOperationInvalid:
		if strings.Contains(message, "in use") {
			return ErrBusy
		}
		return ErrState
	case libvirt.ErrOperationFailed:
		switch {
		case strings.Contains(message, "already exists"):
			return ErrExists
		case strings.Contains(message, "not found"):
			return ErrNotFound
		case strings.Contains(message, "in use"):
			return ErrBusy
		case strings.Contains(message, "cancel"), strings.Contains(message, "abort"):
			return ErrAborted
		}
	}
	return nil
}

// clean makes a message one line of printable text.
func clean(s string) string {
	const longest = 1000
	s = strings.TrimSpace(strings.ToValidUTF8(s, "?"))
	if len(s) > longest {
		s = strings.ToValidUTF8(s[:longest], "") + "…"
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}
