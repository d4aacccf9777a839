package wire

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair returns a client and what serves it with handle; closing ends both.
func pair(t *testing.T, handle func(context.Context, *Request) *Answer) (net.Conn, *Client) {
	t.Helper()
	here, there := testkit.Sockets(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = Serve(context.Background(), there, handle)
	}()
	t.Cleanup(func() {
		here.Close()
		there.Close()
		<-done
	})
	return here, NewClient(here)
}

func echo(_ context.Context, q *Request) *Answer { return &Answer{Value: q.Value + 1} }

func TestDo(t *testing.T) {
	_, c := pair(t, echo)
	for i := range uint64(3) {
		a, err := c.Do(&Request{ID: strings.Repeat("x", int(i)+1), Op: Read, Value: i})
		if err != nil || a.Value != i+1 {
			t.Fatalf("%d: %v %v", i, a, err)
		}
	}
}

// A client that went away left half a request, noise and a request that nobody
// waits for any more.
func TestResynchronise(t *testing.T) {
	conn, c := pair(t, echo)
	var noise bytes.Buffer
	noise.WriteString("{\"id\":\"old\",\"op\":\"read\"}\n\x00\xff garbage\n{\"id\":\"half")
	if _, err := conn.Write(noise.Bytes()); err != nil {
		t.Fatal(err)
	}
	a, err := c.Do(&Request{ID: "new", Op: Read, Value: 41})
	if err != nil || a.Reply != "new" || a.Value != 42 {
		t.Fatalf("%+v %v", a, err)
	}
}

// After a migration the terminal sends back what was written to it.
func TestEchoIsNoAnswer(t *testing.T) {
	here, there := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := NewReader(there)
		for {
			line, err := r.Line()
			if err != nil {
				return
			}
			var q Request
			if json.Unmarshal(line, &q) != nil {
				continue
			}
			answer, _ := json.Marshal(Answer{Reply: q.ID, Value: 7})
			if _, err := there.Write([]byte(string(line) + "\n" + string(answer) + "\n")); err != nil {
				return
			}
		}
	}()
	a, err := NewClient(here).Do(&Request{ID: "a", Op: Ping})
	if err != nil || a.Value != 7 {
		t.Errorf("%+v %v", a, err)
	}
	here.Close()
	there.Close()
	<-done
}

func TestLineTooLong(t *testing.T) {
	r := NewReader(strings.NewReader(strings.Repeat("x", MaxLine+1) + "\nnext\n"))
	if line, err := r.Line(); err != nil || string(line) != "next" {
		t.Fatalf("%.20q %v", line, err)
	}
	if _, err := r.Line(); err != io.EOF { //nolint:errorlint // it is not wrapped
		t.Fatalf("at the end: %v", err)
	}
}

func FuzzServe(f *testing.F) {
	f.Add([]byte("{\"id\":\"a\",\"op\":\"ping\"}\n"))
	f.Add([]byte("\n{}\n{\"id\":\"a\",\"op\":\"read\",\"bar\":-1}\nhalf"))
	f.Add([]byte{0, 0xff, '\n'})
	f.Fuzz(func(t *testing.T, in []byte) {
		var out bytes.Buffer
		asked := 0
		err := Serve(context.Background(), struct {
			io.Reader
			io.Writer
		}{bytes.NewReader(in), &out}, func(_ context.Context, q *Request) *Answer {
			if q.ID == "" || q.Op == "" {
				t.Error("asked without an ID or an operation")
			}
			asked++
			return new(Answer)
		})
		if err != io.EOF { //nolint:errorlint // it is not wrapped
			t.Errorf("it ended with %v", err)
		}
		answered := 0
		for _, line := range bytes.SplitAfter(out.Bytes(), []byte{'\n'}) {
			if len(line) == 0 {
				continue
			}
			var a Answer
			if err := json.Unmarshal(line, &a); err != nil || a.Reply == "" {
				t.Errorf("no answer: %q %v", line, err)
			}
			answered++
		}
		if asked != answered {
			t.Errorf("%d questions, %d answers", asked, answered)
		}
	})
}
