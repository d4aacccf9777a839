package wire

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"
)

// Errors of a Client beside *DeniedError.
var (
	// ErrUnreachable says that no hostd gave an answer.
	ErrUnreachable = errors.New("hostd does not answer")
	// ErrLate says that hostd took the request and did not end in time.
	ErrLate = errors.New("hostd did not finish in time")
)

// DeniedError is hostd's refusal.
type DeniedError struct{ Message string }

func (e *DeniedError) Error() string { return e.Message }

// SocketName is the socket's in hostd's run folder.
const SocketName = "hook.sock"

// IDsName is a file beside the socket: vendor and device ids, "1b36:0010" a line,
// of GPUs that their class does not tell. hostd writes it; the hook, which reads
// no catalogue, knows by it what is at stake, also while hostd is down.
const IDsName = "hook.ids"

const (
	dialPause = 5 * time.Millisecond
	// margin is how much earlier than the hook hostd gives up, so that its
	// last word is heard.
	margin = 400 * time.Millisecond
)

// Client asks hostd on a socket.
type Client struct{ Socket string }

// Call reports an event and waits, at most until ctx ends, for what to do. The
// error is a *DeniedError, or wraps ErrLate or ErrUnreachable.
func (c Client) Call(ctx context.Context, e Event) (Answer, error) {
	req := Request{Event: e}
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		req.Budget = max(left-margin, left/2)
	}
	res, err := c.exchange(ctx, req)
	if err != nil {
		return Answer{}, err
	}
	switch res.Status {
	case Done:
		return Answer{XML: res.XML}, nil
	case Denied:
		return Answer{}, &DeniedError{Message: res.Message}
	case Late:
		return Answer{}, fmt.Errorf("%w: %s", ErrLate, res.Message)
	case Unready:
		return Answer{}, fmt.Errorf("%w: %s", ErrUnreachable, res.Message)
	}
	return Answer{}, fmt.Errorf("%w: it says %.20q, which this hook does not know", ErrUnreachable, res.Status)
}

// Ping says which version of hostd answers.
func (c Client) Ping(ctx context.Context) (version string, err error) {
	res, err := c.exchange(ctx, Request{Ping: true})
	if err == nil && res.Status != Done {
		err = fmt.Errorf("%w: %s", ErrUnreachable, res.Message)
	}
	return res.Version, err
}

func (c Client) exchange(ctx context.Context, req Request) (Response, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return Response{}, fmt.Errorf("%w: %w", ErrUnreachable, short(err))
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := trusted(conn); err != nil {
		return Response{}, fmt.Errorf("%w: socket %s: %w", ErrUnreachable, c.Socket, err)
	}
	if err := WriteRequest(conn, req); err != nil {
		return Response{}, fmt.Errorf("%w: %w", ErrUnreachable, short(err))
	}
	res, err := ReadResponse(conn)
	switch {
	case err != nil && ctx.Err() != nil:
		// The request is written: hostd may well be at it.
		return Response{}, fmt.Errorf("%w: %w", ErrLate, ctx.Err())
	case err != nil:
		return Response{}, fmt.Errorf("%w: it went away: %w", ErrUnreachable, short(err))
	}
	return res, nil
}

// dial tries again while hostd has more calls waiting than its queue holds.
func (c Client) dial(ctx context.Context) (*net.UnixConn, error) {
	for {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", c.Socket)
		if err == nil {
			u, ok := conn.(*net.UnixConn)
			if !ok {
				_ = conn.Close()
				return nil, net.ErrClosed
			}
			return u, nil
		}
		if !errors.Is(err, syscall.EAGAIN) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(dialPause):
		}
	}
}

// trusted says that root, or who we are ourselves, listens.
func trusted(conn *net.UnixConn) error {
	uid, err := PeerUID(conn)
	if err != nil {
		return err
	}
	if uid != 0 && int(uid) != os.Getuid() {
		return fmt.Errorf("user %d listens there, not root", uid)
	}
	return nil
}

// PeerUID is the user at the other end of a connection, as the kernel knows it.
func PeerUID(conn *net.UnixConn) (uint32, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *syscall.Ucred
	var inner error
	if err := raw.Control(func(fd uintptr) {
		cred, inner = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if inner != nil {
		return 0, inner
	}
	return cred.Uid, nil
}

// short leaves out what net says around a system call's error.
func short(err error) error {
	var number syscall.Errno
	if errors.As(err, &number) {
		return number
	}
	return err
}
