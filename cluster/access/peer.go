package access

import (
	"errors"
	"fmt"
	"net"
	"unsafe"

	"golang.org/x/sys/unix"
)

const maxGroups = 65536 // NGROUPS_MAX

// PeerOf asks the kernel which process connected to a Unix socket (SO_PEERCRED, see
// unix(7)).
func PeerOf(conn *net.UnixConn) (Peer, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return Peer{}, fmt.Errorf("peer of the socket: %w", err)
	}
	var p Peer
	var inner error
	err = raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); inner != nil {
			return
		}
		p = Peer{UID: cred.Uid, GID: cred.Gid, PID: cred.Pid}
		p.Groups, inner = peerGroups(fd)
	})
	if err := errors.Join(err, inner); err != nil {
		return Peer{}, fmt.Errorf("peer of the socket: %w", err)
	}
	return p, nil
}

// peerGroups reads SO_PEERGROUPS. golang.org/x/sys has no function for it.
func peerGroups(fd uintptr) ([]uint32, error) {
	groups := make([]uint32, 64)
	for {
		size := uint32(len(groups) * 4)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0)
		switch {
		case errno == 0:
			return groups[:size/4], nil
		case errno == unix.ERANGE && len(groups) < maxGroups:
			groups = make([]uint32, min(max(int(size/4), 2*len(groups)), maxGroups))
		case errno == unix.ENOPROTOOPT || errno == unix.ENODATA: // the kernel is older than 4.13, or the peer has no groups
			return nil, nil
		default:
			return nil, errno
		}
	}
}
