// Package reason says on the wire which of the log's errors one is.
package reason

import (
	"errors"
	"net"

	"connectrpc.com/connect"
)

// Header is where hosts say which of the log's errors one is: codes alone
// do not tell them apart.
const Header = "Gpuctl-Reason"

// The reasons of errors after which nothing was proposed.
const (
	NoLeader  = "no-leader"
	NotLeader = "not-leader"
)

// Leaderless reports whether a host's error says that nothing was done as nobody
// leads: what was asked may be asked again.
func Leaderless(err error) bool {
	var c *connect.Error
	if !errors.As(err, &c) {
		return false
	}
	reason := c.Meta().Get(Header)
	return reason == NoLeader || reason == NotLeader
}

// Unsent reports whether nothing was sent to a host, as there was no connection.
func Unsent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// Undone reports whether a call's error says that nothing was done. After any
// other one, but for a host's refusal, it may have been.
func Undone(err error) bool { return Leaderless(err) || Unsent(err) }
