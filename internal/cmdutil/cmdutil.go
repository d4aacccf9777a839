// Package cmdutil is what the commands have in common: their streams and what
// their exit statuses mean.
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
	Refused = 3 // by preflight: nothing was touched
)

// Stdio are a program's streams.
type Stdio struct {
	In  io.Reader
	Out io.Writer
	Err io.Writer
}

// Status is an error that is an exit status and has nothing more to say.
type Status int

func (s Status) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

type coded struct {
	error
	code int
}

func (c coded) Unwrap() error { return c.error }

// Usage marks an error as the caller's wrong use of the program.
func Usage(err error) error { return coded{err, BadUse} }

// WithCode gives an error the exit status that it calls for.
func WithCode(err error, code int) error { return coded{err, code} }

// Code is the exit status that an error calls for.
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

// Version is the build's: a release's tag, one that names the commit, or devel.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "devel"
}
