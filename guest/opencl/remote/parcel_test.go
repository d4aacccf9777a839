package remote

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"testing"
)

// Pieces arrive in their order, over TLS and without, and few writes carry many of them.
func TestParcelArrivesInFewWrites(t *testing.T) {
	for _, plain := range []bool{true, false} {
		a, b := pair(t, plain)
		counted := &counts{Conn: a}
		to, from := io.Writer(counted), io.Reader(b)
		if !plain {
			d, acc := ends(t)
			from, to = sealedPair(t, d, acc, counted, b)
			counted.writes, counted.most = 0, 0
		}
		want := []byte("head")
		p := NewParcel([]byte("head"))
		for i := range 1024 {
			x := bytes.Repeat([]byte{byte(i)}, 1<<10)
			want = append(want, x...)
			p.Add(x)
		}
		big := bytes.Repeat([]byte{7}, 3<<20)
		p.Add(big)
		p.Add([]byte("tail"))
		want = append(append(want, big...), "tail"...)
		sent := make(chan error, 1)
		go func() { sent <- p.Send(to) }()
		got := make([]byte, len(want))
		if _, err := io.ReadFull(NewReader(from), got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("plain %v: other bytes: %v", plain, err)
		}
		if err := <-sent; err != nil {
			t.Error(err)
		}
		if counted.writes > 20 {
			t.Errorf("plain %v: %d writes for %d bytes", plain, counted.writes, len(want))
		}
	}
}

// counts counts the writes of a connection.
type counts struct {
	net.Conn
	writes, most int
}

func (c *counts) Write(b []byte) (int, error) {
	c.writes++
	c.most = max(c.most, len(b))
	return c.Conn.Write(b)
}

// WriteBuffers implements link.BuffersWriter.
func (c *counts) WriteBuffers(v *net.Buffers) (int64, error) {
	c.writes++
	return c.Conn.(*socket).WriteBuffers(v)
}

// sealedPair does TLS over both ends of a connection.
func sealedPair(t *testing.T, d *Dialer, a *Acceptor, c, s net.Conn) (from, to net.Conn) {
	t.Helper()
	cc, err := d.Own.config(d.Peer, Bulk)
	if err != nil {
		t.Fatal(err)
	}
	sc, err := a.Own.config(a.Peer, Bulk)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		var err error
		from, err = seal(context.Background(), s, sc, tls.Server)
		done <- err
	}()
	if to, err = seal(t.Context(), c, cc, tls.Client); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return from, to
}
