package relay

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/excerpt"
)

// Prefix begins an address (HOST:PORT) that is reached through the VM's host.
const Prefix = "relay:"

// Path is where Guest serves the host's requests: the id of a connection follows.
const Path = "/relay/"

const (
	protocol    = "gpuctl-relay" // that HTTP is upgraded to
	refusal     = "Gpuctl-Refused"
	maxAddress  = 300 // bytes
	maxFirst    = 64
	maxText     = 300 // bytes of a reason
	headFor     = 10 * time.Second
	waitFor     = 15 * time.Second // for the host to make a connection
	copyAtOnce  = 64 << 10
	lookEvery   = 10 * time.Second // whether an end has hung up
	mostWaiting = 64
	mostJoined  = 512 // connections of one VM
)

// Errors of connections.
var (
	// ErrRefused is returned for what the host does not let the VM reach, and for what was not
	// reached.
	ErrRefused = errors.New("the relay refuses the connection")
	errFull    = fmt.Errorf("%d connections go through the relay, and there are no more", mostJoined)
	errHead    = errors.New("not a request of a program for a connection")
)

// Wish is a connection that waits for the host.
type Wish struct {
	ID      string // of this connection, random
	Address string // HOST:PORT
	Bulk    bool   // it may carry much at once: others must not wait behind it
	First   []byte // what it sends first, maxFirst bytes at most
}

// Check returns an error for a wish that no Guest has sent.
func (w Wish) Check() error {
	if _, _, err := net.SplitHostPort(w.Address); err != nil || len(w.Address) > maxAddress || strings.ContainsAny(w.Address, " \n") {
		return fmt.Errorf("address %.80q is not HOST:PORT: %w", w.Address, errHead)
	}
	if len(w.First) > maxFirst {
		return fmt.Errorf("%d bytes are to be sent first, of %d: %w", len(w.First), maxFirst, errHead)
	}
	return nil
}

// The head of a program's connection: "c ADDRESS\n" or "b ADDRESS\n" (bulk), a byte with the
// number of bytes that are sent first, and these. The answer is "ok\n", or "no REASON\n".

func (w Wish) head() []byte {
	lane := "c "
	if w.Bulk {
		lane = "b "
	}
	b := append([]byte(lane), w.Address...)
	b = append(b, '\n', byte(len(w.First)))
	return append(b, w.First...)
}

func readHead(r io.Reader) (w Wish, err error) {
	line, err := readLine(r, 2+maxAddress)
	if err != nil {
		return w, err
	}
	var lane string
	if lane, w.Address, _ = strings.Cut(line, " "); lane != "c" && lane != "b" {
		return w, errHead
	}
	w.Bulk = lane == "b"
	var n [1]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return w, err
	}
	if w.First = make([]byte, n[0]); len(w.First) <= maxFirst {
		_, err = io.ReadFull(r, w.First)
	}
	return w, errors.Join(err, w.Check())
}

// readLine reads up to the end of a line of most bytes, and nothing of what follows.
func readLine(r io.Reader, most int) (string, error) {
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(r, b); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		if line = append(line, b[0]); len(line) > most {
			return "", errHead
		}
	}
}

// Dial connects to an address through the Guest or Near that listens at the socket, and sends
// first. bulk says that much may go over it at once.
func Dial(ctx context.Context, socket, address string, bulk bool, first []byte) (net.Conn, error) {
	w := Wish{Address: address, Bulk: bulk, First: first}
	if err := w.Check(); err != nil {
		return nil, err
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	_, werr := conn.Write(w.head()) // fails if it is refused before it is read: the answer says why
	answer, err := readLine(conn, len("no ")+maxText)
	if err != nil {
		err = cmp.Or(werr, err)
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	reason, refused := strings.CutPrefix(answer, "no ")
	switch {
	case err != nil:
		err = fmt.Errorf("relay: %w", err)
	case refused:
		err = fmt.Errorf("%w: %s", ErrRefused, reason)
	case answer != "ok":
		err = fmt.Errorf("relay answers %q: %w", answer, errHead)
	default:
		return conn, nil
	}
	conn.Close()
	return nil, err
}

// serve accepts programs' connections until ctx ends, calls end then, and returns when all of
// them have ended. An error of program is told to the program.
func serve(ctx context.Context, l *net.UnixListener, log *slog.Logger, program func(*net.UnixConn) error, end func()) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer end()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	for {
		conn, err := l.AcceptUnix()
		if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil { // as no descriptor is left: that passes
			time.Sleep(100 * time.Millisecond)
			continue
		}
		wg.Go(func() {
			if err := program(conn); err != nil {
				log.Debug("a connection of a program is not made", "err", err)
				_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
				_, _ = conn.Write([]byte("no " + reasonOf(err) + "\n"))
				_ = conn.Close()
			}
		})
	}
}

// reasonOf returns an error's text in one line.
func reasonOf(err error) string {
	return excerpt.Line(strings.ReplaceAll(err.Error(), "\n", "; "), maxText)
}

// join copies between two connections in both directions until one of them ends, and closes
// both. What was sent before the end arrives, if the other end takes it within twice lookEvery.
func join(a, b io.ReadWriteCloser) { joinLooking(a, b, lookEvery) }

// joinLooking looks now and then whether an end has hung up: who is waiting for the other end to
// take something does not read, and does not see that.
func joinLooking(a, b io.ReadWriteCloser, every time.Duration) {
	ended := make(chan struct{}, 2)
	one := func(to io.Writer, from io.Reader) {
		_, _ = io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, make([]byte, copyAtOnce))
		ended <- struct{}{}
	}
	go one(a, b)
	go one(b, a)
	look := time.NewTicker(every)
	defer look.Stop()
	left := 2 // copiers
	for gone := 0; left == 2 && gone < 2; {
		select {
		case <-ended:
			left--
		case <-look.C:
			if gone++; !hungUp(a) && !hungUp(b) {
				gone = 0
			}
		}
	}
	_ = a.Close()
	_ = b.Close()
	for range left {
		<-ended
	}
}

// hungUp reports whether the other end of a socket sends no more. What was sent before may not
// have been read.
func hungUp(conn io.ReadWriteCloser) (gone bool) {
	s, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(p, 0)
		gone = err == nil && n > 0
	})
	return gone
}

// leading is a connection of which the first bytes were read already.
type leading struct {
	net.Conn
	rest *bytes.Reader
}

func (l leading) Read(b []byte) (int, error) {
	if l.rest.Len() > 0 {
		return l.rest.Read(b)
	}
	return l.Conn.Read(b)
}
