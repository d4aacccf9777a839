// Package handover passes open files to executors. An executor does not open a
// file that somebody names. gpuguest opens it, with the rights of the session,
// and passes the descriptor with the name that later calls use for the file.
package handover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxName = 4096
	taken   = 1 // the receiver's answer
	patient = 10 * time.Second
	pause   = 50 * time.Millisecond // after an error of accept
)

// Give passes f to the executor at the other end of conn, and closes conn. Errors do not
// contain the name: that of a carrier's connection has its token.
func Give(ctx context.Context, conn *net.UnixConn, name string, f *os.File) error {
	defer conn.Close()
	if len(name) == 0 || len(name) > maxName {
		return fmt.Errorf("hand over a file: its name has %d bytes, and from 1 to %d are allowed", len(name), maxName)
	}
	end := time.Now().Add(patient)
	if d, ok := ctx.Deadline(); ok && d.Before(end) {
		end = d
	}
	_ = conn.SetDeadline(end)
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	msg := append([]byte{byte(len(name)), byte(len(name) >> 8)}, name...)
	n, _, err := conn.WriteMsgUnix(msg, unix.UnixRights(int(f.Fd())), nil)
	if err == nil && n < len(msg) {
		_, err = conn.Write(msg[n:])
	}
	var answer [1]byte
	if err == nil {
		_, err = io.ReadFull(conn, answer[:])
	}
	if err == nil && answer[0] != taken {
		err = errors.New("it was not taken")
	}
	if err != nil {
		return fmt.Errorf("hand over a file: %w", err)
	}
	return nil
}

// Listen opens a socket of an executor, for its own user and root. It replaces one that is
// there.
func Listen(path string) (*net.UnixListener, error) {
	_ = os.Remove(path)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("listen: %w", err)
	}
	return l, nil
}

// Serve calls take with each file that is handed over, until l is closed. Other errors, as
// that no descriptors are left, pass: it goes on. take owns the file. Only root and the user of this process may hand files over.
func Serve(l *net.UnixListener, take func(name string, f *os.File)) error {
	for {
		conn, err := Accept(l.AcceptUnix)
		if err != nil {
			return err
		}
		_ = conn.SetDeadline(time.Now().Add(patient))
		if name, f, err := receive(conn); err == nil {
			take(name, f)
			_, _ = conn.Write([]byte{taken})
		}
		conn.Close()
	}
}

// Accept returns the next connection that accept, a listener's method, gives. Only the listener's end is an
// error: others, as that no descriptors are left, pass.
func Accept[C net.Conn](accept func() (C, error)) (C, error) {
	for {
		conn, err := accept()
		if err == nil || errors.Is(err, net.ErrClosed) {
			return conn, err
		}
		time.Sleep(pause)
	}
}

func receive(conn *net.UnixConn) (string, *os.File, error) {
	if cred, err := Peer(conn); err != nil || cred.Uid != 0 && cred.Uid != uint32(os.Getuid()) {
		return "", nil, errors.New("from another user")
	}
	head := make([]byte, 2)
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn, flags, _, err := conn.ReadMsgUnix(head, oob)
	if err != nil {
		return "", nil, err
	}
	var fds []int
	if msgs, merr := unix.ParseSocketControlMessage(oob[:oobn]); merr == nil && len(msgs) == 1 {
		fds, _ = unix.ParseUnixRights(&msgs[0])
	}
	for _, fd := range fds {
		unix.CloseOnExec(fd)
	}
	fail := func(err error) (string, *os.File, error) {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		return "", nil, err
	}
	if len(fds) != 1 || flags&unix.MSG_CTRUNC != 0 {
		return fail(errors.New("not one file"))
	}
	if _, err := io.ReadFull(conn, head[n:]); err != nil {
		return fail(err)
	}
	name := make([]byte, int(head[0])|int(head[1])<<8)
	if len(name) == 0 || len(name) > maxName {
		return fail(errors.New("no name"))
	}
	if _, err := io.ReadFull(conn, name); err != nil {
		return fail(err)
	}
	return string(name), os.NewFile(uintptr(fds[0]), string(name)), nil
}

// Peer returns the credentials of the process at the other end of conn. For a client, that
// is the process that listened.
func Peer(conn *net.UnixConn) (*unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil {
		return nil, cerr
	}
	if err != nil {
		return nil, fmt.Errorf("peer's credentials: %w", err)
	}
	return cred, nil
}
