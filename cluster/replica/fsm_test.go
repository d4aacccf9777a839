package replica

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/encoding/protowire"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func entry(t *testing.T, index uint64, c *clusterv1.Command) *raft.Log {
	t.Helper()
	data, err := state.Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	return &raft.Log{Index: index, Type: raft.LogCommand, Data: data}
}

// future is an entry of a version that does not exist yet.
func future(index uint64, policy clusterv1.UnknownPolicy) *raft.Log {
	data := protowire.AppendVarint(protowire.AppendTag([]byte{1, byte(policy)}, 1, protowire.VarintType), state.Protocol+1)
	data = protowire.AppendBytes(protowire.AppendTag(data, 999, protowire.BytesType), []byte("?"))
	return &raft.Log{Index: index, Type: raft.LogCommand, Data: data}
}

func initial() *clusterv1.Command {
	return &clusterv1.Command{Version: 1, Id: "1", Op: &clusterv1.Command_InitCluster{InitCluster: &clusterv1.InitCluster{ClusterId: "c"}}}
}

func TestUnknownCommandIsSkippedIfItMayBe(t *testing.T) {
	t.Parallel()
	f := newFSM(slog.New(slog.DiscardHandler))
	f.Apply(entry(t, 1, initial()))
	if r, ok := f.Apply(future(2, clusterv1.UnknownPolicy_UNKNOWN_POLICY_SKIP)).(*clusterv1.Result); !ok || r.GetOutcome() != clusterv1.Outcome_OUTCOME_INVALID {
		t.Errorf("answer %v", r)
	}
	if err := f.err(); err != nil {
		t.Error(err)
	}
	if f.skipped.Load() != 1 || f.index() != 2 {
		t.Errorf("skipped %d, applied %d", f.skipped.Load(), f.index())
	}
	// Who restores a snapshot of this must not wait for entry 2.
	var b bytes.Buffer
	snap, err := f.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	if err := snap.(*image).write(&b); err != nil {
		t.Fatal(err)
	}
	g := newFSM(slog.New(slog.DiscardHandler))
	if err := g.Restore(io.NopCloser(&b)); err != nil {
		t.Fatal(err)
	}
	if err := g.wait(t.Context(), 2); err != nil || g.state.View().ClusterID() != "c" {
		t.Errorf("restored %d: %v", g.index(), err)
	}
}

func TestUnknownCommandStopsForGood(t *testing.T) {
	t.Parallel()
	for name, log := range map[string]*raft.Log{
		"newer":   future(2, clusterv1.UnknownPolicy_UNKNOWN_POLICY_STOP),
		"damaged": {Index: 2, Type: raft.LogCommand, Data: []byte("?")},
		"empty":   {Index: 2, Type: raft.LogCommand},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFSM(slog.New(slog.DiscardHandler))
			out := f.ApplyBatch([]*raft.Log{entry(t, 1, initial()), log, entry(t, 3, &clusterv1.Command{
				Version: 1, Id: "3", Op: &clusterv1.Command_PutIdentity{PutIdentity: &clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "x", Role: clusterv1.Role_ROLE_VIEWER}}},
			})})
			for i, want := range []bool{false, true, true} {
				if err, _ := out[i].(error); errors.Is(err, ErrStopped) != want {
					t.Errorf("entry %d: %v", i+1, out[i])
				}
			}
			if v := f.state.View(); v.Index() != 1 || v.Identity("x") != nil || f.index() != 1 {
				t.Errorf("applied %d", v.Index())
			}
			if err := f.err(); name == "newer" && !strings.Contains(err.Error(), "upgrade hostd") {
				t.Errorf("no advice: %v", err)
			}
			if err := f.wait(t.Context(), 3); !errors.Is(err, ErrStopped) {
				t.Errorf("waiting: %v", err)
			}
			if _, err := f.Snapshot(); !errors.Is(err, ErrStopped) {
				t.Errorf("snapshot: %v", err)
			}
		})
	}
}

func TestStopEndsTheNode(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	s, err := Open(ctx, Config{ID: "a", Name: "a", Address: "a:1", Timing: Solo()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Bootstrap(ctx, &clusterv1.InitCluster{ClusterId: "c"}); err != nil {
		t.Fatal(err)
	}
	s.raft.Apply(future(0, clusterv1.UnknownPolicy_UNKNOWN_POLICY_STOP).Data, time.Second)
	if _, err := s.Apply(ctx, initial()); !errors.Is(err, ErrStopped) {
		for err == nil && ctx.Err() == nil { // it may have come first
			_, err = s.Apply(ctx, initial())
		}
		if !errors.Is(err, ErrStopped) {
			t.Errorf("apply: %v", err)
		}
	}
	if _, err := s.Read(ctx, false); !errors.Is(err, ErrStopped) {
		t.Errorf("read: %v", err)
	}
	if v, err := s.Read(ctx, true); err != nil || v.ClusterID() != "c" {
		t.Errorf("stale read: %v", err)
	}
	testkit.Until(t, "it leads no more", func() error { return testkit.Want(!s.IsLeader(), s.Status()) })
	if s.IsLeader() || s.Health() == nil || !strings.Contains(s.Status().GetMessage(), "upgrade") {
		t.Errorf("leads: %v, health: %v, status: %v", s.IsLeader(), s.Health(), s.Status())
	}
}

func TestGuardTellsFullFromBroken(t *testing.T) {
	t.Parallel()
	g := newGuard(slog.New(slog.DiscardHandler))
	fail := error(syscall.ENOSPC)
	do := func() error { return g.write("x", func() error { return fail }) }
	if err := do(); !errors.Is(err, syscall.ENOSPC) || g.health() == nil {
		t.Errorf("full: %v", err)
	}
	fail = nil
	if err := do(); err != nil || g.health() != nil {
		t.Errorf("room again: %v, %v", err, g.health())
	}
	fail = syscall.EIO
	if err := do(); !errors.Is(err, syscall.EIO) {
		t.Errorf("failed: %v", err)
	}
	fail = nil
	if err := do(); !errors.Is(err, errBroken) || !errors.Is(g.health(), errBroken) {
		t.Errorf("after a failure: %v, %v", err, g.health())
	}
	// What cannot be written ends with the node.
	done := make(chan bool)
	go func() {
		defer close(done)
		_ = (&guardedStable{g: g}).SetUint64([]byte("CurrentTerm"), 1)
		t.Error("a term was accepted that is not written")
	}()
	testkit.Parked(t, "replica.(*guardedStable).SetUint64", 1)
	g.close()
	<-done
}

func TestAcksCountOnlyWhatWasSentLater(t *testing.T) {
	t.Parallel()
	a := newAcks()
	ids := []raft.ServerID{"b", "c", "d"}
	start := time.Now()
	before, later := start.Add(-time.Millisecond), start.Add(time.Millisecond)
	a.note("b", 5, before) // answered later, sent earlier
	a.note("c", 4, later)  // of another term
	a.note("x", 5, later)  // no voter
	if n, _ := a.since(ids, 5, start); n != 0 {
		t.Errorf("%d answers count", n)
	}
	a.note("d", 5, later)
	a.note("d", 5, before) // comes late, takes nothing back
	if n, _ := a.since(ids, 5, start); n != 1 {
		t.Errorf("%d answers count", n)
	}
}

// question is a coalescer of whose callers the test knows that they wait.
type question struct{ coalescer }

func (q *question) ask(ctx context.Context, f func(context.Context) (uint64, error)) uint64 {
	i, _ := q.do(ctx, ctx, time.Minute, f)
	return i
}

func TestCoalescerServesOnlyWhoCameBefore(t *testing.T) {
	t.Parallel()
	var c question
	begun, release := make(chan bool, 10), make(chan uint64)
	f := func(context.Context) (uint64, error) {
		begun <- true
		return <-release, nil
	}
	got := make(chan uint64, 10)
	ask := func() { go func() { got <- c.ask(t.Context(), f) }() }
	ask()
	<-begun
	for range 3 { // they come while the first round is under way
		ask()
	}
	testkit.Parked(t, "replica.(*question).ask", 4)
	release <- 1
	if i := <-got; i != 1 {
		t.Errorf("first got %d", i)
	}
	<-begun
	release <- 2
	for range 3 {
		if i := <-got; i != 2 {
			t.Errorf("one who came later got %d", i)
		}
	}
}

// FuzzRestore: no bytes make a restore panic, and what is refused changes
// nothing.
func FuzzRestore(f *testing.F) {
	var b bytes.Buffer
	whole := newFSM(slog.New(slog.DiscardHandler))
	data, err := state.Encode(initial())
	if err != nil {
		f.Fatal(err)
	}
	whole.Apply(&raft.Log{Index: 7, Type: raft.LogCommand, Data: data})
	if err := (&image{view: whole.state.View(), applied: 7}).write(&b); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add(b.Bytes()[:b.Len()-1])
	f.Add([]byte(imageMagic))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		m := newFSM(slog.New(slog.DiscardHandler))
		m.Apply(entry(t, 1, initial()))
		before := m.state.View()
		if err := m.Restore(io.NopCloser(bytes.NewReader(data))); err != nil {
			if m.state.View() != before || m.index() != 1 {
				t.Errorf("a refused snapshot changed the state: %v", err)
			}
			return
		}
		if err := m.state.View().Check(); err != nil {
			t.Error(err)
		}
	})
}
