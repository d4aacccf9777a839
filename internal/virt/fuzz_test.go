package virt

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"
)

func words(w ...uint32) (b []byte) {
	for _, v := range w {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	return b
}

func framed(proc, kind, serial, status uint32, body []byte) []byte {
	return append(words(uint32(headerLen+len(body)), remoteProgram, 1, proc, kind, serial, status), body...)
}

var aDomain = append(append(words(3), "vm1\x00"...), append(make([]byte, 16), words(1)...)...)

func TestShapesAreWellFormed(t *testing.T) {
	for proc := range uint32(500) {
		s, ok := shape(proc)
		if !ok {
			continue
		}
		for s != "" {
			s = (&xdr{b: make([]byte, 1000)}).element(s)
		}
	}
	if err := follows(append(words(1, 0, 1, 2), append([]byte("hi\x00\x00"), words(2, 0, 0, 0, 0, 0, 0, 0)...)...), shapeError); err != nil {
		t.Error(err)
	}
}

func TestDecodeEvent(t *testing.T) {
	cat := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	alias := append(words(4), "gpu0"...)
	for name, test := range map[string]struct {
		proc uint32
		body []byte
		want Event
		ok   bool
	}{
		"started":        {procLifecycle, cat(words(1), aDomain, words(2, 1)), Event{Kind: Started, Detail: 1}, true},
		"crashed":        {procLifecycle, cat(words(1), aDomain, words(8, 0)), Event{Kind: GuestCrashed}, true},
		"unheard of":     {procLifecycle, cat(words(1), aDomain, words(9, 0)), Event{}, false},
		"device added":   {procDeviceAdded, cat(words(1), aDomain, alias), Event{Kind: DeviceAdded, Alias: "gpu0"}, true},
		"device removed": {procDeviceRemoved, cat(words(1), aDomain, alias), Event{Kind: DeviceRemoved, Alias: "gpu0"}, true},
		"removal failed": {procRemovalFailed, cat(words(1), aDomain, alias), Event{Kind: DeviceRemovalFailed, Alias: "gpu0"}, true},
		"iteration":      {procIteration, cat(words(1), aDomain, words(3)), Event{Kind: MigrationIteration, Iteration: 3}, true},
		"completed": {
			procJobCompleted, cat(words(1), aDomain, words(1, 8), []byte("downtime"), words(4, 0, 250)),
			Event{Kind: JobCompleted, Job: Job{State: JobIsCompleted, Downtime: 250 * time.Millisecond}},
			true,
		},
		"cut short":   {procLifecycle, cat(words(1), aDomain, words(2)), Event{}, false},
		"with a tail": {procLifecycle, cat(words(1), aDomain, words(2, 1, 0)), Event{}, false},
		"of others":   {400, cat(words(1), aDomain), Event{}, false},
	} {
		e, ok := decodeEvent(test.proc, test.body)
		if ok != test.ok {
			t.Errorf("%s: %v", name, ok)
		}
		if test.want.Domain.Name = "vm1"; ok {
			test.want.Domain.ID = 1
			if e != test.want {
				t.Errorf("%s: %+v, want %+v", name, e, test.want)
			}
		}
	}
}

// Of whatever arrives the guard hands on whole frames that answer a call, each
// call once, and it ends at the first frame that is none.
func FuzzGuard(f *testing.F) {
	f.Add(framed(procDomains, frameReply, 1, 0, append(append(words(1), aDomain...), words(1)...)), uint8(3))
	f.Add(framed(procXML, frameReply, 2, 1, append(words(42, 10, 1, 2), append([]byte("no\x00\x00"), words(2, 0, 0, 0, 0, 0, 0, 0)...)...)), uint8(200))
	f.Add(framed(procLifecycle, frameMessage, 0, 0, append(words(1), append(aDomain, words(2, 0)...)...)), uint8(1))
	f.Add(words(5), uint8(0))
	f.Add(words(0xffffffff, 0, 0, 0, 0, 0, 0), uint8(0))
	f.Fuzz(func(t *testing.T, in []byte, piece uint8) {
		here, there := net.Pipe()
		g := newGuard(here, func(proc uint32, b []byte) { decodeEvent(proc, b) })
		close(g.returned)
		go func() {
			io.Copy(io.Discard, io.LimitReader(there, 3*(headerLen+4)))
			there.Write(in)
			there.Close()
		}()
		for serial, proc := range []uint32{procDomains, procXML, procJobStats} {
			call := framed(proc, frameCall, uint32(serial+1), 0, make([]byte, 4))
			for _, part := range [][]byte{call[:5], call[5:30], call[30:]} {
				if _, err := g.Write(part); err != nil {
					t.Fatal(err)
				}
			}
		}
		if g.written() != 3 {
			t.Fatalf("%d calls counted", g.written())
		}
		var out []byte
		for buf := make([]byte, int(piece)+1); ; {
			n, err := g.Read(buf)
			out = append(out, buf[:n]...)
			if err != nil {
				break
			}
		}
		if g.why() == nil {
			t.Error("it ended and nobody knows why")
		}
		seen := map[uint32]bool{}
		for len(out) > 0 {
			if len(out) < headerLen {
				t.Fatal("half a frame came through")
			}
			h := parseHeader(out)
			if int(h.length) > len(out) || h.kind != frameReply || seen[h.serial] || h.serial < 1 || h.serial > 3 {
				t.Fatalf("%+v came through", h)
			}
			seen[h.serial] = true
			out = out[h.length:]
		}
	})
}

// No answer makes a call panic, hang or take much memory.
func FuzzAnswers(f *testing.F) {
	f.Add(uint8(0), append(append(words(1), aDomain...), words(1)...))
	f.Add(uint8(1), append(words(2, 1, 8), append([]byte("downtime"), words(4, 0, 250)...)...))
	f.Add(uint8(2), append(words(4), "<a/>"...))
	f.Fuzz(func(t *testing.T, which uint8, body []byte) {
		call := []func(*Client, context.Context) error{
			func(c *Client, ctx context.Context) error { _, err := c.Domains(ctx); return err },
			func(c *Client, ctx context.Context) error { _, err := c.Job(ctx, Domain{}); return err },
			func(c *Client, ctx context.Context) error { _, err := c.XML(ctx, Domain{}, 0); return err },
			func(c *Client, ctx context.Context) error { _, err := c.State(ctx, Domain{}); return err },
			func(c *Client, ctx context.Context) error { return c.Suspend(ctx, Domain{}) },
		}
		c, err := Open("qemu:///system", WithDialer(func(context.Context) (net.Conn, error) {
			here, there := net.Pipe()
			go answerAll(there, body)
			return here, nil
		}))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if err := c.Ready(ctx); err != nil {
			t.Fatal(err)
		}
		call[int(which)%len(call)](c, ctx)
		if ctx.Err() != nil {
			t.Fatal("it hung")
		}
	})
}

// answerAll opens and registers as it should be and answers all else with body.
func answerAll(conn net.Conn, body []byte) {
	defer conn.Close()
	head := make([]byte, headerLen)
	for {
		if _, err := io.ReadFull(conn, head); err != nil {
			return
		}
		h := parseHeader(head)
		if _, err := io.CopyN(io.Discard, conn, int64(h.length)-headerLen); err != nil {
			return
		}
		answer := body
		switch h.procedure {
		case procOpen:
			answer = nil
		case procAuthList:
			answer = words(1, 0)
		case procRegister:
			answer = words(1)
		}
		if _, err := conn.Write(framed(h.procedure, frameReply, h.serial, 0, answer)); err != nil {
			return
		}
	}
}
