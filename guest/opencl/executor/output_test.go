package executor

import (
	"bytes"
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// sheet is a ring with room for a number of bytes, to which take adds more room.
type sheet struct {
	mu    sync.Mutex
	taken *sync.Cond
	room  int
	text  bytes.Buffer
	over  bool
}

func newSheet(room int) *sheet {
	p := &sheet{room: room}
	p.taken = sync.NewCond(&p.mu)
	return p
}

func (p *sheet) Print(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, _ := p.text.Write(b[:min(len(b), p.room)])
	p.room -= n
	return n, nil
}

func (p *sheet) WakeWaiting() {}

func (p *sheet) AwaitPrint(time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.room == 0 && !p.over {
		p.taken.Wait()
	}
}

func (p *sheet) take(n int, over bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.room, p.over = p.room+n, p.over || over
	p.taken.Broadcast()
}

func (p *sheet) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.String()
}

func testOutput(t *testing.T, room int) (*output, *sheet, *os.File) {
	t.Helper()
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	p := newSheet(room)
	o, err := newOutput(p, fds[0])
	if err != nil {
		t.Fatal(err)
	}
	w := os.NewFile(uintptr(fds[1]), "out")
	t.Cleanup(func() { o.close(); w.Close(); p.take(0, true) })
	return o, p, w
}

func write(t *testing.T, w *os.File, text string) {
	t.Helper()
	if _, err := w.WriteString(text); err != nil {
		t.Fatal(err)
	}
}

func TestOutputBelongsToWhoeverRunsTheSession(t *testing.T) {
	o, p, w := testOutput(t, 1<<20)
	o.expect(true)
	write(t, w, "while it is prepared")
	o.begin()
	write(t, w, "one ")
	if !o.offer() || p.String() != "one " {
		t.Errorf("%q", p)
	}
	write(t, w, "two ")
	if !o.hold(t.Context(), time.Now()) || p.String() != "one two " {
		t.Errorf("%q", p)
	}
	write(t, w, "three") // another executor may serve the session now, so this is not delivered
	if !o.offer() || p.String() != "one two " {
		t.Errorf("%q", p)
	}
	o.begin() // the freeze was undone: this executor serves the session again
	if !o.offer() || p.String() != "one two three" {
		t.Errorf("%q", p)
	}
}

func TestOutputWaitsForRoom(t *testing.T) {
	o, p, w := testOutput(t, 10)
	o.expect(true)
	o.begin()
	write(t, w, "0123456789abcdef")
	if o.offer() {
		t.Error("all of it had room")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if o.hold(ctx, time.Now().Add(time.Hour)) || o.hold(t.Context(), time.Now()) {
		t.Error("held without room")
	}
	delivered := make(chan struct{})
	go func() { o.deliver(nil); close(delivered) }()
	p.take(5, false)
	select {
	case <-delivered:
		t.Error("delivered without room")
	default:
	}
	p.take(5, false)
	<-delivered
	if p.String() != "0123456789abcdef" {
		t.Errorf("%q", p)
	}
	stop := make(chan struct{})
	close(stop)
	write(t, w, "0123456789")
	o.deliver(stop)
}

// Text is delivered, too, if expect was not called before and if nobody requests the text.
func TestOutputOfUnexpectedPrinter(t *testing.T) {
	o, p, w := testOutput(t, 1<<20)
	o.begin()
	write(t, w, "a message of the runtime's")
	testkit.Until(t, "the message is printed", func() error { return testkit.Want(p.String() != "") })
	if !o.prints.Load() {
		t.Error("it is not known that something prints")
	}
	var none *output
	none.begin()
	none.deliver(nil)
	none.close()
	if !none.offer() || !none.hold(t.Context(), time.Time{}) {
		t.Error("without output there is something to wait for")
	}
}

func TestWhatMayPrint(t *testing.T) {
	for text, want := range map[string]bool{
		"kernel void f(global int *a) { a[0] = 1; }": false,
		`printf("x")`:          true,
		"pri\\\nntf(\"x\")":    true,
		"#define P(a) a##tf":   true,
		"#  include \"say.h\"": true,
		"":                     false,
	} {
		if mayPrint(&portable.Program{Source: []byte(text)}) != want {
			t.Errorf("%q: %v", text, !want)
		}
	}
	for _, x := range []portable.Program{
		{Kind: portable.IL, IL: []byte("x")},
		{Options: "-DP=printf"},
		{Headers: []portable.Header{{Program: portable.Program{Source: []byte("printf")}}}},
		{Inputs: []portable.Program{{Source: []byte("printf")}}},
	} {
		if !mayPrint(&x) {
			t.Errorf("%+v", x)
		}
	}
}
