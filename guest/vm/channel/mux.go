package channel

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"time"

	"github.com/hashicorp/yamux"
)

const (
	backlog = 64 // most streams that are not accepted yet
	// muxTimeout limits how long a write waits for other streams. A guest that sends
	// nothing is detected by the link.
	muxTimeout  = time.Minute
	streamClose = 30 * time.Second
	writeAtOnce = 8 << 10 // bytes of one stream before other streams get their turn

	muxHeader = 12
	muxData   = 0 // types of yamux frames
	muxPing   = 2
	muxSYN    = 1 // flag of a frame that opens a stream
)

var errOpens = errors.New("the guest opens a stream, which is the host's to do")

// discard is a yamux.Logger that logs nothing. Errors contain what is important, and a
// guest must not fill the host's log.
type discard struct{}

func (discard) Print(...any)          {}
func (discard) Printf(string, ...any) {}
func (discard) Println(...any)        {}

func muxConfig() *yamux.Config {
	c := yamux.DefaultConfig()
	c.AcceptBacklog = backlog
	c.EnableKeepAlive = false // the link has its own
	c.ConnectionWriteTimeout = muxTimeout
	c.StreamOpenTimeout = muxTimeout
	c.StreamCloseTimeout = streamClose
	c.LogOutput, c.Logger = nil, discard{}
	return c
}

// hostMux returns the host's end of the streams. The guest must not open streams.
func hostMux(l io.ReadWriteCloser) (*yamux.Session, error) {
	s, err := yamux.Client(struct {
		io.Reader
		io.WriteCloser
	}{&sieve{r: l}, l}, muxConfig())
	if err != nil {
		return nil, err
	}
	if err := s.GoAway(); err != nil {
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

// sieve refuses yamux frames that a guest must not send. For each ping, yamux starts a
// goroutine, and a guest could send pings without end. For a stream that the guest opens,
// yamux waits until it can reject it.
type sieve struct {
	r    io.Reader
	left uint32 // remaining bytes of a frame's payload
	hdr  [muxHeader]byte
	head []byte // part of hdr that is still to be read
}

func (p *sieve) Read(b []byte) (int, error) {
	for p.left == 0 && len(p.head) == 0 {
		if _, err := io.ReadFull(p.r, p.hdr[:]); err != nil {
			return 0, err
		}
		if p.hdr[1] == muxPing {
			continue
		}
		if binary.BigEndian.Uint16(p.hdr[2:])&muxSYN != 0 {
			return 0, errOpens
		}
		p.head = p.hdr[:]
		if p.hdr[1] == muxData {
			p.left = binary.BigEndian.Uint32(p.hdr[8:])
		}
	}
	if len(p.head) > 0 {
		n := copy(b, p.head)
		p.head = p.head[n:]
		return n, nil
	}
	n, err := p.r.Read(b[:min(uint64(len(b)), uint64(p.left))])
	p.left -= uint32(n)
	return n, err
}

// fair is a stream that writes in small parts, so that other streams get their turn.
type fair struct{ net.Conn }

func (c fair) Write(b []byte) (int, error) {
	n := 0
	for {
		k, err := c.Conn.Write(b[n:min(n+writeAtOnce, len(b))])
		n += k
		if err != nil || n >= len(b) {
			return n, err
		}
	}
}

// fairListener is a yamux session as a listener for fair streams.
type fairListener struct{ *yamux.Session }

func (l fairListener) Accept() (net.Conn, error) {
	c, err := l.Session.Accept()
	if err != nil {
		return nil, err
	}
	return fair{c}, nil
}

// number returns a random number that is not zero.
func number() uint64 {
	var b [8]byte
	for {
		_, _ = rand.Read(b[:]) // crypto/rand never fails
		if n := binary.BigEndian.Uint64(b[:]); n != 0 {
			return n
		}
	}
}
