package news_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/gpuctl/gpuctl/internal/news"
)

func TestSlowReaderOfARelayKeepsNobodyWaitingAndHearsTheLast(t *testing.T) {
	r := news.NewRelay[int]()
	const last = 100_000
	for i := range last { // nobody reads yet
		r.Tell(i)
	}
	r.End(last)
	var got []int
	if err := r.Send(t.Context(), func(v int) error { got = append(got, v); return nil }); err != nil {
		t.Fatal(err)
	}
	if !slices.IsSorted(got) || got[0] != 0 || got[len(got)-1] != last || len(got) == last+1 {
		t.Errorf("%d values, from %d to %d", len(got), got[0], got[len(got)-1])
	}
}

func TestReaderWhoKeepsUpMissesNothing(t *testing.T) {
	r := news.NewRelay[int]()
	heard := make(chan int)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := r.Send(t.Context(), func(v int) error { heard <- v; return nil }); err != nil {
			t.Error(err)
		}
		close(heard)
	})
	for i := range 1000 {
		r.Tell(i)
		if got := <-heard; got != i {
			t.Fatalf("heard %d, want %d", got, i)
		}
	}
	r.Close()
	if v, ok := <-heard; ok {
		t.Errorf("heard %d after the end", v)
	}
	wg.Wait()
}

func TestClosedRelaySendsWhatIsLeft(t *testing.T) {
	r := news.NewRelay[string]()
	r.Tell("a")
	r.Tell("b")
	r.Close()
	var got []string
	if err := r.Send(t.Context(), func(v string) error { got = append(got, v); return nil }); err != nil || !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("%v, %v", got, err)
	}
}

func TestSendEndsWithItsReader(t *testing.T) {
	r := news.NewRelay[int]()
	r.Tell(1)
	gone := errors.New("gone")
	if err := r.Send(t.Context(), func(int) error { return gone }); !errors.Is(err, gone) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Send(ctx, func(int) error { t.Error("sent nothing"); return nil }); err != nil {
		t.Error(err)
	}
	r.Tell(2) // who tells does not know, and goes on
	r.End(3)
}

func TestReaderTakesTheNewestOfEachThing(t *testing.T) {
	var c news.Changes[string, int]
	if c.Watched() {
		t.Error("watched by nobody")
	}
	c.Put("x", 1) // nobody hears it
	a, b := c.Read(), c.Read()
	a.Put("m", 7)
	for i := range 1000 {
		c.Put("z", i)
		c.Put("b", 2*i)
	}
	<-a.Bell()
	if got := a.Take(); !slices.Equal(got, []int{2 * 999, 7, 999}) {
		t.Errorf("a took %v", got)
	}
	if got := a.Take(); len(got) != 0 {
		t.Errorf("a took %v twice", got)
	}
	select {
	case <-a.Bell():
		t.Error("the bell rings for nothing")
	default:
	}
	<-b.Bell()
	if got := b.Take(); !slices.Equal(got, []int{2 * 999, 999}) {
		t.Errorf("b took %v", got)
	}
	a.Close()
	if !c.Watched() {
		t.Error("b is forgotten")
	}
	b.Close()
	c.Put("x", 1)
	if got := b.Take(); len(got) != 0 || c.Watched() {
		t.Errorf("b took %v after its end", got)
	}
}

// What is put while a reader takes is in what it takes, or it rings again.
func TestNoChangeIsLostBetweenTakes(t *testing.T) {
	var c news.Changes[int, int]
	r := c.Read()
	defer r.Close()
	const things, rounds = 8, 2000
	var wg sync.WaitGroup
	for k := range things {
		wg.Go(func() {
			for v := range rounds {
				c.Put(k, k*rounds+v)
			}
		})
	}
	newest := map[int]int{}
	for done := 0; done < things; {
		<-r.Bell()
		for _, v := range r.Take() {
			k, v := v/rounds, v%rounds
			if last, ok := newest[k]; ok && v <= last {
				t.Fatalf("%d: %d came after %d", k, v, last)
			}
			if newest[k] = v; v == rounds-1 {
				done++
			}
		}
	}
	wg.Wait()
}
