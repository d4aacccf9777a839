package virt

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/digitalocean/go-libvirt"

	"github.com/gpuctl/gpuctl/internal/excerpt"
)

// Errors of calls. They are wrapped in an *Error that names the call and the object.
var (
	// ErrTimeout means that libvirtd did not answer in time.
	ErrTimeout = errors.New("libvirtd did not answer in time")
	// ErrUnknownOutcome means that a call that changes something was sent and not
	// answered. Look at the domain before you try again.
	ErrUnknownOutcome = errors.New("whether it was done is unknown, look before trying again")
	// ErrDisconnected means that there is no connection to libvirtd.
	ErrDisconnected = errors.New("no connection to libvirtd")
	// ErrProtocol means that libvirtd has violated its protocol.
	ErrProtocol = errors.New("libvirtd broke its protocol")
	// ErrClosed means that the client was closed.
	ErrClosed = errors.New("libvirt client is closed")

	// ErrNotFound means that there is no such domain or device.
	ErrNotFound = errors.New("not found")
	// ErrExists means that the name or UUID is in use.
	ErrExists = errors.New("already exists")
	// ErrDenied means that libvirtd does not permit it to this user.
	ErrDenied = errors.New("denied by libvirtd")
	// ErrUnsupported means that this driver or version of libvirt cannot do it.
	ErrUnsupported = errors.New("not supported by this libvirt")
	// ErrBusy means that another job or domain prevents it. It may succeed later.
	ErrBusy = errors.New("busy")
	// ErrState means that the domain's state does not permit it.
	ErrState = errors.New("domain is in the wrong state")
	// ErrInvalid means that libvirt refuses the XML or an argument.
	ErrInvalid = errors.New("not accepted by libvirt")
	// ErrAborted means that the job was aborted and undone.
	ErrAborted = errors.New("aborted")
	// ErrNothingSent means that a migration was aborted because it sent nothing for long.
	ErrNothingSent = errors.New("nothing of it was sent")
	// ErrLocked means that libvirt's lock manager does not let the domain run here: another
	// domain has its disks, mostly the same one on another host.
	ErrLocked = errors.New("another domain has its disks locked")
	// ErrLockManager means that libvirt's lock manager does not serve, so no domain can be
	// started, resumed or received.
	ErrLockManager = errors.New("libvirt's lock manager does not serve")
)

// Error is the error of a call. errors.Is finds the errors above, and the end of the
// caller's context.
type Error struct {
	// Call is the call, in virsh's terms.
	Call string
	// Object is the name of the domain or device, or empty.
	Object string
	// Code is libvirt's error code; zero if libvirt has returned no error.
	// https://libvirt.org/html/libvirt-virterror.html
	Code uint32
	// Message is libvirt's message, or empty.
	Message string

	why []error
}

// Error returns a text with the call, the object and the reason.
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
		// libvirt's message is more precise than the sentinel's.
		if e.Message == "" || !isKind(err) {
			b.WriteString(": " + err.Error())
		}
	}
	return b.String()
}

// Unwrap returns the sentinel and the causes.
func (e *Error) Unwrap() []error { return e.why }

func isKind(err error) bool {
	for _, kind := range []error{ErrNotFound, ErrExists, ErrDenied, ErrUnsupported, ErrBusy, ErrState, ErrInvalid, ErrAborted, ErrLocked, ErrLockManager} {
		if err == kind { //nolint:errorlint // the value itself
			return true
		}
	}
	return false
}

// failed returns the error of a call.
func (o op) failed(why ...error) *Error {
	return &Error{Call: o.name, Object: o.object, why: why}
}

// several joins errors in one line.
type several []error

func (s several) Error() string {
	words := make([]string, len(s))
	for i, err := range s {
		words[i] = err.Error()
	}
	return strings.Join(words, ": ")
}

func (s several) Unwrap() []error { return s }

// expired returns an error with the time that libvirtd had.
func expired(after time.Duration) error {
	return fmt.Errorf("%w (%v)", ErrTimeout, after.Round(time.Millisecond))
}

// ended returns why ctx has ended, including ErrTimeout if its deadline was exceeded.
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

// answered converts libvirt's error. It returns nil if err is not an error of libvirt.
func (o op) answered(err error) *Error {
	if errors.Is(err, libvirt.ErrUnsupported) {
		return &Error{Call: o.name, Object: o.object, Message: "libvirtd does not know this call, it is too old", why: []error{ErrUnsupported}}
	}
	var e libvirt.Error
	if !errors.As(err, &e) {
		return nil
	}
	code, from := unmark(e.Code)
	our := &Error{Call: o.name, Object: o.object, Code: code, Message: clean(e.Message)}
	if k := kind(libvirt.ErrorNumber(code), from, e.Message); k != nil {
		our.why = []error{k}
	}
	return our
}

// Parts of libvirt that errors are from (virErrorDomain).
const (
	fromLocking   = 42 // the plugin of a lock manager
	fromLockspace = 51 // virtlockd
)

// mark puts the part of libvirt that an error is from into its code: go-libvirt returns only
// the code.
func mark(code, from uint32) uint32 {
	if code > 0xffff || from > 0xffff {
		return code
	}
	return code | from<<16
}

func unmark(marked uint32) (code, from uint32) { return marked & 0xffff, marked >> 16 }

// kind returns the sentinel for an error code of libvirt and the part of libvirt that it is
// from. Only where libvirt has no codes of its own, it needs the message: an existing domain
// and a missing device are "operation failed", as any other failure; a PCI device that
// another domain has is "operation invalid", as is a domain that does not run; a lock manager
// that does not serve is an internal error or one of the system. libvirtd writes English
// unless it is configured otherwise. For an unknown message, it returns the general meaning
// of the code.
func kind(code libvirt.ErrorNumber, from uint32, message string) error {
	switch code {
	case libvirt.ErrInternalError, libvirt.ErrSystemError, libvirt.ErrOperationFailed:
		// virtlockd's socket does not answer; or virtlockd was started anew, and does not
		// know the folder of locks that libvirtd tells it of in its own start. The message is
		// part of another if the process of a domain has failed before its program began.
		if strings.Contains(message, "virtlockd-sock") || strings.Contains(message, "Lockspace for path ") && strings.Contains(message, " does not exist") {
			return ErrLockManager
		}
	case libvirt.ErrResourceBusy:
		if from == fromLocking || from == fromLockspace {
			return ErrLocked
		}
	}
	switch code {
	case libvirt.ErrNoDomain, libvirt.ErrNoNodeDevice, libvirt.ErrDeviceMissing:
		return ErrNotFound
	case libvirt.ErrDomExist:
		return ErrExists
	case libvirt.ErrOperationDenied, libvirt.ErrAccessDenied, libvirt.ErrAuthFailed, libvirt.ErrAuthCancelled, libvirt.ErrAuthUnavailable:
		return ErrDenied
	case libvirt.ErrNoSupport, libvirt.ErrConfigUnsupported, libvirt.ErrArgumentUnsupported, libvirt.ErrOperationUnsupported:
		return ErrUnsupported
	case libvirt.ErrResourceBusy, libvirt.ErrOperationTimeout: // the latter: it could not lock the state
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

// clean returns a message as one line of printable characters.
func clean(s string) string {
	const longest = 1000
	s = excerpt.Of(strings.TrimSpace(s), longest)
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}
