// Package cmdutil has what the commands have in common: their streams and their exit
// statuses.
package cmdutil

import (
	"errors"
	"fmt"
	"io"
	"runtime/debug"
)

// Exit statuses.
const (
	OK      = 0
	Failed  = 1
	BadUse  = 2
	Refused = 3 // refused by the checks at the beginning: nothing was changed
)

// Stdio has a program's standard streams.
type Stdio struct {
	In  io.Reader
	Out io.Writer
	Err io.Writer
}

// Status is an error that only sets the exit status. It has no message.
type Status int

func (s Status) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

type coded struct {
	error
	code int
}

func (c coded) Unwrap() error { return c.error }

// Usage marks an error as wrong use of the program.
func Usage(err error) error { return coded{err, BadUse} }

// WithCode adds an exit status to an error.
func WithCode(err error, code int) error { return coded{err, code} }

// Code returns the exit status for an error.
func Code(err error) int {
	var s Status
	var c coded
	switch {
	case err == nil:
		return OK
	case errors.As(err, &s):
		return int(s)
	case errors.As(err, &c):
		return c.code
	}
	return Failed
}

// Version returns the version of the build: a release's tag, a version with the commit,
// or devel.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "devel"
}
