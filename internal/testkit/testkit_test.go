package testkit_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// failing is a test that ends at a time.
type failing struct {
	deadline time.Time // zero: it has none
	said     string
}

func (f *failing) Fatalf(format string, args ...any)   { f.said = fmt.Sprintf(format, args...) }
func (f *failing) Deadline() (end time.Time, has bool) { return f.deadline, !f.deadline.IsZero() }

// scripted is a test that knows no deadline.
type scripted struct{ said string }

func (s *scripted) Fatalf(format string, args ...any) { s.said = fmt.Sprintf(format, args...) }

func TestUntilReturnsOnceItIsSo(t *testing.T) {
	n := 0
	testkit.Until(t, "the third look", func() error {
		if n++; n < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	if n != 3 {
		t.Errorf("%d looks", n)
	}
}

func TestUntilTellsOfWhatNeverCameBeforeTheTestsDeadline(t *testing.T) {
	for name, c := range map[string]struct{ left, least, most time.Duration }{
		"minutes":       {10 * time.Minute, 9*time.Minute + 49*time.Second, 9*time.Minute + 51*time.Second},
		"seconds":       {10 * time.Second, 8900 * time.Millisecond, 9100 * time.Millisecond},
		"over":          {-time.Second, 0, time.Second},
		"a day":         {24 * time.Hour, 30 * time.Minute, 31 * time.Minute},
		"no such thing": {0, 30 * time.Minute, 31 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				var f failing
				if c.left != 0 {
					f.deadline = began.Add(c.left)
				}
				testkit.Until(&f, "rain", func() error { return errors.New("the sun shines") })
				if took := time.Since(began); took < c.least || took > c.most {
					t.Errorf("it was told after %v", took)
				}
				if !strings.Contains(f.said, "rain") || !strings.Contains(f.said, "the sun shines") {
					t.Errorf("it said %q", f.said)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		var s scripted
		testkit.Until(&s, "rain", func() error { return errors.New("the sun shines") })
		if !strings.Contains(s.said, "rain") {
			t.Errorf("it said %q", s.said)
		}
	})
}

func TestPollEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	why, last := errors.New("why"), errors.New("last")
	err := testkit.Poll(ctx, "rain", func() error { cancel(why); return last })
	if !errors.Is(err, why) || !errors.Is(err, last) || !strings.Contains(err.Error(), "rain") {
		t.Error(err)
	}
}

func TestPollEndsWhenItIsGivenUp(t *testing.T) {
	never := errors.New("never")
	if err := testkit.Poll(t.Context(), "snow", func() error { return testkit.GiveUp(never) }); !errors.Is(err, never) {
		t.Error(err)
	}
}

func TestWantSaysWhatWasSeen(t *testing.T) {
	if err := testkit.Want(true, "a"); err != nil {
		t.Error(err)
	}
	if err := testkit.Want(false, "a", 2); err == nil || err.Error() != "got a 2" {
		t.Error(err)
	}
}

func TestContextEndsBeforeTheTest(t *testing.T) {
	ctx := testkit.Context(t)
	end, ok := ctx.Deadline()
	if last, has := t.Deadline(); !ok || has && !end.Before(last) || time.Until(end) <= 0 {
		t.Errorf("%v, %v; the test ends at %v", end, ok, last)
	}
}

func TestLogTakesWhatSeveralWriteAtOnce(t *testing.T) {
	var tee bytes.Buffer
	log := testkit.Log{Tee: &tee}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 100 {
				_, _ = log.Write([]byte("x\n"))
				_ = log.String()
			}
		})
	}
	all.Wait()
	want := strings.Repeat("x\n", 800)
	if log.String() != want || tee.String() != want || log.Take() != want || log.Take() != "" || log.String() != "" {
		t.Errorf("%d bytes, %d bytes", len(want), tee.Len())
	}
}
