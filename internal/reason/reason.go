// Package reason says on the wire which of a host's errors one is.
package reason

import (
	"errors"
	"net"

	"connectrpc.com/connect"
)

// Header is where hosts say which error one is: codes alone do not tell them
// apart.
const Header = "Gpuctl-Reason"

// The reasons of errors after which nothing was proposed.
const (
	NoLeader  = "no-leader"
	NotLeader = "not-leader"
)

// Revoked is the reason why a host refuses the certificate of one that was
// removed from the cluster.
const Revoked = "revoked"

// Is reports whether a host gave this reason for its error.
func Is(err error, reason string) bool {
	var c *connect.Error
	return errors.As(err, &c) && c.Meta().Get(Header) == reason
}

// Leaderless reports whether a host's error says that nothing was done as nobody
// leads: what was asked may be asked again.
func Leaderless(err error) bool {
	return Is(err, NoLeader) || Is(err, NotLeader)
}

// Unsent reports whether nothing was sent to a host, as there was no connection.
func Unsent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// Undone reports whether a call's error says that nothing was done. After any
// other one, but for a host's refusal, it may have been.
func Undone(err error) bool { return Leaderless(err) || Unsent(err) }
