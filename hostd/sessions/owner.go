package sessions

import (
	"context"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"strings"
	"unicode"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/turn"
	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
)

const maxOwner = 128 // bytes

// setOwner gives a new claim its owner and weight. Only root, and the user that hostd runs
// as, may act for others or take more than the most that the configuration allows: else
// somebody could have several shares, or one of any size.
func (h *Host) setOwner(ctx context.Context, c *claim, m *gpuctlv1.CreateClaimRequest) error {
	peer, local := unixrpc.PeerFrom(ctx)
	caller := askedBy{uid: peer.UID, local: local, trusted: local && (peer.UID == 0 || int(peer.UID) == os.Getuid())}
	return caller.chooses(c, m, h.Config.Sharing.Most())
}

// askedBy is who asks for a claim.
type askedBy struct {
	uid     uint32
	local   bool // over this host's socket; otherwise no user of it is known
	trusted bool
}

// chooses gives a claim the owner and weight of a request. most is the largest weight that a
// user may choose.
func (a askedBy) chooses(c *claim, m *gpuctlv1.CreateClaimRequest, most uint32) error {
	switch name := m.GetOwner(); {
	case name == "" && a.local:
		c.Owner = "user:" + userName(a.uid)
	case name == "":
		c.Owner = "claim:" + c.ID
	case !a.trusted:
		return fmt.Errorf("%w: only root names the owner of a claim; without one, it is the calling user", errDenied)
	case len(name) > maxOwner || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) || r == ' ' }):
		return fmt.Errorf("%w: the owner's name is longer than %d bytes, or has blanks or control characters", errInvalid, maxOwner)
	default:
		c.Owner = name
	}
	c.Weight = m.GetWeight()
	switch {
	case c.Weight == 0:
		c.Weight = min(turn.DefaultWeight, most)
	case c.Weight > timeshare.MaxWeight:
		return fmt.Errorf("%w: weight %d is not between 1 and %d", errInvalid, c.Weight, timeshare.MaxWeight)
	case c.Weight > most && !a.trusted:
		return fmt.Errorf("%w: weight %d is more than the %d that users may have (sharing.mostWeight)", errDenied, c.Weight, most)
	}
	return nil
}

// userName returns a user's name; if it has none, the number.
func userName(uid uint32) string {
	n := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(n); err == nil {
		return u.Username
	}
	return n
}

// addShare adds to a sum what one more session has had.
func addShare(sum, s *gpuctlv1.Share) *gpuctlv1.Share {
	if s == nil {
		return sum
	}
	if sum == nil {
		sum = &gpuctlv1.Share{}
	}
	sum.Shared = sum.Shared || s.GetShared()
	sum.Waiting = sum.Waiting || s.GetWaiting()
	sum.Turns += s.GetTurns()
	sum.BusyNs += s.GetBusyNs()
	sum.WaitedNs += s.GetWaitedNs()
	sum.Lapses += s.GetLapses()
	sum.OverrunNs += s.GetOverrunNs()
	if s.GetKeepsNs() > 0 {
		sum.Keeps, sum.KeepsNs = s.GetKeeps(), s.GetKeepsNs()
	}
	return sum
}

// noteLapse adds to the cluster's events that a session keeps its GPU from others. The caller
// holds h.mu.
func (h *Host) noteLapse(old, now *gpuctlv1.Session) {
	if now.GetShare().GetLapses() <= old.GetShare().GetLapses() || now.GetMessage() == "" {
		return
	}
	e := &clusterv1.Event{
		Kind: clusterv1.Kind_KIND_SESSION, Object: h.Cluster.HostName() + "/" + now.GetId(), Type: "KeepsGPU", Actor: now.GetOwner(), Message: now.GetMessage(),
	}
	h.work.Go(func() { h.Cluster.Note(e) })
}
