package executor

import "testing"

// If bursts end without a further request after naps, the leader takes fewer naps, down to
// none. From time to time, it tries naps again. A nap after which a request came allows
// more.
func TestNapsBecomeFewerWhenInVain(t *testing.T) {
	n := newNaps(true)
	count := func() (taken int) {
		for n.next() > 0 {
			taken++
		}
		return taken
	}
	for want := mostNaps; want >= 0; want-- {
		if got := count(); got != want {
			t.Fatalf("%d naps, want %d", got, want)
		}
	}
	again := 0
	for range 2 * tryEvery {
		if count() > 0 {
			again++
		}
	}
	if again == 0 {
		t.Fatal("it never tries again")
	}
	n.now = 1
	if n.next() == 0 {
		t.Fatal("no nap although one is allowed")
	}
	n.ended()
	if n.now != 2 || n.taken != 0 {
		t.Fatalf("after a useful nap: %+v", n)
	}
	if d := (&naps{}).next(); d != 0 {
		t.Fatalf("a leader with processors to spare naps for %v", d)
	}
}
