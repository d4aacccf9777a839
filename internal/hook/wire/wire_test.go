package wire

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRequestsComeAcross(t *testing.T) {
	for _, want := range []Request{
		{Ping: true},
		{Event: Event{Driver: LibXL, Domain: "d", Operation: Prepare, Sub: "begin", Extra: "-", XML: []byte("<domain/>")}, Budget: 1500 * time.Millisecond},
		{Event: Event{Driver: QEMU, Domain: "ü", Operation: Migrate, XML: bytes.Repeat([]byte("x"), MaxXML)}},
		{},
	} {
		var b bytes.Buffer
		if err := WriteRequest(&b, want); err != nil {
			t.Fatal(err)
		}
		got, err := ReadRequest(&b)
		if !reflect.DeepEqual(want, got) || err != nil || b.Len() > 0 {
			t.Errorf("%v, %d bytes left; kind, driver, domain: %v, %q, %q", err, b.Len(), got.Ping, got.Event.Driver, got.Event.Domain)
		}
	}
}

func TestResponsesComeAcross(t *testing.T) {
	for _, want := range []Response{{Status: Done}, {Status: Denied, Message: "no"}, {Status: Done, XML: []byte("<domain/>"), Version: "1.2"}} {
		var b bytes.Buffer
		if err := WriteResponse(&b, want); err != nil {
			t.Fatal(err)
		}
		got, err := ReadResponse(&b)
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%v\n%s", err, d)
		}
	}
	var b bytes.Buffer
	if err := WriteResponse(&b, Response{Status: Denied, Message: strings.Repeat("y", 2*MaxText)}); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadResponse(&b); err != nil || len(got.Message) != MaxText {
		t.Errorf("%d bytes, %v", len(got.Message), err)
	}
}

func TestWhatIsTooLongIsNotSent(t *testing.T) {
	for _, e := range []Event{{XML: make([]byte, MaxXML+1)}, {Domain: strings.Repeat("d", MaxText+1)}} {
		var b bytes.Buffer
		if err := WriteRequest(&b, Request{Event: e}); err == nil || b.Len() > 0 {
			t.Errorf("%d bytes were sent (%v)", b.Len(), err)
		}
	}
}

// field writes one field as the protocol has it, whatever its length.
func field(tag byte, length uint32, value string) string {
	return string([]byte{tag}) + string(binary.BigEndian.AppendUint32(nil, length)) + value
}

func framed(body string) string {
	return magic + string(binary.BigEndian.AppendUint32(nil, uint32(len(body)))) + body
}

func TestFieldsOfTheFutureAreSkipped(t *testing.T) {
	in := framed(field(tagKind, 5, "event") + field(200, 3, "new") + field(tagDomain, 1, "d"))
	if r, err := ReadRequest(strings.NewReader(in)); err != nil || r.Event.Domain != "d" {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestNonsenseIsRefused(t *testing.T) {
	for name, in := range map[string]string{
		"another protocol": "GET / HTTP/1.1\r\n",
		"too long":         magic + "\xff\xff\xff\xff",
		"no kind":          framed(field(tagDomain, 1, "d")),
		"unknown kind":     framed(field(tagKind, 1, "x")),
		"field cut off":    framed(field(tagKind, 9, "event")),
		"header cut off":   framed("\x01\x00"),
		"long text":        framed(field(tagDomain, MaxText+1, strings.Repeat("d", MaxText+1))),
		"many fields":      framed(strings.Repeat(field(99, 0, ""), maxFields+1)),
	} {
		if r, err := ReadRequest(strings.NewReader(in)); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
	if _, err := ReadRequest(strings.NewReader(magic + "\x00\x00\x00\x09x")); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut off: %v", err)
	}
}

// serve answers one connection after the other as the script says.
func serve(t *testing.T, script func(net.Conn)) Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			script(c)
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return Client{Socket: path}
}

func TestClient(t *testing.T) {
	say := func(r Response) func(net.Conn) {
		return func(c net.Conn) {
			if _, err := ReadRequest(c); err == nil {
				_ = WriteResponse(c, r)
			}
		}
	}
	var denied *DeniedError
	is := func(want error) func(error) bool { return func(err error) bool { return errors.Is(err, want) } }
	for _, c := range []struct {
		name   string
		script func(net.Conn)
		want   func(error) bool
	}{
		{"done", say(Response{Status: Done}), func(err error) bool { return err == nil }},
		{"denied", say(Response{Status: Denied, Message: "no"}), func(err error) bool { return errors.As(err, &denied) && denied.Message == "no" }},
		{"late", say(Response{Status: Late}), is(ErrLate)},
		{"unready", say(Response{Status: Unready}), is(ErrUnreachable)},
		{"a status of the future", say(Response{Status: "maybe"}), is(ErrUnreachable)},
		{"goes away", func(net.Conn) {}, is(ErrUnreachable)},
		{"nonsense", func(c net.Conn) { _, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n") }, is(ErrUnreachable)},
		{"silent", func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }, is(ErrLate)},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		if _, err := serve(t, c.script).Call(ctx, Event{XML: make([]byte, 100)}); !c.want(err) {
			t.Errorf("%s: %v", c.name, err)
		}
		cancel()
	}
	if _, err := (Client{Socket: "/nowhere"}).Call(t.Context(), Event{}); !errors.Is(err, ErrUnreachable) {
		t.Error(err)
	}
}

// The server must know how long there is to wait, and end before the hook does.
func TestBudgetIsLessThanTheDeadline(t *testing.T) {
	got := make(chan Request, 1)
	c := serve(t, func(conn net.Conn) {
		r, _ := ReadRequest(conn)
		got <- r
		_ = WriteResponse(conn, Response{Status: Done})
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := c.Call(ctx, Event{Domain: "d"}); err != nil {
		t.Fatal(err)
	}
	if b := (<-got).Budget; b < 8*time.Second || b > 10*time.Second-margin {
		t.Errorf("budget %v", b)
	}
}

func FuzzReadRequest(f *testing.F) {
	var b bytes.Buffer
	_ = WriteRequest(&b, Request{Event: Event{Driver: QEMU, Domain: "d", Operation: Prepare, XML: []byte("<domain/>")}, Budget: time.Second})
	f.Add(b.Bytes())
	f.Add([]byte(framed(field(tagKind, 4, "ping"))))
	f.Add([]byte(magic + "\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := ReadRequest(bytes.NewReader(data))
		if err != nil {
			return
		}
		var out bytes.Buffer
		if err := WriteRequest(&out, r); err != nil {
			t.Fatalf("what was read can't be written: %v", err)
		}
		again, err := ReadRequest(&out)
		if d := cmp.Diff(r, again, cmp.Transformer("empty", func(b []byte) string { return string(b) })); d != "" || err != nil {
			t.Fatalf("%v\n%s", err, d)
		}
	})
}

func FuzzReadResponse(f *testing.F) {
	var b bytes.Buffer
	_ = WriteResponse(&b, Response{Status: Denied, Message: "no", Version: "1"})
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := ReadResponse(bytes.NewReader(data))
		if err == nil && (len(r.Message) > MaxText || len(r.XML) > MaxXML) {
			t.Fatal("longer than allowed")
		}
	})
}
