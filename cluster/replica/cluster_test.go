package replica_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/clustertest"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func note(message string) *clusterv1.Command {
	return &clusterv1.Command{Op: &clusterv1.Command_Note{Note: &clusterv1.Note{
		Event: &clusterv1.Event{Kind: clusterv1.Kind_KIND_HOST, Object: "n0", Type: "Test", Message: message},
	}}}
}

// notes that are in a state, in order.
func notes(v *state.View) []string {
	var out []string
	for _, e := range v.Events(clusterv1.Kind_KIND_HOST, "n0", 0) {
		if e.GetType() == "Test" {
			out = append(out, e.GetMessage())
		}
	}
	return out
}

func whole(id, gpu string) *clusterv1.Command {
	return &clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
		Claim:   &clusterv1.Claim{Id: id, Count: 1},
		Choices: []*clusterv1.Choice{{Gpu: gpu, Kind: clusterv1.VGPUKind_VGPU_KIND_WHOLE}},
	}}}
}

func TestSoloElectsItselfAtOnce(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	s, err := replica.Open(ctx, replica.Config{ID: "id-a", Name: "a", Address: "a:1", Timing: replica.Solo()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Apply(ctx, note("x")); !errors.Is(err, replica.ErrNotInCluster) {
		t.Errorf("apply before bootstrap: %v", err)
	}
	if _, err := s.Read(ctx, false); !errors.Is(err, replica.ErrNotInCluster) {
		t.Errorf("read before bootstrap: %v", err)
	}
	start := time.Now()
	if err := s.Bootstrap(ctx, &clusterv1.InitCluster{ClusterId: "c"}); err != nil {
		t.Fatal(err)
	}
	t.Logf("bootstrapped in %v", time.Since(start))
	if d := time.Since(start); d > 500*time.Millisecond {
		t.Errorf("bootstrap took %v", d)
	}
	if err := s.Bootstrap(ctx, &clusterv1.InitCluster{ClusterId: "d"}); !errors.Is(err, replica.ErrExists) {
		t.Errorf("second bootstrap: %v", err)
	}
	v, err := s.Read(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	if v.ClusterID() != "c" {
		t.Errorf("cluster id %q", v.ClusterID())
	}
	if st := s.Status(); !st.GetJoined() || !st.GetQuorum() || !st.GetStandalone() || st.GetLeader() != "a" || st.GetMessage() != "" {
		t.Errorf("status %v", st)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := s.Apply(ctx, note("x")); !errors.Is(err, replica.ErrClosed) {
		t.Errorf("apply after close: %v", err)
	}
}

func TestFollowersForwardAndReadWhatWasWritten(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3})
	for i := range 30 {
		from, at := c.Nodes[i%3], c.Nodes[(i+1)%3]
		c.Must(ctx, from, note(fmt.Sprint(i)))
		v, err := at.Store().Read(ctx, false)
		if err != nil {
			t.Fatal(err)
		}
		if got := notes(v); len(got) != i+1 || got[i] != fmt.Sprint(i) {
			t.Fatalf("after note %d, %s reads %v", i, at.Name, got)
		}
	}
	c.Equal(ctx)
}

func TestSameIDIsAppliedOnce(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3})
	cmd := note("once")
	cmd.Id = "the-id"
	var first *clusterv1.Result
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			if _, err := c.Nodes[i%3].Store().Apply(ctx, cmd); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	first = c.Must(ctx, c.Nodes[1], cmd)
	if again := c.Must(ctx, c.Nodes[2], cmd); again.GetIndex() != first.GetIndex() {
		t.Errorf("applied as %d and %d", first.GetIndex(), again.GetIndex())
	}
	v, err := c.Nodes[0].Store().Read(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	if got := notes(v); len(got) != 1 {
		t.Errorf("notes %v", got)
	}
	if cmd.GetUnixMs() != 0 || cmd.GetVersion() != 0 {
		t.Errorf("the caller's command was changed: %v", cmd)
	}
}

func TestIsolatedLeaderNeitherReadsNorWrites(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3})
	old := c.Leader(ctx)
	c.Isolate(old)
	// At once: it still believes that it leads.
	short, cancel := context.WithTimeout(ctx, 400*time.Millisecond)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := old.Store().Read(short, false); !errors.Is(err, replica.ErrNoLeader) {
			t.Errorf("linearizable read on an isolated leader: %v", err)
		}
	})
	wg.Go(func() {
		if _, err := old.Store().Apply(short, note("lost")); !errors.Is(err, replica.ErrTimeout) {
			t.Errorf("write on an isolated leader: %v", err)
		}
	})
	var other *clustertest.Node
	for _, n := range c.Nodes {
		if n != old {
			other = n
		}
	}
	c.Must(ctx, other, note("kept"))
	wg.Wait()
	if got := notes(old.Store().State().View()); slices.Contains(got, "kept") {
		t.Errorf("the isolated node has %v", got)
	}
	// What is not proposed for want of a leader is known not to be applied.
	short, cancel = context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := old.Store().Apply(short, note("never")); !errors.Is(err, replica.ErrNoLeader) || errors.Is(err, replica.ErrTimeout) {
		t.Errorf("write without a leader: %v", err)
	}
	c.Network.Heal()
	v, err := old.Store().Read(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	if got := notes(v); !slices.Contains(got, "kept") || slices.Contains(got, "never") {
		t.Errorf("notes %v", got)
	}
	c.Equal(ctx)
}

func TestAnswersOfNonVotersProveNothing(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 6, Config: func(_ int, cfg *replica.Config) { cfg.Members.MaxVoters = 3 }})
	old := c.Leader(ctx)
	voters := old.Voters()
	side := []*clustertest.Node{old}
	for _, n := range c.Nodes {
		if !slices.Contains(voters, n.Name) {
			side = append(side, n)
		}
	}
	if len(side) != 4 {
		t.Fatalf("voters %v", voters)
	}
	c.Split(side)
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if index, err := old.Store().ReadIndex(short); err == nil {
		t.Errorf("a leader with one of three voters proved index %d", index)
	}
}

func TestKilledNodesKeepWhatWasAcknowledged(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3, Disk: true, Config: func(_ int, cfg *replica.Config) {
		cfg.SnapshotThreshold, cfg.SnapshotInterval, cfg.TrailingLogs = 20, 20*time.Millisecond, 5
	}})
	for i := range 100 {
		from := c.Nodes[i%3]
		if from.Store() == nil {
			from = c.Nodes[2]
		}
		c.Must(ctx, from, note(fmt.Sprint(i)))
		switch i {
		case 50:
			for _, n := range c.Nodes {
				n.Kill()
			}
			for _, n := range c.Nodes {
				if err := n.Start(ctx); err != nil {
					t.Fatal(err)
				}
			}
		case 70:
			c.Nodes[0].Kill()
		case 90:
			if err := c.Nodes[0].Start(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	v, err := c.Nodes[2].Store().Read(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	got := notes(v)
	for i := range 100 {
		if i >= len(got) || got[i] != fmt.Sprint(i) {
			t.Fatalf("note %d: notes are %v", i, got)
		}
	}
	c.Equal(ctx)
}

func TestFullDiskSilencesANodeUntilThereIsRoom(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3, Disk: true})
	sick := c.Leader(ctx)
	sick.Disk.Full()
	r := c.Must(ctx, sick, note("through a leader without room"))
	if now := c.Leader(ctx); now == sick {
		t.Error("a node without room leads")
	}
	c.Until(ctx, "unhealthy", func() error {
		if err := sick.Store().Health(); !errors.Is(err, syscall.ENOSPC) {
			return fmt.Errorf("health: %w", err)
		}
		return nil
	})
	if m := sick.Store().Status().GetMessage(); !strings.Contains(m, "disk") {
		t.Errorf("status message %q", m)
	}
	sick.Disk.Well()
	c.Until(ctx, "healthy", func() error {
		if err := sick.Store().Health(); err != nil {
			return err
		}
		if at := sick.Store().State().View().Index(); at < r.GetIndex() {
			return fmt.Errorf("applied %d of %d", at, r.GetIndex())
		}
		return nil
	})
	c.Equal(ctx)
}

// A leader whose disk hangs still sends heartbeats in the library's own way, and
// would lead for ever.
func TestHangingDiskEndsLeadership(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3, Disk: true})
	sick := c.Leader(ctx)
	sick.Disk.Hang()
	r := c.Must(ctx, sick, note("through a leader whose disk hangs"))
	if now := c.Leader(ctx); now == sick {
		t.Error("a node whose disk hangs leads")
	}
	sick.Disk.Well()
	c.Until(ctx, "caught up", func() error {
		if at := sick.Store().State().View().Index(); at < r.GetIndex() {
			return fmt.Errorf("applied %d of %d", at, r.GetIndex())
		}
		return nil
	})
	c.Equal(ctx)
}

func TestBrokenDiskIsNotTrustedUntilRestart(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3, Disk: true})
	sick := c.Leader(ctx)
	sick.Disk.Break()
	c.Must(ctx, sick, note("1"))
	sick.Disk.Well()
	time.Sleep(100 * time.Millisecond) // nothing tells that it stays so
	if err := sick.Store().Health(); err == nil {
		t.Error("the node trusts a disk that failed")
	}
	sick.Kill()
	if err := sick.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if err := sick.Store().Health(); err != nil {
		t.Error(err)
	}
	c.Must(ctx, sick, note("2"))
	c.Equal(ctx)
}

// The leader fails when it has promoted a host, and another voter has not heard of that.
// The promoted host is then the only one that can win, and only with that voter's vote.
func TestVoteForAHostWhosePromotionIsNotKnownHere(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3, Voters: 1, Config: func(_ int, cfg *replica.Config) {
		cfg.Timing.Review = time.Hour // the test promotes
	}})
	leader, behind, next := c.Nodes[0], c.Nodes[1], c.Nodes[2]
	if err := leader.Store().Promote(behind.ID, behind.Address); err != nil {
		t.Fatal(err)
	}
	c.Until(ctx, "two voters", func() error {
		if v := behind.Voters(); len(v) != 2 {
			return fmt.Errorf("voters %v", v)
		}
		return nil
	})
	c.Isolate(behind)
	if err := leader.Store().Promote(next.ID, next.Address); err != nil {
		t.Fatal(err)
	}
	leader.Kill()
	c.Network.Heal()
	c.Must(ctx, behind, note("without the leader"))
	c.Equal(ctx)
}

func TestGracefulStopHandsLeadershipOver(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	const missed = 3 * time.Second // until followers miss a leader
	c := clustertest.New(t, clustertest.Options{Nodes: 3, Config: func(_ int, cfg *replica.Config) {
		cfg.Timing.Heartbeat, cfg.Timing.Election, cfg.Timing.Lease = missed, missed, missed
	}})
	old := c.Leader(ctx)
	if err := old.Stop(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	c.Leader(ctx)
	if d := time.Since(start); d >= missed {
		t.Errorf("the next leader came after %v", d)
	}
}

func TestHostsGoDownAndUpWithoutFloodingTheLog(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 4})
	victim := c.Nodes[3]
	if c.Leader(ctx) == victim {
		t.Fatal("a non-voter leads")
	}
	// Were heartbeats in the log, there would be no such time. (On a busy machine
	// an election may be in one.)
	c.Until(ctx, "a time without entries", func() error {
		before := c.Leader(ctx).Store().Status().GetLastIndex()
		time.Sleep(300 * time.Millisecond) // many heartbeats
		if after := c.Leader(ctx).Store().Status().GetLastIndex(); after != before {
			return fmt.Errorf("%d entries while nothing happened", after-before)
		}
		return nil
	})
	down := func(want bool) {
		c.Until(ctx, fmt.Sprintf("down: %v", want), func() error {
			h := c.Leader(ctx).Store().State().View().Host(victim.Name)
			if h.GetDown() != want {
				return fmt.Errorf("host %v", h)
			}
			return nil
		})
	}
	c.Isolate(victim)
	down(true)
	c.Network.Heal()
	down(false)
	// A jump of the time of day means nothing; nor does a leap of the clock,
	// which is what a pause of the leader's process looks like.
	for _, n := range c.Nodes {
		n.Clock.Jump(-time.Hour)
		n.Clock.Leap(time.Hour)
	}
	time.Sleep(200 * time.Millisecond) // some reviews, after which nothing has happened
	down(false)
	for _, n := range c.Nodes {
		want, got := 0, 0
		if n == victim {
			want = 2
		}
		for _, e := range c.Leader(ctx).Store().State().View().Events(clusterv1.Kind_KIND_HOST, n.Name, 0) {
			if e.GetType() == "Down" || e.GetType() == "Up" {
				got++
			}
		}
		if got != want {
			t.Errorf("host %s: %d transitions, want %d", n.Name, got, want)
		}
	}
}

func TestReservationsExpireOnTheLeadersClock(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3, GPUs: 1})
	put := func(id, gpu string, ttl time.Duration) {
		c.Must(ctx, c.Nodes[0], &clusterv1.Command{Op: &clusterv1.Command_PutReservation{PutReservation: &clusterv1.PutReservation{
			Reservation: &clusterv1.Reservation{Id: id, Owner: id, Gpu: gpu, TtlMs: uint32(ttl.Milliseconds())},
		}}})
	}
	put("short", "n0/g0", 50*time.Millisecond)
	put("long", "n1/g0", time.Hour)
	there := func(id string) bool { return c.Leader(ctx).Store().State().View().Reservation(id) != nil }
	c.Until(ctx, "short expires", func() error {
		if there("short") {
			return errors.New("it is there")
		}
		return nil
	})
	c.Leader(ctx).Clock.Jump(2 * time.Hour) // the time of day does not count
	time.Sleep(100 * time.Millisecond)      // some looks for what expires, which find nothing
	if !there("long") {
		t.Fatal("a reservation expired by the time of day")
	}
	c.Until(ctx, "long expires", func() error {
		c.Leader(ctx).Clock.Leap(2 * time.Hour) // again, as each leader counts anew
		if there("long") {
			return errors.New("it is there")
		}
		return nil
	})
}

func TestExpiredJoinTokenIsRefused(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 1})
	n := c.Nodes[0]
	put := func(id string, ttl time.Duration) {
		c.Must(ctx, n, &clusterv1.Command{Op: &clusterv1.Command_PutJoinToken{PutJoinToken: &clusterv1.PutJoinToken{Token: &clusterv1.JoinToken{
			Id: id, SecretHash: make([]byte, 32), Role: clusterv1.Role_ROLE_VIEWER, ExpiresUnixMs: n.Clock.Wall().Add(ttl).UnixMilli(),
		}}}})
	}
	use := func(id, who string) *clusterv1.Result {
		r, err := n.Store().Apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_UseJoinToken{UseJoinToken: &clusterv1.UseJoinToken{
			Id: id, Identity: &clusterv1.Identity{Id: who, Role: clusterv1.Role_ROLE_VIEWER},
		}}})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	put("a", time.Hour)
	put("b", time.Hour)
	if r := use("a", "x"); r.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		t.Errorf("valid token: %v", r)
	}
	if r := use("a", "y"); r.GetOutcome() != clusterv1.Outcome_OUTCOME_NOT_FOUND {
		t.Errorf("token used twice: %v", r)
	}
	n.Clock.Jump(2 * time.Hour)
	if r := use("b", "y"); r.GetOutcome() != clusterv1.Outcome_OUTCOME_REFUSED || !strings.Contains(r.GetMessage(), "expired") {
		t.Errorf("expired token: %v", r)
	}
}

func TestProtocolOfTheOldestHostIsInForce(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3})
	cmd := note("new")
	cmd.Version = state.Protocol + 1
	for _, n := range c.Nodes {
		_, err := n.Store().Apply(ctx, cmd)
		if !errors.Is(err, replica.ErrProtocol) || !strings.Contains(err.Error(), "n0 (protocol") {
			t.Errorf("%s: %v", n.Name, err)
		}
	}
}

func TestLostVoterIsReplaced(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 4, Config: func(_ int, cfg *replica.Config) { cfg.Members.Lost = time.Second }})
	voters := c.Leader(ctx).Voters()
	var victim *clustertest.Node
	for _, n := range c.Nodes {
		if slices.Contains(voters, n.Name) && n != c.Leader(ctx) {
			victim = n
		}
	}
	victim.Kill()
	c.Until(ctx, "replaced", func() error {
		now := c.Leader(ctx).Voters()
		if len(now) != 3 || slices.Contains(now, victim.Name) {
			return fmt.Errorf("voters %v", now)
		}
		return nil
	})
	if m := c.Leader(ctx).Store().Status().GetMembers(); len(m) != 4 {
		t.Errorf("a lost host is no longer a member: %v", m)
	}
}

func TestRemovedHostIsNoServer(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3})
	gone := c.Leader(ctx)
	other := c.Nodes[0]
	if other == gone {
		other = c.Nodes[1]
	}
	c.Must(ctx, other, &clusterv1.Command{Op: &clusterv1.Command_RemoveHost{RemoveHost: &clusterv1.RemoveHost{Host: gone.Name}}})
	c.Until(ctx, "one voter of two", func() error {
		l := c.Leader(ctx)
		st := l.Store().Status()
		if l == gone || len(st.GetMembers()) != 2 || len(l.Voters()) != 1 {
			return fmt.Errorf("%s leads, members %v", l.Name, st.GetMembers())
		}
		return nil
	})
	c.Must(ctx, other, note("goes on"))
}

func TestRecoverWithoutMajority(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 3, Disk: true})
	c.Must(ctx, c.Nodes[0], note("kept"))
	c.Equal(ctx)
	for _, n := range c.Nodes {
		n.Kill()
	}
	n := c.Nodes[1]
	n.Disk.Well()
	if err := replica.Recover(n.Config(), []replica.Server{{ID: "other", Address: "x:1", Voter: true}}); err == nil {
		t.Error("a host left itself out")
	}
	if err := replica.Recover(n.Config(), []replica.Server{{ID: n.ID, Address: n.Address, Voter: true}}); err != nil {
		t.Fatal(err)
	}
	if err := n.Start(ctx); err != nil {
		t.Fatal(err)
	}
	v, err := n.Store().Read(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	if got := notes(v); !slices.Contains(got, "kept") {
		t.Errorf("notes %v", got)
	}
}

func TestDamagedFilesAreRefused(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: 1, Disk: true, Config: func(_ int, cfg *replica.Config) {
		cfg.SnapshotThreshold, cfg.SnapshotInterval, cfg.TrailingLogs = 5, 10*time.Millisecond, 1
	}})
	n := c.Nodes[0]
	if s, err := replica.Open(ctx, n.Config()); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("opened twice: %v, %v", s, err)
	}
	for i := range 30 {
		c.Must(ctx, n, note(fmt.Sprint(i)))
	}
	var files []string
	c.Until(ctx, "snapshot", func() error {
		files, _ = filepath.Glob(filepath.Join(n.Config().Dir, "snapshots", "*", "state.bin"))
		if len(files) < 2 {
			c.Must(ctx, n, note("more"))
			return errors.New("none")
		}
		return nil
	})
	n.Kill()
	files, _ = filepath.Glob(filepath.Join(n.Config().Dir, "snapshots", "*", "state.bin"))
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(f, b[:len(b)/2], 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Start(ctx); err == nil || !strings.Contains(err.Error(), "snapshot") {
		t.Errorf("started with cut snapshots: %v", err)
	}
}
