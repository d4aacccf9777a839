package testkit

import (
	"strings"
	"sync"
	"testing"
)

type door struct{ open chan struct{} }

func (d *door) stand() { <-d.open }

func TestParkedWaitsForThoseWhoWait(t *testing.T) {
	d := door{open: make(chan struct{})}
	var all sync.WaitGroup
	for range 3 {
		all.Go(d.stand)
	}
	Parked(t, "testkit.(*door).stand", 3)
	if n := parked(stacks(), "testkit.(*door).stand"); n != 3 {
		t.Errorf("%d wait", n)
	}
	if n := parked(stacks(), "testkit.(*door).sit"); n != 0 {
		t.Errorf("%d wait where nobody does", n)
	}
	close(d.open)
	all.Wait()
	if n := parked(stacks(), "testkit.(*door).stand"); n != 0 {
		t.Errorf("%d wait when all have gone", n)
	}
}

func TestWhoRunsIsNotParked(t *testing.T) {
	const trace = `goroutine 7 [%]:
example.org/x/vchan.(*Conn).wait(0xc000, {0x1/2, 0x3})
	/home/x/vchan.(*Conn).go:8 +0x2c
example.org/x/vchan.(*Conn).Read(...)
	/home/x/conn.go:9
created by example.org/x/vchan.Listen in goroutine 1
	/home/x/listen.go:7 +0x1`
	for state, want := range map[string]int{"select": 1, "IO wait, 2 minutes": 1, "syscall": 1, "running": 0, "runnable": 0} {
		text := "goroutine 1 [running]:\nmain.main()\n\n" + strings.Replace(trace, "%", state, 1)
		if got := parked(text, "vchan.(*Conn).wait"); got != want {
			t.Errorf("%s: %d in wait", state, got)
		}
		if got := parked(text, "vchan.(*Conn).Read"); got != want {
			t.Errorf("%s: %d in Read", state, got)
		}
		if got := parked(text, "vchan.Listen") + parked(text, "Conn).wait"); got != 0 {
			t.Errorf("%s: %d in what is not their place", state, got)
		}
	}
}
