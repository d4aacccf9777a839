package pace

import (
	"strconv"
	"testing"
	"testing/synctest"
	"time"
)

const (
	rate  = 100
	burst = 400
)

func one(b []byte) (int, error) { return 1, nil }

// reads is how often a flow is read in a time.
func reads(f *Flow, d time.Duration, read func([]byte) (int, error)) (n int) {
	for end := time.Now().Add(d); ; n++ {
		if _, _ = f.Read(read, nil); time.Now().After(end) {
			return n
		}
	}
}

func TestFloodIsReadAtItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(rate, burst)
		if n := reads(p.Flow("a"), 10*time.Second, one); n != burst+10*rate {
			t.Errorf("%d reads in 10 s", n)
		}
		// Another connection is of the same client.
		if n := reads(p.Flow("a"), 10*time.Second, one); n < 10*rate-2 || n > 10*rate {
			t.Errorf("%d reads in the next 10 s", n)
		}
		long := func([]byte) (int, error) { return 3 * chunk, nil }
		if n := reads(p.Flow("a"), 10*time.Second, long); n < 10*rate/4-2 || n > 10*rate/4 {
			t.Errorf("%d long reads in 10 s", n)
		}
	})
}

func TestFloodHoldsNobodyElseUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(rate, burst)
		_ = reads(p.Flow("a"), 10*time.Second, one)
		began := time.Now()
		f := p.Flow("b")
		for range burst {
			_, _ = f.Read(one, nil)
		}
		if d := time.Since(began); d != 0 {
			t.Errorf("another client waits %v", d)
		}
	})
}

func TestConnectionThatEndsDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(1, 1)
		f := p.Flow("a")
		_, _ = f.Read(one, nil)
		began := time.Now()
		ended := make(chan time.Duration)
		go func() {
			long := func([]byte) (int, error) { return 1000 * chunk, nil }
			_, _ = f.Read(long, nil)
			ended <- time.Since(began)
		}()
		synctest.Wait()
		f.End()
		if d := <-ended; d != 0 {
			t.Errorf("it waits %v", d)
		}
	})
}

func TestWhoIsKnownLeavesItsAddressWhatItTook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(rate, burst)
		began := time.Now()
		for range 10 { // hosts behind one address
			f := p.Flow("a")
			for range burst / 2 {
				_, _ = f.Read(one, nil)
			}
			f.Free()
			for range burst {
				_, _ = f.Read(one, nil)
			}
		}
		if d := time.Since(began); d != 0 {
			t.Errorf("they wait %v", d)
		}
	})
}

func TestManyClientsTakeNoMoreMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(rate, burst)
		for i := range 3 * maxClients {
			_, _ = p.Flow(strconv.Itoa(i)).Read(one, nil)
		}
		if n := len(p.clients); n > maxClients+1 {
			t.Errorf("%d clients are known", n)
		}
		time.Sleep(time.Hour)
		for i := range maxClients {
			_ = p.Flow("new" + strconv.Itoa(i))
		}
		if _, ok := p.clients["new"+strconv.Itoa(maxClients-1)]; !ok {
			t.Error("those who are gone are in the way of others")
		}
	})
}
