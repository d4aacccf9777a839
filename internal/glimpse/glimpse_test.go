package glimpse

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestReadsThatDoNotEndAreBounded(t *testing.T) {
	r := &Reads{}
	release := make(chan struct{})
	slow := func() int { <-release; return 0 }
	var all sync.WaitGroup
	for i := range mostOfUser {
		all.Go(func() {
			if _, ok := Do(r, 1, fmt.Sprint("1/", i), slow); ok {
				t.Errorf("read %d has ended", i)
			}
		})
	}
	all.Wait()
	for _, c := range []struct {
		user uint32
		what string
		want bool
	}{{1, "1/x", false}, {2, "1/0", false}, {2, "2/0", true}} {
		if _, ok := Do(r, c.user, c.what, func() int { return 0 }); ok != c.want {
			t.Errorf("%s of user %d: %v", c.what, c.user, ok)
		}
	}
	close(release)
	testkit.Until(t, "nothing is counted any more", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		return testkit.Want(len(r.what)+len(r.by) == 0, r.what)
	})
	if n, ok := Do(r, 1, "1/0", func() int { return 7 }); !ok || n != 7 {
		t.Error(n, ok)
	}
}

// TestWhoComesDuringAReadHasItsResult: who looks at a process while another one does must not take it for
// one that cannot be read.
func TestWhoComesDuringAReadHasItsResult(t *testing.T) {
	r := &Reads{}
	begun, release := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		if n, ok := Do(r, 1, "1/0", func() int { close(begun); <-release; return 7 }); !ok || n != 7 {
			t.Error(n, ok)
		}
	})
	<-begun
	second := r.begin(2, "1/0", func() any { t.Error("it is read twice"); return 0 })
	close(release)
	all.Wait()
	if second == nil {
		t.Fatal("the second one is not served")
	}
	if <-second.done; second.result != 7 {
		t.Error(second.result)
	}
}

// Who looks at all processes, as while somebody's are locked, reads one after the other. A user may have
// many that keep that from ending, and ends some of them so that others come.
func TestManySlowReadsOfOneUserTogetherKeepNobodyWaitingForLong(t *testing.T) {
	r := &Reads{Whose: func(user uint32) uint32 { return min(user, 3) }} // from 3 on, all are one's
	began := time.Now()
	for i := range uint32(8) {
		release := make(chan struct{})
		if _, ok := Do(r, 3+i, fmt.Sprint("1/", i), func() int { <-release; return 0 }); ok {
			t.Errorf("read %d has ended", i)
		}
		close(release)
	}
	if took := time.Since(began); took > 6*patience {
		t.Errorf("%v", took)
	}
	if n, ok := Do(r, 2, "2/0", func() int { time.Sleep(patience / 4); return 7 }); !ok || n != 7 {
		t.Error("another user's is not waited for")
	}
}

// A user that has thousands of processes has each read take as long as it may, or a little longer.
func TestThousandsOfReadsThatTakeALittleLongTogetherKeepNobodyWaitingForLong(t *testing.T) {
	for _, late := range []bool{false, true} {
		r := &Reads{}
		began := time.Now()
		for i := range 2000 {
			release := make(chan struct{})
			if !late {
				time.AfterFunc(brief*7/10, func() { close(release) })
			}
			_, _ = Do(r, 1, fmt.Sprint("1/", i), func() int { <-release; return 0 })
			if late {
				close(release)
			}
		}
		if took := time.Since(began); took > spell*3/4 {
			t.Errorf("%v", took)
		}
		if n, ok := Do(r, 2, "2/0", func() int { return 7 }); !ok || n != 7 {
			t.Error("another user's is not waited for")
		}
	}
}
