package exact

import (
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestTimersCallOnce sets, sets anew and stops timers. It does not judge how exact they are: see BenchmarkTimer.
func TestTimersCallOnce(t *testing.T) {
	calls := make(chan time.Time, 8)
	x := NewTimer(func() { calls <- time.Now() })
	defer x.Close()
	began := time.Now()
	x.Reset(2 * time.Millisecond)
	if d := (<-calls).Sub(began); d < 2*time.Millisecond {
		t.Errorf("called after %v, want 2 ms at least", d)
	}
	x.Reset(time.Hour)
	x.Reset(0)
	<-calls
	never(t, "set anew", func(x *Timer) { x.Reset(time.Hour) })
	never(t, "closed", func(x *Timer) {
		x.Close()
		x.Close()
		x.Reset(time.Millisecond)
	})
}

// never fails the test if a timer that was set to 20 ms calls after what is done to it. On a busy machine that may be done
// too late, and is tried again.
func never(t *testing.T, what string, do func(x *Timer)) {
	t.Helper()
	const after = 20 * time.Millisecond
	for late := true; late; {
		calls := make(chan time.Time, 8)
		x := NewTimer(func() { calls <- time.Now() })
		began := time.Now()
		x.Reset(after)
		do(x)
		late = time.Since(began) >= after
		time.Sleep(3 * after) // there is no event to wait for
		if n := len(calls); n != 0 && !late {
			t.Errorf("called %d times after it was %s", n, what)
		}
		x.Close()
	}
}

// TestTimersWithoutDescriptors has the process have no descriptor left: timers work all the same.
func TestTimersWithoutDescriptors(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	var calls atomic.Int32
	done := make(chan struct{}, 1)
	x := NewTimer(func() { calls.Add(1); done <- struct{}{} })
	x.Reset(time.Millisecond)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if x.coarse == nil {
		t.Fatal("it has found a descriptor")
	}
	<-done
	x.Reset(time.Hour)
	x.Close()
	x.Reset(time.Millisecond)
	time.Sleep(60 * time.Millisecond)
	if n := calls.Load(); n != 1 {
		t.Errorf("called %d times, want 1", n)
	}
}

func TestSleepLastsLongEnough(t *testing.T) {
	for _, d := range []time.Duration{-1, 0, 100 * time.Microsecond, 3 * time.Millisecond} {
		began := time.Now()
		Sleep(d)
		if got := time.Since(began); got < d {
			t.Errorf("Sleep(%v) took %v", d, got)
		}
	}
}

func BenchmarkTimer(b *testing.B) {
	for _, d := range []time.Duration{20 * time.Microsecond, 100 * time.Microsecond, time.Millisecond} {
		b.Run("exact/"+d.String(), func(b *testing.B) {
			c := make(chan struct{})
			x := NewTimer(func() { c <- struct{}{} })
			defer x.Close()
			for range b.N {
				x.Reset(d)
				<-c
			}
		})
		b.Run("time/"+d.String(), func(b *testing.B) {
			for range b.N {
				<-time.After(d)
			}
		})
		b.Run("sleep/"+d.String(), func(b *testing.B) {
			for range b.N {
				Sleep(d)
			}
		})
	}
}
