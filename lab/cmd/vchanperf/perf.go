package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"time"
)

// A request is an operation, a number of bytes and the seed of a pattern. The
// server answers a byte when it is ready.
const (
	opEcho = iota + 1 // the bytes come back
	opTake            // the server answers good or bad
	opGive            // the server sends the pattern

	requestLen = 1 + 8 + 8
	ready      = 'r'
	good       = 'g'
	bad        = 'b'

	block = 1<<20 - 3 // bytes after which a pattern repeats: of no ring's size
	chunk = 256 << 10
	pings = 50
)

func request(op byte, count, seed uint64) []byte {
	b := binary.LittleEndian.AppendUint64([]byte{op}, count)
	return binary.LittleEndian.AppendUint64(b, seed)
}

// pattern is bytes that repeat, but no ring of them looks like the one before.
func pattern(seed uint64) []byte {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	p := make([]byte, block)
	_, _ = mathrand.NewChaCha8(key).Read(p) // it cannot fail
	return append(p, p[:chunk]...)          // a chunk from anywhere is in one piece
}

// send writes count bytes of a pattern.
func send(w io.Writer, p []byte, count uint64) error {
	for at := uint64(0); at < count; {
		n := min(chunk, count-at)
		i := at % block
		if _, err := w.Write(p[i : i+n]); err != nil {
			return err
		}
		at += n
	}
	return nil
}

// receive reads count bytes and reports whether they are the pattern's.
func receive(r io.Reader, p []byte, count uint64) (same bool, err error) {
	same = true
	buf := make([]byte, chunk)
	for at := uint64(0); at < count; {
		n, err := r.Read(buf[:min(chunk, count-at)])
		if err != nil {
			return false, err
		}
		i := at % block
		same = same && bytes.Equal(buf[:n], p[i:i+uint64(n)])
		at += uint64(n)
	}
	return same, nil
}

// serve answers one connection after the other until ctx ends.
func serve(ctx context.Context, l net.Listener, log func(error)) error {
	defer l.Close() // waits for the one below
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			log(err)
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
			continue
		}
		stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
		if err := answer(conn); err != nil {
			log(err)
		}
		stop()
		_ = conn.Close()
	}
}

// answer answers requests until the client says goodbye.
func answer(conn net.Conn) error {
	for {
		var q [requestLen]byte
		if _, err := io.ReadFull(conn, q[:]); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		count, seed := binary.LittleEndian.Uint64(q[1:]), binary.LittleEndian.Uint64(q[9:])
		var p []byte
		if q[0] != opEcho {
			p = pattern(seed)
		}
		_, err := conn.Write([]byte{ready})
		if err != nil {
			return err
		}
		switch q[0] {
		case opEcho:
			_, err = io.CopyBuffer(conn, io.LimitReader(conn, int64(count)), make([]byte, chunk))
		case opTake:
			var same bool
			if same, err = receive(conn, p, count); err == nil {
				verdict := []byte{bad}
				if same {
					verdict[0] = good
				}
				_, err = conn.Write(verdict)
			}
		case opGive:
			err = send(conn, p, count)
		default:
			err = fmt.Errorf("unknown operation %d", q[0])
		}
		if err != nil {
			return err
		}
	}
}

// result is what try found.
type result struct {
	Bytes       int64   `json:"bytes"` // each way
	Sum         string  `json:"sum"`   // of what was echoed
	ToGuest     float64 `json:"to_guest_mb_per_s"`
	FromGuest   float64 `json:"from_guest_mb_per_s"`
	Echo        float64 `json:"echo_mb_per_s"` // each way at once
	RoundTripMS float64 `json:"round_trip_ms"`
}

// try moves size bytes to the server, from it and through it.
func try(conn net.Conn, size int64) (*result, error) {
	r := &result{Bytes: size}
	count, seed := uint64(size), mathrand.Uint64() //nolint:gosec // any bytes will do
	ask := func(op byte, count uint64) error {
		if _, err := conn.Write(request(op, count, seed)); err != nil {
			return err
		}
		return expect(conn, ready)
	}
	rate := func(began time.Time) float64 { return float64(size) / 1e6 / time.Since(began).Seconds() }

	began := time.Now()
	for range pings {
		if err := ask(opEcho, 0); err != nil {
			return nil, fmt.Errorf("ping: %w", err)
		}
	}
	r.RoundTripMS = time.Since(began).Seconds() * 1000 / pings

	p := pattern(seed)
	if err := ask(opTake, count); err != nil {
		return nil, fmt.Errorf("to the guest: %w", err)
	}
	began = time.Now()
	err := send(conn, p, count)
	if err == nil {
		err = expect(conn, good)
	}
	if err != nil {
		return nil, fmt.Errorf("to the guest: %w", err)
	}
	r.ToGuest = rate(began)

	if err := ask(opGive, count); err != nil {
		return nil, fmt.Errorf("from the guest: %w", err)
	}
	began = time.Now()
	same, err := receive(conn, p, count)
	if err == nil && !same {
		err = errors.New("other bytes came")
	}
	if err != nil {
		return nil, fmt.Errorf("from the guest: %w", err)
	}
	r.FromGuest = rate(began)

	data := make([]byte, size)
	_, _ = rand.Read(data) // it cannot fail
	want := sha256.Sum256(data)
	if err := ask(opEcho, count); err != nil {
		return nil, fmt.Errorf("echo: %w", err)
	}
	began = time.Now()
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(data)
		sent <- err
	}()
	back := make([]byte, size)
	_, err = io.ReadFull(conn, back)
	r.Echo = rate(began)
	if err != nil {
		_ = conn.Close() // ends the writing
	}
	if err := errors.Join(<-sent, err); err != nil {
		return nil, fmt.Errorf("echo: %w", err)
	}
	got := sha256.Sum256(back)
	if got != want {
		return nil, fmt.Errorf("echo: sum %x went out and %x came back", want, got)
	}
	r.Sum = fmt.Sprintf("%x", got)
	return r, nil
}

func expect(r io.Reader, want byte) error {
	var b [1]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return err
	}
	if b[0] != want {
		return fmt.Errorf("the server says %q, not %q", b[0], want)
	}
	return nil
}
