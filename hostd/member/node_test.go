package member

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestThreeHosts makes a cluster over TLS and starts each of its hosts anew.
func TestThreeHosts(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b", "c")
	for _, m := range ms {
		for _, end := range []func(){m.stop, m.crash} {
			was := m.Self()
			end()
			m.start(ctx)
			if m.Self() != was {
				t.Fatalf("%v after %v", m.Self(), was)
			}
			complete(ctx, t, ms)
			m.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_LabelHost{LabelHost: &clusterv1.LabelHost{
				Host: m.name, Set: map[string]string{"at": time.Now().Format("150405.000")},
			}}})
		}
	}
	for _, m := range ms {
		testkit.Until(t, m.name+" has a leader", func() error {
			s := m.member().store.Status()
			if !s.GetJoined() || !s.GetQuorum() || s.GetMessage() != "" || s.GetStandalone() {
				return fmt.Errorf("%v", s)
			}
			return nil
		})
		if err := m.view(ctx).Check(); err != nil {
			t.Error(err)
		}
	}
}

// TestTokenFromFollower: any host may make tokens.
func TestTokenFromFollower(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b", "c")
	_, others := leader(ctx, t, ms)
	for i, m := range others {
		d := newMachine(t, fmt.Sprintf("d%d", i))
		if err := d.Join(ctx, &clusterv1.JoinRequest{Token: m.token(ctx, &clusterv1.CreateTokenRequest{Name: d.name})}); err != nil {
			t.Fatal(err)
		}
		ms = append(ms, d)
	}
	complete(ctx, t, ms)
}

// TestJoinWithoutLeader shows a token while the host that made it, which led,
// is gone: another one forwards it to the next leader.
func TestJoinWithoutLeader(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b", "c")
	l, _ := leader(ctx, t, ms)
	token := l.token(ctx, &clusterv1.CreateTokenRequest{})
	l.crash()
	d := newMachine(t, "d")
	if err := d.Join(ctx, &clusterv1.JoinRequest{Token: token}); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "d known", func() error {
		if d.view(ctx).Host("d") == nil {
			return errors.New("not yet")
		}
		return nil
	})
	l.start(ctx)
	complete(ctx, t, append(ms, d))
}

// TestRefusals has everything go wrong that can with tokens and names; each
// refusal says why, costs nobody anything, and leaves a host that can join.
func TestRefusals(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b")
	a, other := ms[0], newMachine(t, "other")
	if err := other.Init(ctx, &clusterv1.InitRequest{}); err != nil {
		t.Fatal(err)
	}
	host := func(m *machine, r *clusterv1.CreateTokenRequest) func() *clusterv1.JoinRequest {
		return func() *clusterv1.JoinRequest { return &clusterv1.JoinRequest{Token: m.token(ctx, r)} }
	}
	anybody := &clusterv1.CreateTokenRequest{}
	used := a.token(ctx, anybody)
	u := newMachine(t, "u")
	if err := u.Join(ctx, &clusterv1.JoinRequest{Token: used}); err != nil {
		t.Fatal(err)
	}
	// A token of this cluster that pins another one's authority.
	forged := func() *clusterv1.JoinRequest {
		mine, theirs := decode(t, a.token(ctx, anybody)), decode(t, other.token(ctx, anybody))
		mine.Fingerprint = theirs.Fingerprint
		text, err := mine.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return &clusterv1.JoinRequest{Token: text}
	}
	wrongSecret := func() *clusterv1.JoinRequest {
		token := decode(t, a.token(ctx, anybody))
		token.Secret[0]++
		text, err := token.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return &clusterv1.JoinRequest{Token: text}
	}
	expired := host(a, &clusterv1.CreateTokenRequest{TtlS: 1})()
	time.Sleep(1100 * time.Millisecond) // the cluster's clock is the machine's, in whole seconds
	late := newMachine(t, "late")
	tests := []struct {
		name string
		join func() *clusterv1.JoinRequest
		want string
	}{
		{"empty", func() *clusterv1.JoinRequest { return &clusterv1.JoinRequest{} }, "not a join token"},
		{"cut", func() *clusterv1.JoinRequest {
			text := a.token(ctx, anybody)
			return &clusterv1.JoinRequest{Token: text[:len(text)-5]}
		}, "not a join token"},
		{"a user's", host(a, &clusterv1.CreateTokenRequest{Role: clusterv1.Role_ROLE_VIEWER, Name: "joe"}), "for a user"},
		{"used", func() *clusterv1.JoinRequest { return &clusterv1.JoinRequest{Token: used} }, "not known"},
		{"expired", func() *clusterv1.JoinRequest { return expired }, "expired"},
		{"another name's", func() *clusterv1.JoinRequest {
			return &clusterv1.JoinRequest{Token: a.token(ctx, &clusterv1.CreateTokenRequest{Name: "x"}), Host: "late"}
		}, "another name"},
		{"secret", wrongSecret, "secret"},
		{"authority", forged, "authority"},
		{"name", func() *clusterv1.JoinRequest {
			return &clusterv1.JoinRequest{Token: a.token(ctx, anybody), Host: "b"}
		}, `there is a host "b" already`},
		{"address", func() *clusterv1.JoinRequest {
			return &clusterv1.JoinRequest{Token: a.token(ctx, anybody), Address: ms[1].port}
		}, "is host b's"},
		{"no address", func() *clusterv1.JoinRequest {
			return &clusterv1.JoinRequest{Token: a.token(ctx, anybody), Address: "nonsense"}
		}, "address"},
		{"bad name", func() *clusterv1.JoinRequest {
			return &clusterv1.JoinRequest{Token: a.token(ctx, anybody), Host: "a/b"}
		}, "name"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := late.Join(ctx, tt.join())
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("%v, not %q", err, tt.want)
			}
			if late.member() != nil {
				t.Error("it is a member")
			}
			if _, err := os.Stat(identityPath(late.dir)); !missing(err) {
				t.Errorf("node.json: %v", err)
			}
		})
	}
	if err := late.Join(ctx, host(a, anybody)()); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"init": late.Init(ctx, &clusterv1.InitRequest{}),
		"join": late.Join(ctx, host(a, anybody)()),
	} {
		if !errors.Is(err, ErrMember) || !errors.Is(err, replica.ErrExists) {
			t.Errorf("%s of a member: %v", name, err)
		}
	}
	complete(ctx, t, append(ms, u, late))
}

// TestNameTakenBeforeReport has two hosts of one name let in before either has
// said what it is.
func TestNameTakenBeforeReport(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a")
	var wg sync.WaitGroup
	errs := make([]error, 4)
	twins := make([]*machine, len(errs))
	for i := range errs {
		twins[i] = newMachine(t, "twin")
		token := ms[0].token(ctx, &clusterv1.CreateTokenRequest{})
		wg.Go(func() { errs[i] = twins[i].Join(ctx, &clusterv1.JoinRequest{Token: token}) })
	}
	wg.Wait()
	let := 0
	for _, err := range errs {
		switch {
		case err == nil:
			let++
		case !strings.Contains(err.Error(), "twin"):
			t.Errorf("%v", err)
		}
	}
	if let != 1 {
		t.Errorf("%d of %d hosts of one name were let in: %v", let, len(errs), errs)
	}
}

// TestAtOnce inits and joins one host at the same time.
func TestAtOnce(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	a := cluster(ctx, t, "a")[0]
	b := newMachine(t, "b")
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		token := a.token(ctx, &clusterv1.CreateTokenRequest{})
		wg.Go(func() {
			if i%2 == 0 {
				errs[i] = b.Init(ctx, &clusterv1.InitRequest{})
			} else {
				errs[i] = b.Join(ctx, &clusterv1.JoinRequest{Token: token})
			}
		})
	}
	wg.Wait()
	ok := 0
	for _, err := range errs {
		if err == nil {
			ok++
		} else if !errors.Is(err, ErrMember) {
			t.Error(err)
		}
	}
	if ok != 1 {
		t.Errorf("%v", errs)
	}
}

// TestHourAhead starts a cluster with the clock of its first host an hour
// ahead, which others have right.
func TestHourAhead(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	a := newMachine(t, "a")
	id := identity{Host: "a", ID: "h-ahead", Address: a.port, Cluster: "ahead", Found: true}
	key, csr, err := newRequest()
	if err != nil {
		t.Fatal(err)
	}
	if err := a.foundPKI(id, key, csr, time.Now().Add(time.Hour-time.Minute)); err != nil {
		t.Fatal(err)
	}
	if err := id.write(a.dir); err != nil {
		t.Fatal(err)
	}
	a.stop()
	a.start(ctx)
	b := newMachine(t, "b")
	if err := b.Join(ctx, &clusterv1.JoinRequest{Token: a.token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
		t.Fatal(err)
	}
	complete(ctx, t, []*machine{a, b})
}

// TestRemoved removes a follower, then the leader: neither comes back by
// itself, nobody listens to it any more, and it says so.
func TestRemoved(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b", "c", "d")
	for _, which := range []string{"follower", "leader"} {
		l, others := leader(ctx, t, ms)
		out := others[0]
		if which == "leader" {
			out = l
		}
		stay := slices.DeleteFunc(slices.Clone(ms), func(m *machine) bool { return m == out })
		if _, err := stay[0].api.RemoveHost(admin(ctx), connect.NewRequest(&clusterv1.RemoveHostRequest{Host: out.name})); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		testkit.Until(t, which+" told", func() error {
			res, err := out.api.Status(ctx, connect.NewRequest(&clusterv1.StatusRequest{}))
			if err != nil {
				return err
			}
			if s := res.Msg; !strings.Contains(s.GetMessage(), "removed") {
				return fmt.Errorf("status of %s: %v", out.name, s)
			}
			return nil
		})
		t.Logf("%s knows after %v", which, time.Since(began))
		_, err := out.api.SetLabels(admin(short(ctx, t)), connect.NewRequest(&clusterv1.SetLabelsRequest{Host: stay[0].name, Set: map[string]string{"x": "y"}}))
		if err == nil {
			t.Errorf("the %s still changes the cluster", which)
		}
		complete(ctx, t, stay)
		time.Sleep(500 * time.Millisecond) // nothing tells that it does not come back
		if h := stay[0].view(ctx).Host(out.name); h != nil {
			t.Errorf("it is back: %v", h)
		}
		stay[0].apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_LabelHost{LabelHost: &clusterv1.LabelHost{Host: stay[0].name, Set: map[string]string{"a": out.name}}}})
		// What is left of it does not stand in the way of its return.
		out.stop()
		remove(t, identityPath(out.dir))
		out.start(ctx)
		if err := out.Join(ctx, &clusterv1.JoinRequest{Token: stay[0].token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
			t.Fatalf("%s: %v", out.name, err)
		}
		complete(ctx, t, ms)
	}
}

// TestQuiet: a host that stays as it is costs no log entries, however it
// leaves fields out and whatever operators say about it.
func TestQuiet(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b", "c")
	b := ms[1]
	b.host.do(func() {
		b.host.gpus = append(b.host.gpus, &clusterv1.GPU{Name: "bare", Model: "bare card"})
		b.host.sessions = []*clusterv1.Session{{Id: "s1", Pid: 7, State: gpuctlv1.SessionState_SESSION_STATE_RUNNING, Gpus: []string{"g0"}}}
	})
	if err := b.Announce(ctx); err != nil {
		t.Fatal(err)
	}
	for _, c := range []*clusterv1.Command{
		{Op: &clusterv1.Command_RankModel{RankModel: &clusterv1.RankModel{Model: "test", Rank: 9}}},
		{Op: &clusterv1.Command_CordonGpu{CordonGpu: &clusterv1.CordonGPU{Gpu: "b/g0", Cordoned: true, Message: "dust"}}},
		{Op: &clusterv1.Command_DrainHost{DrainHost: &clusterv1.DrainHost{Host: "b", Draining: true, Message: "move"}}},
		{Op: &clusterv1.Command_LabelHost{LabelHost: &clusterv1.LabelHost{Host: "b", Set: map[string]string{"rack": "7"}}}},
	} {
		b.apply(ctx, c)
	}
	b.Kick()
	testkit.Until(t, "session", func() error {
		if b.view(ctx).Object(clusterv1.Kind_KIND_SESSION, "b/s1") == nil {
			return errors.New("not yet")
		}
		return nil
	})
	time.Sleep(time.Second) // nothing tells that all is told
	was := b.view(ctx).Index()
	for range 10 {
		for _, m := range ms {
			if err := m.Announce(ctx); err != nil {
				t.Fatal(err)
			}
			m.Kick()
		}
		time.Sleep(200 * time.Millisecond) // nothing tells that there is nothing to tell
	}
	v := b.view(ctx)
	if v.Index() != was {
		t.Errorf("%d entries for nothing: %v", v.Index()-was, v.Events(clusterv1.Kind_KIND_UNSPECIFIED, "", 20))
	}
	// What does change is told at once, and once.
	b.host.do(func() { b.host.gpus = b.host.gpus[1:] })
	if err := b.Announce(ctx); err != nil {
		t.Fatal(err)
	}
	v = b.view(ctx)
	events := slices.DeleteFunc(v.Events(clusterv1.Kind_KIND_UNSPECIFIED, "", 0), func(e *clusterv1.Event) bool { return e.GetIndex() <= was })
	if len(events) != 1 || v.GPU("b/g0") != nil {
		t.Errorf("%v", events)
	}
}

// TestInMemory is hostd --dev: a cluster of one without a folder.
func TestInMemory(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	f := &fake{claims: map[string]bool{}, uses: map[string][]string{}, gpus: []*clusterv1.GPU{{Name: "g0", Model: "m"}}}
	n, err := started(ctx, f, Config{Name: "solo", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if err := n.Announce(ctx); err != nil {
		t.Fatal(err)
	}
	res, err := n.Claim(ctx, &clusterv1.Claim{Id: "c"})
	if err != nil || len(res.GetAssignments()) != 1 {
		t.Fatalf("%v, %v", res, err)
	}
	if s := n.member().store.Status(); !s.GetStandalone() || !s.GetJoined() {
		t.Errorf("%v", s)
	}
	for name, err := range map[string]error{
		"init": n.Init(ctx, &clusterv1.InitRequest{}), "join": n.Join(ctx, &clusterv1.JoinRequest{Token: "x"}),
	} {
		if err == nil {
			t.Errorf("%s of a cluster in memory", name)
		}
	}
	if _, err := n.api.CreateToken(admin(ctx), connect.NewRequest(&clusterv1.CreateTokenRequest{})); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("token: %v", err)
	}
}

// Hosts that joined since the last snapshot are let in when all start at once,
// though nobody has applied yet that they were let in before.
func TestAllStartAtOnce(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	first := cluster(ctx, t, "a")[0]
	first.stop()
	if _, err := Recover(first.dir); err != nil { // leaves a snapshot
		t.Fatal(err)
	}
	first.start(ctx)
	ms := []*machine{first}
	leader(ctx, t, ms)
	for _, name := range []string{"b", "c"} {
		m := newMachine(t, name)
		ms = append(ms, m)
		if err := m.Join(ctx, &clusterv1.JoinRequest{Token: first.token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
			t.Fatal(err)
		}
	}
	complete(ctx, t, ms)
	for _, m := range ms {
		m.crash()
	}
	for _, m := range ms {
		m.start(ctx)
	}
	complete(ctx, t, ms)
}

// An application has its executor write what it likes before it ends, and that becomes the
// session's message. It keeps no other session of the host from being seen, and no operation
// from having an end. Nor does why a GPU is not used keep the others from being seen.
func TestTextsOfApplicationsKeepNothingFromTheLog(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	a := cluster(ctx, t, "a")[0]
	texts := map[string]string{"s-zero": "ended: x\x00y", "s-long": "ended: " + strings.Repeat("x", 5000), "s-other": ""}
	a.host.do(func() {
		for id, text := range texts {
			a.host.sessions = append(a.host.sessions, &clusterv1.Session{Id: id, State: gpuctlv1.SessionState_SESSION_STATE_LOST, Message: text})
		}
		bad := proto.CloneOf(a.host.gpus[0])
		bad.Name, bad.Health, bad.HealthReason = "bad", clusterv1.Health_HEALTH_FAILED, texts["s-zero"]+texts["s-long"]
		a.host.gpus = append(a.host.gpus, bad)
	})
	a.Known(ctx, []string{"bad"})
	a.Kick()
	for id, text := range texts {
		r := &clusterv1.Migration{Id: "m-" + id, Verb: "suspend", Object: id, State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING}
		a.Record(proto.CloneOf(r))
		r.State, r.Message, r.EndedUnixMs = clusterv1.MigrationState_MIGRATION_STATE_FAILED, text, 1
		a.Record(r)
		a.Note(&clusterv1.Event{Kind: clusterv1.Kind_KIND_SESSION, Object: "a/" + id, Type: "KeepsGPU", Message: text})
	}
	testkit.Until(t, "all is in the log", func() error {
		v := a.view(ctx)
		if v.GPU("a/bad") == nil {
			return errors.New("the host's GPUs are not reported")
		}
		for id := range texts {
			noted := slices.ContainsFunc(v.Events(clusterv1.Kind_KIND_SESSION, "a/"+id, 10), func(e *clusterv1.Event) bool { return e.GetType() == "KeepsGPU" })
			if end := v.Migration("m-" + id).GetState(); v.Session("a/"+id) == nil || end != clusterv1.MigrationState_MIGRATION_STATE_FAILED || !noted {
				return fmt.Errorf("of %s: reported: %v, %v, noted: %v", id, v.Session("a/"+id) != nil, end, noted)
			}
		}
		return nil
	})
}
