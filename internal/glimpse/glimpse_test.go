package glimpse

import (
	"fmt"
	"testing"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestReadsThatDoNotEndAreBounded(t *testing.T) {
	r := &Reads{}
	release := make(chan struct{})
	begin := func(user uint32, what string) {
		if !r.begin(user, what) {
			t.Fatal(what)
		}
		go func() {
			defer r.end(user, what)
			<-release
		}()
	}
	for i := range mostOfUser {
		begin(1, fmt.Sprint("1/", i))
	}
	for _, c := range []struct {
		user uint32
		what string
		want bool
	}{{1, "1/x", false}, {2, "1/0", false}, {2, "2/0", true}} {
		if _, ok := Do(r, c.user, c.what, func() int { return 0 }); ok != c.want {
			t.Errorf("%s of user %d: %v", c.what, c.user, ok)
		}
	}
	if _, ok := Do(r, 2, "2/slow", func() int { <-release; return 0 }); ok {
		t.Error("a read that does not end has ended")
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
