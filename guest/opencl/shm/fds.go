package shm

import (
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"
)

// ErrDescriptors is returned when a message has more descriptors than the caller asked for.
var ErrDescriptors = errors.New("too many descriptors")

// SendFds sends data, at least one byte, with descriptors. The descriptors stay open in
// this process.
func SendFds(conn *net.UnixConn, data []byte, fds ...int) error {
	if len(data) == 0 {
		return errors.New("send descriptors: no data to carry them")
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	n, _, err := conn.WriteMsgUnix(data, oob, nil)
	if err == nil && n < len(data) {
		_, err = conn.Write(data[n:])
	}
	if err != nil {
		return fmt.Errorf("send %d descriptors: %w", len(fds), err)
	}
	return nil
}

// RecvFds reads once into buf and receives up to max descriptors. They are close-on-exec
// and belong to the caller. At the end of the stream it returns io.EOF.
func RecvFds(conn *net.UnixConn, buf []byte, max int) (n int, fds []int, err error) {
	// With room for one more, too many descriptors are detected.
	oob := make([]byte, unix.CmsgSpace(4*(max+1)))
	n, noob, flags, _, err := conn.ReadMsgUnix(buf, oob)
	if errors.Is(err, io.EOF) {
		return 0, nil, io.EOF
	}
	if err != nil {
		return 0, nil, fmt.Errorf("receive descriptors: %w", err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:noob])
	if err != nil {
		return 0, nil, fmt.Errorf("receive descriptors: %w", err)
	}
	for i := range msgs {
		got, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue // some other control message
		}
		fds = append(fds, got...)
	}
	if len(fds) > max || flags&unix.MSG_CTRUNC != 0 {
		closeAll(fds)
		return 0, nil, fmt.Errorf("receive %d descriptors: %w", max, ErrDescriptors)
	}
	if n == 0 && len(buf) > 0 {
		closeAll(fds)
		return 0, nil, io.EOF
	}
	return n, fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
