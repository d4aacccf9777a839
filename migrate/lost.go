package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/excerpt"
)

const (
	// lostDetails is for how many lost sessions the record has more than their ids.
	lostDetails = 100
	lostNamed   = 5 // those that a message names
	lostText    = 200
)

// account records which of the migration's sessions are lost, after a step has ended in
// which they were to run again. err is how that step has ended, and it is what is returned
// if there is one: then the VM is asked all the same, but nobody waits for its answer.
func (r *run) account(ctx context.Context, s Site, err error) error {
	if len(r.move().GetSessions()) == 0 {
		return err
	}
	lost, unknown := s.Lost(ctx, r.vm(), r.move().GetSessions())
	switch {
	case unknown == nil:
		r.noteLost(lost)
		r.m.Machine.LostUnknown = ""
	case err == nil && (errors.Is(unknown, ErrUnreachable) || errors.Is(unknown, ErrStale) || ctx.Err() != nil):
		return unknown
	default: // the applications go on: that is not to be undone because of the question
		r.Log.Warn("it is not known whether sessions were lost", "migration", r.m.GetId(), "err", unknown)
		r.m.Machine.LostUnknown = excerpt.Of(unknown.Error(), lostText)
	}
	return err
}

// noteLost adds lost sessions to those of the record. The VM has written what they are like.
func (r *run) noteLost(lost []*gpuctlv1.LostSession) {
	for _, l := range lost {
		known := slices.ContainsFunc(r.move().GetLost(), func(o *gpuctlv1.LostSession) bool { return o.GetId() == l.GetId() })
		if known || !slices.Contains(r.move().GetSessions(), l.GetId()) {
			continue
		}
		one := &gpuctlv1.LostSession{Id: l.GetId()}
		if len(r.move().GetLost()) < lostDetails {
			one.Command, one.Reason, one.LostUnixMs = excerpt.Line(l.GetCommand(), lostText), excerpt.Line(l.GetReason(), lostText), l.GetLostUnixMs()
		}
		r.m.Machine.Lost = append(r.move().GetLost(), one)
		r.Log.Error("a session was lost on the way", "migration", r.m.GetId(), "session", one.GetId(), "command", one.GetCommand(), "reason", one.GetReason())
	}
}

// LostWords returns in words which sessions were lost on the way; empty: none, and all could
// be asked for.
func LostWords(m *clusterv1.MachineMove) string {
	var out []string
	lost := m.GetLost()
	for _, l := range lost[:min(len(lost), lostNamed)] {
		text := l.GetId()
		if l.GetCommand() != "" {
			text += " (" + l.GetCommand() + ")"
		}
		if l.GetReason() != "" {
			text += ": " + l.GetReason()
		}
		out = append(out, text)
	}
	if more := len(lost) - lostNamed; more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	text := ""
	switch n := len(lost); {
	case n == 1:
		text = "1 session was lost on the way: " + out[0]
	case n > 1:
		text = fmt.Sprintf("%d sessions were lost on the way: %s", n, strings.Join(out, "; "))
	}
	if why := m.GetLostUnknown(); why != "" {
		text = also(text, "it is not known whether sessions were lost on the way: "+why)
	}
	return text
}

// also joins two texts, of which one may be empty.
func also(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + "; " + b
}
