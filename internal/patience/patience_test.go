package patience

import (
	"testing"
	"time"
)

func TestPatienceFollowsWhatTheMachineShows(t *testing.T) {
	p := New(20*time.Second, 2*time.Minute)
	is := func(what string, want time.Duration) {
		t.Helper()
		if got := p.Limit("a"); got != want {
			t.Errorf("%s: %v, not %v", what, got, want)
		}
	}
	is("at first", 20*time.Second)
	p.Took("a", time.Second)
	is("on a fast machine", 20*time.Second)
	p.Missed("a", 20*time.Second)
	is("after one that did not come", 40*time.Second)
	p.Took("a", 15*time.Second)
	is("on a slow machine", time.Minute)
	p.Missed("a", time.Minute)
	p.Missed("a", 2*time.Minute)
	is("at most", 2*time.Minute)
	for range 20 {
		p.Took("a", time.Second)
	}
	is("once it is fast again", 20*time.Second)
	if got := p.Limit("b"); got != 20*time.Second {
		t.Errorf("another kind gets %v", got)
	}
}
