package busy

import (
	"sync"
	"sync/atomic"
	"testing"
)

func TestOneAtATimeForEachName(t *testing.T) {
	var s Set
	if s.Has("a") {
		t.Error("it is marked before anybody began")
	}
	end, ok := s.Begin("a")
	if _, second := s.Begin("a"); !ok || second || !s.Has("a") {
		t.Errorf("first %v, second %v, marked %v", ok, second, s.Has("a"))
	}
	if other, ok := s.Begin("b"); !ok {
		t.Error("another object is marked, too")
	} else {
		other()
	}
	end()
	if _, ok := s.Begin("a"); !ok || s.Has("b") {
		t.Error("it is still marked after its end")
	}
}

func TestManyAtOnce(t *testing.T) {
	var s Set
	var inside, most atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				if end, ok := s.Begin("a"); ok {
					most.Store(max(most.Load(), inside.Add(1)))
					inside.Add(-1)
					end()
				}
			}
		})
	}
	wg.Wait()
	if most.Load() != 1 || s.Has("a") {
		t.Errorf("%d at once, marked %v", most.Load(), s.Has("a"))
	}
}
