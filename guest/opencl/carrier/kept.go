package carrier

import (
	"errors"
	"io"
	"net"
	"sync"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
)

// errEnd ends the contents of an export over a connection that stays.
var errEnd = errors.New("the export has ended")

// contentsConn is a connection with the far executor for contents. It may stay from one
// export to the next, so that the last one, for which the application stands still, waits
// neither for a connection nor for TCP to find out how much the network takes.
type contentsConn struct {
	net.Conn
	from  io.Reader          // reads it
	hello [greetingSize]byte // of the far executor, where contents go there
	begun bool               // the first word has come
}

func newContentsConn(conn net.Conn) *contentsConn {
	return &contentsConn{Conn: conn, from: remote.NewReader(conn)}
}

// settle ends the use of the connection for an export: it is kept for the next one, or closed.
func (x *contentsConn) settle(k *kept, stays bool) {
	if stays {
		k.put(x)
	} else {
		x.Close()
	}
}

// kept is where a connection is between two exports.
type kept struct {
	mu   sync.Mutex
	conn *contentsConn
}

// take returns the connection, or nil.
func (k *kept) take() *contentsConn {
	k.mu.Lock()
	defer k.mu.Unlock()
	x := k.conn
	k.conn = nil
	return x
}

func (k *kept) put(x *contentsConn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != nil {
		k.conn.Close()
	}
	k.conn = x
}

// drop closes the connection, if there is one.
func (k *kept) drop() {
	if x := k.take(); x != nil {
		x.Close()
	}
}

// taken passes on what the far executor acknowledges: four bytes for each batch.
type taken struct {
	batches chan struct{} // that were sent
	failed  chan error    // the result
}

// passTaken begins to pass on to conn what far acknowledges.
func (c *carrier) passTaken(far *contentsConn, conn net.Conn) *taken {
	t := &taken{batches: make(chan struct{}, mostUnderWay), failed: make(chan error, 1)}
	go func() {
		var b [4]byte
		for range t.batches {
			_, err := io.ReadFull(far.from, b[:])
			if err == nil {
				_, err = conn.Write(b[:])
			}
			if err != nil {
				far.Close()
				conn.Close() // the source waits for nothing more
				t.failed <- err
				for range t.batches { // whoever sends must not wait
				}
				return
			}
		}
		t.failed <- nil
	}()
	return t
}

// mostUnderWay bounds how many batches a source may send that are not acknowledged: more than
// any does.
const mostUnderWay = 1024

// expect says that a batch was sent.
func (t *taken) expect() error {
	select {
	case t.batches <- struct{}{}:
		return nil
	default:
		return errUnderWay
	}
}

var errUnderWay = errors.New("more batches of contents than any source sends before one is acknowledged")

// end waits until all batches are acknowledged.
func (t *taken) end() error {
	close(t.batches)
	return <-t.failed
}
