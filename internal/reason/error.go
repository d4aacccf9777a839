package reason

import (
	"errors"
	"fmt"
)

// Reason is why an error is: what [Table] says of its code, and what it is about.
type Reason struct {
	Code         Code
	Kind, Object string // what it is about: a host, gpu, vm, session, ...; may be empty
	Next         string // what to do next, as the error's text has said; empty: as Table says
	Retry        bool   // nothing was done, and the same may be asked again
	Exit         int    // gpuctl's exit status
}

// Advice is what to do next that the error's text has not said.
func (r Reason) Advice() string {
	if r.Next != "" {
		return ""
	}
	e, _ := entry(r.Code)
	return e.Next
}

// Reasoned is an error that knows its reason. Only its code and what it is about
// count, the rest follows.
type Reasoned interface {
	error
	Reason() Reason
}

// Error is an error with a reason.
type Error struct {
	err    error
	reason Reason
}

var _ Reasoned = (*Error)(nil)

// New is an error value of a package's: what wraps it has its reason.
func New(code Code, text string) error {
	return &Error{errors.New(text), Reason{Code: code}}
}

// Errorf is fmt.Errorf with a reason. That of an error that it wraps counts no
// more.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{fmt.Errorf(format, args...), Reason{Code: code}}
}

// Detail adds to an error that has a reason what it is about, or what to do next.
func Detail(err error) *Error {
	return &Error{err, Reason{Code: Of(err).Code}}
}

// On says what it is about.
func (e *Error) On(kind, object string) *Error {
	e.reason.Kind, e.reason.Object = kind, object
	return e
}

// Do says what to do next. It ends the error's text.
func (e *Error) Do(next string, args ...any) *Error {
	if len(args) > 0 {
		next = fmt.Sprintf(next, args...)
	}
	e.reason.Next = next
	return e
}

// Error is the text, with what to do next.
func (e *Error) Error() string {
	if e.reason.Next == "" {
		return e.err.Error()
	}
	return e.err.Error() + "; " + e.reason.Next
}

// Unwrap is the error without what to do next.
func (e *Error) Unwrap() error { return e.err }

// Reason is that of the error. What the error that it wraps says of the object
// and of what to do next still holds.
func (e *Error) Reason() Reason {
	r := e.reason
	in, _ := find(e.err)
	if r.Kind == "" {
		r.Kind, r.Object = in.Kind, in.Object
	}
	if r.Next == "" {
		r.Next = in.Next
	}
	return r
}
