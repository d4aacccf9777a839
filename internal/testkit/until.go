package testkit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/wait"
)

const (
	// most is what a wait lasts where the test has no deadline, or a far one: the
	// longest step of the lab's tests takes half of it.
	most = 30 * time.Minute
	// told is the time that is left to tell of a wait in vain, and to clean up.
	told = 10 * time.Second

	firstPause = time.Millisecond
	lastPause  = 50 * time.Millisecond
)

// T is what Until needs of a test: a testing.TB is one, and a testscript.TestScript.
type T interface {
	Fatalf(format string, args ...any)
}

// Until calls is again and again until it returns nil. When the test's time is
// nearly over it ends the test with what it waited for and is's last error. To
// give up earlier, is returns an error of GiveUp or ends the test itself. In a bubble of testing/synctest there is no need of it: who sleeps
// there sleeps until all others wait.
func Until(t T, what string, is func() error) {
	if h, ok := t.(interface{ Helper() }); ok {
		h.Helper()
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit(t, time.Now()))
	defer cancel()
	if err := Poll(ctx, what, is); err != nil {
		t.Fatalf("%v", err)
	}
}

// Poll calls is again and again until it returns nil, an error of GiveUp or ctx
// is done. It is for the programs and machines that tests start and that know
// no test.
func Poll(ctx context.Context, what string, is func() error) error {
	began := time.Now()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := is()
		var final givenUp
		switch {
		case err == nil:
			return nil
		case errors.As(err, &final):
			return final.error
		}
		if over := wait.For(ctx, pause); over != nil {
			return fmt.Errorf("wait for %s: %w after %v: %w", what, over, time.Since(began).Round(time.Millisecond), err)
		}
	}
}

// givenUp is an error that no waiting changes.
type givenUp struct{ error }

// GiveUp is what the function of Poll or Until returns when what it waits for
// can't come any more: err is returned at once.
func GiveUp(err error) error { return givenUp{err} }

// Want is what Until looks for when it is no error: nil if it is so, else an
// error with what was seen instead.
func Want(so bool, seen ...any) error {
	if so {
		return nil
	}
	return errors.New("got " + strings.TrimSuffix(fmt.Sprintln(seen...), "\n"))
}

// Context is the test's context, which ends when Until would give up: shortly
// before the test's deadline.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit(t, time.Now()))
	t.Cleanup(cancel)
	return ctx
}

// limit is how long a wait of this test may last.
func limit(t T, now time.Time) time.Duration {
	d, ok := t.(interface{ Deadline() (time.Time, bool) })
	if !ok {
		return most
	}
	end, ok := d.Deadline()
	if !ok {
		return most
	}
	left := max(0, end.Sub(now))
	return min(most, left-min(told, left/10))
}
