package budget

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

func share(t testing.TB, table *Table, who string, limit uint64) *Share {
	t.Helper()
	f, line, err := table.Line("key", who)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	s, err := Use(f, line, limit)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func table(t testing.TB) *Table {
	t.Helper()
	x, err := Open(filepath.Join(t.TempDir(), "budgets"))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestSessionsOfAClaimStayWithinItsLimitTogether(t *testing.T) {
	x := table(t)
	a, b := share(t, x, "s-a", 100), share(t, x, "s-b", 100)
	for i, step := range []struct {
		s    *Share
		take uint64
		want bool
	}{
		{a, 60, true},
		{b, 41, false},
		{b, 40, true},
		{a, 61, false},
		{a, 10, true},
		{b, 90, true},
		{a, 11, false},
		{b, ^uint64(0), false},
		{b, 0, true},
		{a, 100, true},
		{a, 101, false},
	} {
		if got := step.s.Take(step.take); got != step.want {
			t.Errorf("step %d: %v", i, got)
		}
	}
	if !(*Share)(nil).Take(1<<60) || !(*Share)(nil).Reach(1<<60) {
		t.Error("a claim without a limit has one")
	}
}

// The target of a swap on one GPU has its source's line: what it restores is counted once,
// and it does not lower what the source has.
func TestTargetOfASwapIsNotCountedTwice(t *testing.T) {
	x := table(t)
	source, other := share(t, x, "s-a", 100), share(t, x, "s-b", 100)
	target := share(t, x, "s-a", 100)
	if !source.Take(60) || !target.Reach(20) || other.Take(41) {
		t.Error("the target's part has replaced what the source has")
	}
	if !target.Reach(60) || target.Reach(101) || !other.Take(40) {
		t.Error("it was counted twice, or not at all")
	}
}

func TestManyWhoTakeAtOnceNeverHaveMoreThanTheLimit(t *testing.T) {
	x := table(t)
	const limit, who = 1000, 8
	var mu sync.Mutex
	had := map[int]uint64{}
	var wg sync.WaitGroup
	for i := range who {
		s := share(t, x, fmt.Sprint("s-", i), limit)
		wg.Go(func() {
			for range 300 {
				n := rand.Uint64N(limit / 2)
				mu.Lock() // what is given back is not had any more before it is free
				had[i] = min(had[i], n)
				mu.Unlock()
				if !s.Take(n) {
					s.Take(0)
					continue
				}
				mu.Lock()
				had[i] = n
				all := uint64(0)
				for _, m := range had {
					all += m
				}
				mu.Unlock()
				if all > limit {
					t.Errorf("%d of %d", all, limit)
				}
				mu.Lock()
				had[i] = 0
				mu.Unlock()
				s.Take(0)
			}
		})
	}
	wg.Wait()
}

func TestLinesOfThoseThatAreGoneAreFree(t *testing.T) {
	x := table(t)
	a, b := share(t, x, "s-a", 100), share(t, x, "s-b", 100)
	if !a.Take(100) || b.Take(1) {
		t.Fatal("the limit does not hold")
	}
	if err := x.Leave("s-a", "other"); err != nil || !b.Take(100) {
		t.Error("a session that is gone has memory", err)
	}
	if err := x.Leave("s-b", "key"); err != nil || b.Take(101) {
		t.Error(err)
	}
	if err := x.Retain(func(string) bool { return false }); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(x.dir); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
	for i := range Lines {
		share(t, x, fmt.Sprint("s-", i), 1)
	}
	if _, _, err := x.Line("key", "one more"); !errors.Is(err, ErrFull) {
		t.Error(err)
	}
}

// An executor can write what it likes to its claim's file. It gains nothing of others.
func FuzzFileOfAHostileExecutor(f *testing.F) {
	f.Add([]byte{}, 0)
	f.Add([]byte("s-a"), 70)
	f.Add(make([]byte, 2*fileSize), 0)
	f.Fuzz(func(t *testing.T, content []byte, at int) {
		x := table(t)
		s := share(t, x, "s-a", 100)
		other, line, err := x.Line("other", "s-z")
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		if z, err := Use(other, line, 100); err != nil || !z.Take(70) {
			t.Fatal(err)
		}
		file, _, err := x.Line("key", "s-b")
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		if at >= 0 && at < fileSize {
			_, _ = file.WriteAt(content, int64(at))
		} else {
			_ = file.Truncate(int64(len(content) % fileSize))
		}
		s.Take(101)
		s.Take(50)
		if b, err := read(other); err != nil || name(b, line) != "s-z" || taken(b, line) != 70 {
			t.Error("another claim's file has changed", err)
		}
		if f, _, err := x.Line("key", "s-c"); err == nil {
			f.Close()
		} else if !errors.Is(err, ErrFull) {
			t.Error(err)
		}
		if err := x.Retain(func(string) bool { return false }); err != nil {
			t.Error(err)
		}
	})
}
