package reason

import (
	"errors"
	"fmt"
)

// Reason is the reason of an error: what [Table] has for its code, and the object that it
// is about.
type Reason struct {
	Code         Code
	Kind, Object string // the object: a host, gpu, vm, session, …; may be empty
	Next         string // what to do next, which the error's text contains; empty: see Table
	Retry        bool   // nothing was done, and the call may be repeated
	Exit         int    // gpuctl's exit status
}

// Advice returns what to do next, unless the error's text contains it already.
func (r Reason) Advice() string {
	if r.Next != "" {
		return ""
	}
	e, _ := entry(r.Code)
	return e.Next
}

// Reasoned is an error with a reason. Only the code and the object of that reason are
// used; the rest comes from Table.
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

// New returns a sentinel error with a reason. Errors that wrap it have its reason.
func New(code Code, text string) error {
	return &Error{errors.New(text), Reason{Code: code}}
}

// Errorf does the same as fmt.Errorf, and sets the reason. It replaces the reason of a
// wrapped error.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{fmt.Errorf(format, args...), Reason{Code: code}}
}

// Detail returns an error to which On and Do can add the object and what to do next. It
// keeps err's reason.
func Detail(err error) *Error {
	return &Error{err, Reason{Code: Of(err).Code}}
}

// On sets the object that the error is about.
func (e *Error) On(kind, object string) *Error {
	e.reason.Kind, e.reason.Object = kind, object
	return e
}

// Do sets what to do next. It is appended to the error's text.
func (e *Error) Do(next string, args ...any) *Error {
	if len(args) > 0 {
		next = fmt.Sprintf(next, args...)
	}
	e.reason.Next = next
	return e
}

// Error returns the text, with what to do next.
func (e *Error) Error() string {
	if e.reason.Next == "" {
		return e.err.Error()
	}
	return e.err.Error() + "; " + e.reason.Next
}

// Unwrap returns the error without what to do next.
func (e *Error) Unwrap() error { return e.err }

// Reason returns the error's reason. The object and what to do next are those of the
// wrapped error unless they were set.
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
