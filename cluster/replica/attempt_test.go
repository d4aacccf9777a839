package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

func TestAttemptEndsWhenAnotherHostLeads(t *testing.T) {
	var now atomic.Value
	now.Store("a:1")
	ctx, cancel := WhileLeading(t.Context(), func() string { return now.Load().(string) }, "a:1", time.Hour)
	defer cancel()
	now.Store("") // an election is under way: the old leader may win it
	if ctx.Err() != nil {
		t.Fatal("ended although nobody else leads")
	}
	now.Store("b:1")
	<-ctx.Done()
	if !errors.Is(ctx.Err(), context.Canceled) {
		t.Error(ctx.Err())
	}
}

func TestAttemptLeavesTimeForTheNext(t *testing.T) {
	outer, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	ctx, end := WhileLeading(outer, func() string { return "" }, "a:1", 24*time.Hour)
	defer end()
	if at, ok := ctx.Deadline(); !ok || time.Until(at) > 31*time.Minute {
		t.Errorf("until %v", at)
	}
}

// standing is a leader that takes a command and says nothing, as one whose machine
// is stopped; the next to be asked answers.
type standing struct {
	Forwarder
	asked atomic.Int32
	ids   chan string
}

func (s *standing) Apply(ctx context.Context, _ string, cmds []*clusterv1.Command) ([]*clusterv1.Result, error) {
	s.ids <- cmds[0].GetId()
	if s.asked.Add(1) == 1 {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return []*clusterv1.Result{{Outcome: clusterv1.Outcome_OUTCOME_OK}}, nil
}

// Who is told that nobody leads asks again: what may have been proposed must not
// be told so.
func TestWhatMayHaveBeenProposedIsNotSaidToBeWithoutALeader(t *testing.T) {
	for _, err := range []error{ErrNoLeader, &NotLeaderError{Leader: "b:1"}, fmt.Errorf("x: %w", ErrNoLeader), ErrClosed, ErrProtocol} {
		if got := fate(err, false); !errors.Is(got, err) || errors.Is(got, ErrTimeout) {
			t.Errorf("not proposed: %v", got)
		}
		got := fate(err, true)
		if !errors.Is(got, ErrTimeout) || errors.Is(got, ErrNoLeader) || errors.Is(got, ErrNotLeader) {
			t.Errorf("proposed: %v", got)
		}
	}
}

// refusing is a leader that cannot be spoken to, or proposes nothing.
type refusing struct {
	Forwarder
	err error
}

func (r refusing) Apply(context.Context, string, []*clusterv1.Command) ([]*clusterv1.Result, error) {
	return nil, r.err
}

func TestWhatWasNotSentWasNotProposed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	_, dialled := (&http.Client{}).Get("http://" + l.Addr().String())
	for _, c := range []struct {
		err   error
		maybe bool
	}{{dialled, false}, {ErrNoLeader, false}, {&NotLeaderError{}, false}, {ErrTimeout, true}, {io.ErrUnexpectedEOF, true}} {
		store := &Store{cfg: Config{Address: "me:1", Peers: refusing{err: c.err}, Timing: Timing{RPC: time.Minute}}}
		if a := store.forward(t.Context(), []*clusterv1.Command{{Id: "c"}}, "you:1", func() string { return "you:1" }); a.maybe != c.maybe || a.final {
			t.Errorf("%v: %+v", c.err, a)
		}
	}
}

// A leader that stands still and stays leader does not use up the whole time,
// and the same command, by its id, is sent again.
func TestLeaderThatStandsStillLeavesTimeForAnotherAttempt(t *testing.T) {
	s := &standing{ids: make(chan string, 2)}
	store := &Store{cfg: Config{Address: "me:1", Peers: s, Timing: Timing{RPC: 10 * time.Millisecond}}}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := &clusterv1.Command{Id: "c"}
	first := store.forward(ctx, []*clusterv1.Command{cmd}, "you:1", func() string { return "you:1" })
	if first.err == nil || !first.maybe || first.final || ctx.Err() != nil {
		t.Fatalf("%+v, and the caller's time: %v", first, ctx.Err())
	}
	if second := store.forward(ctx, []*clusterv1.Command{cmd}, "you:1", func() string { return "you:1" }); second.err != nil {
		t.Fatal(second.err)
	}
	if a, b := <-s.ids, <-s.ids; a != b {
		t.Errorf("%s, then %s", a, b)
	}
}
