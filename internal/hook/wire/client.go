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

// Errors of a Client, in addition to *DeniedError.
var (
	// ErrUnreachable means that no hostd has answered.
	ErrUnreachable = errors.New("hostd does not answer")
	// ErrLate means that hostd has received the request and did not finish in time.
	ErrLate = errors.New("hostd did not finish in time")
)

// DeniedError is hostd's refusal.
type DeniedError struct{ Message string }

func (e *DeniedError) Error() string { return e.Message }

// SocketName is the name of the socket in hostd's run folder.
const SocketName = "hook.sock"

// IDsName is the name of a file beside the socket, with vendor and device ids, such as
// "1b36:0010", one in each line: the ids of GPUs that are not recognized by their class.
// hostd writes it. The hook reads it, even while hostd is down, because it has no
// catalogue.
const IDsName = "hook.ids"

// PartsName is the name of a file beside the socket, with the UUIDs of VMs that have parts of
// mediated GPUs, one in each line. Nothing in a VM's definition says so.
const PartsName = "hook.parts"

// ArrivalsName is the name of a file with those of them that a migration is to bring here.
const ArrivalsName = "hook.arrivals"

const (
	dialPause = 5 * time.Millisecond
	// margin is how much earlier than the hook hostd's time-out is, so that its answer
	// still arrives.
	margin = 400 * time.Millisecond
)

// Client calls hostd on a socket.
type Client struct{ Socket string }

// Call sends an event and waits for the answer, at most until ctx ends. The error is a
// *DeniedError, or wraps ErrLate or ErrUnreachable.
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

// Ping returns the version of the hostd that answers.
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
		// The request was sent, so hostd may be working on it.
		return Response{}, fmt.Errorf("%w: %w", ErrLate, ctx.Err())
	case err != nil:
		return Response{}, fmt.Errorf("%w: it went away: %w", ErrUnreachable, short(err))
	}
	return res, nil
}

// dial tries again while hostd's queue of connections is full.
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

// trusted returns an error unless root or our own user listens.
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

// PeerUID returns the user at the other end of a connection, as the kernel reports it.
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

// short returns the error of a system call without what package net adds.
func short(err error) error {
	var number syscall.Errno
	if errors.As(err, &number) {
		return number
	}
	return err
}
