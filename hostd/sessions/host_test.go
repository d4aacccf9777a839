package sessions

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/hostd/guesttest"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

func TestMain(m *testing.M) {
	testkit.HalfMain()
	goleak.VerifyTestMain(m)
}

// failer is a test, or a property's try.
type failer interface{ Fatal(args ...any) }

// fixture is a host with a fake guest that survives the host's restarts.
type fixture struct {
	t     failer
	guest *guesttest.Guest
	front *httptest.Server
	state string
	nvml  NVML // nil: no driver

	host *Host
	node *member.Node
	api  *httptest.Server
	stop context.CancelFunc
	done chan struct{}
	gpuctlv1connect.HostServiceClient
	with HostConfig // what the host has beside what each host of a test has

	other *otherHost            // in the host's cluster; nil: there is none
	wrap  func(Cluster) Cluster // what the host's cluster becomes with the next start; nil: nothing
}

func newFixture(t failer, state string, with ...func(*HostConfig)) *fixture {
	f := &fixture{t: t, guest: guesttest.New(), state: state}
	for _, set := range with {
		set(&f.with)
	}
	f.open()
	return f
}

func (f *fixture) open() {
	f.front = httptest.NewServer(f.guest.Handler())
	f.start()
}

func (f *fixture) start() {
	c := config.Config{Version: 1}
	for id, gib := range map[string]string{"big": "8", "mid": "4", "low": "1"} {
		c.GPUs = append(c.GPUs, config.GPU{ID: id, Library: "/libpocl.so", Env: map[string]string{"POCL_MEMORY_LIMIT": gib}})
	}
	c.GPUs = append(c.GPUs, config.GPU{ID: "duo", Library: "/libpocl.so", Env: map[string]string{"POCL_MEMORY_LIMIT": "2", "POCL_DEVICES": "a b"}})
	root := fstest.MapFS{
		"proc/1/stat":   {Data: []byte("1 (a) b) S 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 77 0")},
		"proc/1/status": {Data: []byte("Name:\ta\nUid:\t1000\t1000\t1000\t1000\n")},
	}
	ctx, stop := context.WithCancel(context.Background())
	f.node = member.New(ctx, member.Config{
		Name: "here", Local: func() access.LocalPolicy { return access.LocalPolicy{} }, Logger: slog.New(slog.DiscardHandler),
	})
	with := f.with
	if with.Config.Version != 0 {
		c = with.Config
	}
	with.Guest, with.AppSocket, with.StateFile, with.Config = gpuctlv1connect.NewGuestServiceClient(f.front.Client(), f.front.URL), "/app", f.state, c
	with.Root, with.PCI, with.NVML, with.Cluster, with.Log = root, pci.NewScanner(root), f.nvml, f.node, slog.New(slog.DiscardHandler)
	if f.other != nil {
		f.other.Node = f.node
		with.Cluster = f.other
	}
	if f.wrap != nil {
		with.Cluster = f.wrap(with.Cluster)
	}
	host, err := NewHost(ctx, with)
	if err != nil {
		f.t.Fatal(err)
	}
	if err := f.node.Start(ctx, member.Served{Host: NewReport(host, nil, nil)}); err != nil {
		f.t.Fatal(err)
	}
	if err := host.Start(ctx); err != nil {
		f.t.Fatal(err)
	}
	f.host, f.stop, f.done = host, stop, make(chan struct{})
	go func() {
		defer close(f.done)
		host.Watch(ctx)
	}()
	mux := http.NewServeMux()
	host.Handle(mux)
	f.api = httptest.NewServer(mux)
	f.HostServiceClient = gpuctlv1connect.NewHostServiceClient(f.api.Client(), f.api.URL)
}

func (f *fixture) halt() {
	f.stop()
	<-f.done
	f.host.Wait()
	if err := f.node.Close(); err != nil {
		f.t.Fatal(err)
	}
	f.api.Client().CloseIdleConnections()
	f.api.Close()
}

func (f *fixture) close() {
	f.halt()
	f.front.Client().CloseIdleConnections()
	f.front.CloseClientConnections()
	f.front.Close()
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}

// claim creates one; nil when refused.
func (f *fixture) claim(req *gpuctlv1.CreateClaimRequest) *gpuctlv1.CreateClaimResponse {
	res, err := f.CreateClaim(context.Background(), connect.NewRequest(req))
	if err != nil {
		f.t.Fatal(err)
	}
	if res.Msg.GetClaim() == nil {
		if len(res.Msg.GetRejected()) == 0 {
			f.t.Fatal("refused without a reason")
		}
		return nil
	}
	return res.Msg
}

// last reads a stream to its end.
func last(s *connect.ServerStreamForClient[gpuctlv1.OperationUpdate], err error) (*gpuctlv1.SwapResult, error) {
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var r *gpuctlv1.SwapResult
	for s.Receive() {
		r = s.Msg().GetProgress().GetResult()
	}
	if r == nil {
		return nil, errors.Join(s.Err(), errors.New("no result"))
	}
	return r, nil
}

func (f *fixture) swap(session string, verb gpuctlv1.Verb, to, fail string) (*gpuctlv1.SwapResult, error) {
	return last(f.Swap(context.Background(), connect.NewRequest(&gpuctlv1.HostSwapRequest{Session: session, Verb: verb, To: to, FailAt: fail})))
}

func (f *fixture) owners() map[string][]*gpuctlv1.Owner {
	res, err := f.GetInventory(context.Background(), connect.NewRequest(&gpuctlv1.GetInventoryRequest{}))
	if err != nil {
		f.t.Fatal(err)
	}
	out := map[string][]*gpuctlv1.Owner{}
	for _, g := range res.Msg.GetGpus() {
		out[g.GetId()] = g.GetOwners()
	}
	return out
}

// Whatever claims, sessions, swaps, faults and restarts follow on each other:
// a GPU has one owner or fitting ones, what runs on a GPU holds it, and at the
// end nothing is held.
func TestOwnershipHoldsWhateverHappens(t *testing.T) {
	dir := t.TempDir()
	n := 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		f := newFixture(t, filepath.Join(dir, fmt.Sprint(n)+".json"))
		defer f.close()
		capacity := map[string]uint64{"big": 8 << 30, "mid": 4 << 30, "low": 1 << 30, "duo-0": 2 << 30, "duo-1": 2 << 30}
		claims := map[string]*gpuctlv1.CreateClaimResponse{}
		sessions := map[string]bool{}
		targets := rapid.SampledFrom([]string{"", "big", "mid", "low", "duo-0", "duo-1", "duo-0,duo-1"})
		faults := rapid.SampledFrom([]string{"", "", "freeze", "commit", "load"})
		t.Repeat(map[string]func(*rapid.T){
			"claim": func(t *rapid.T) {
				c := f.claim(&gpuctlv1.CreateClaimRequest{
					Count: rapid.SampledFrom([]uint32{1, 1, 2}).Draw(t, "count"), MinMemory: rapid.SampledFrom([]uint64{0, 1 << 29, 3 << 30}).Draw(t, "min"),
				})
				if c != nil {
					claims[c.GetClaim().GetId()] = c
				}
			},
			"begin": func(t *rapid.T) {
				ids := map[string]bool{}
				for id := range claims {
					ids[id] = true
				}
				c := claims[pick(t, ids, "claim")]
				if id, err := f.guest.Begin(c.GetToken(), 1, "x", 256<<20); err == nil {
					sessions[id] = true
				}
			},
			"end": func(t *rapid.T) {
				id := pick(t, sessions, "session")
				f.guest.End(id)
				delete(sessions, id)
			},
			"release": func(t *rapid.T) {
				for id := range claims {
					if _, err := f.ReleaseClaim(context.Background(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: id})); err != nil {
						t.Fatal(err)
					}
					delete(claims, id)
					break
				}
			},
			"swap": func(t *rapid.T) {
				verb := gpuctlv1.Verb(rapid.Int32Range(1, 3).Draw(t, "verb"))
				r, err := f.swap(pick(t, sessions, "session"), verb, targets.Draw(t, "to"), faults.Draw(t, "fail"))
				if err == nil && r.GetRefused() && r.GetError() == "" {
					t.Fatal("refused without a word")
				}
			},
			"suspend": func(t *rapid.T) {
				_, _ = last(f.Suspend(context.Background(), connect.NewRequest(&gpuctlv1.HostSuspendRequest{Session: pick(t, sessions, "session"), FailAt: faults.Draw(t, "fail")})))
			},
			"resume": func(t *rapid.T) {
				_, _ = last(f.Resume(context.Background(), connect.NewRequest(&gpuctlv1.HostResumeRequest{Session: pick(t, sessions, "session"), To: targets.Draw(t, "to"), FailAt: faults.Draw(t, "fail")})))
			},
			"restart": func(*rapid.T) {
				f.halt()
				f.start()
			},
			"": func(t *rapid.T) {
				if err := f.host.Resync(context.Background()); err != nil {
					t.Fatal(err)
				}
				f.checkOwners(t, capacity)
			},
		})
		for id := range sessions {
			f.guest.End(id)
		}
		for id := range claims {
			if _, err := f.ReleaseClaim(context.Background(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: id})); err != nil {
				t.Fatal(err)
			}
		}
		if err := f.host.Resync(context.Background()); err != nil {
			t.Fatal(err)
		}
		for gpu, list := range f.owners() {
			if len(list) > 0 {
				t.Fatalf("%s is held by %v in the end", gpu, list)
			}
		}
		if left := f.guest.Offered(); len(left) > 0 {
			t.Fatalf("offers are left: %v", left)
		}
	})
}

// pick draws one of a set.
func pick(t *rapid.T, from map[string]bool, label string) string {
	if len(from) == 0 {
		t.Skip("none")
	}
	var all []string
	for id := range from {
		all = append(all, id)
	}
	slices.Sort(all)
	return rapid.SampledFrom(all).Draw(t, label)
}

// checkOwners fails where a GPU has more owners than it may have, or a session
// runs on one that its claim does not hold.
func (f *fixture) checkOwners(t *rapid.T, capacity map[string]uint64) {
	t.Helper()
	owners := f.owners()
	for gpu, list := range owners {
		var sum uint64
		for _, o := range list {
			if o.GetMemory() == 0 && len(list) > 1 {
				t.Fatalf("%s has several owners: %v", gpu, list)
			}
			sum += o.GetMemory()
		}
		if sum > capacity[gpu] {
			t.Fatalf("%s: %d of %d", gpu, sum, capacity[gpu])
		}
	}
	for at, ids := range f.guest.Holders() {
		for _, gpu := range strings.Split(at, ",") {
			for _, id := range ids {
				if !slices.ContainsFunc(owners[gpu], func(o *gpuctlv1.Owner) bool { return slices.Contains(o.GetSessions(), id) }) {
					t.Fatalf("session %s is on %s, which is held by %v", id, gpu, owners[gpu])
				}
			}
		}
	}
}

// puppet is a guest whose stream says what the test does.
type puppet struct {
	*guesttest.Guest
	say chan *gpuctlv1.Session
}

func (p puppet) WatchSessions(ctx context.Context, _ *connect.Request[gpuctlv1.WatchSessionsRequest], stream *connect.ServerStream[gpuctlv1.Session]) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case s := <-p.say:
			if err := stream.Send(s); err != nil {
				return err
			}
		}
	}
}

// What the guest's stream says late brings no session back that has ended
// since, nor its claim, which would keep a GPU that nobody uses.
func TestLateWordOfStreamRevivesNothing(t *testing.T) {
	f := newFixture(t, filepath.Join(t.TempDir(), "state.json"))
	defer f.close()
	say := make(chan *gpuctlv1.Session)
	mux := http.NewServeMux()
	mux.Handle(gpuctlv1connect.NewGuestServiceHandler(puppet{f.guest, say}))
	front := httptest.NewServer(mux)
	defer front.Close()
	h, err := NewHost(t.Context(), HostConfig{
		Guest: gpuctlv1connect.NewGuestServiceClient(front.Client(), front.URL), Cluster: f.node,
		StateFile: filepath.Join(t.TempDir(), "late.json"), Root: fstest.MapFS{"proc": {Mode: fs.ModeDir}}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	var claims []*gpuctlv1.CreateClaimResponse
	for range 2 {
		c := f.claim(&gpuctlv1.CreateClaimRequest{Count: 1})
		id, err := f.guest.Begin(c.GetToken(), 1, "x", 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		ids, claims = append(ids, id), append(claims, c)
	}
	ctx, stop := context.WithCancel(t.Context())
	var following sync.WaitGroup
	following.Go(func() { h.follow(ctx) })
	defer following.Wait()
	defer stop()
	if err := h.Resync(ctx); err != nil {
		t.Fatal(err)
	}
	last := map[string]*gpuctlv1.Session{}
	h.mu.Lock()
	for _, id := range ids {
		last[id] = proto.CloneOf(h.sessions[id].Session)
	}
	h.mu.Unlock()
	f.guest.End(ids[0])
	for range 2 { // the second one has nothing to end any more
		if err := h.Resync(ctx); err != nil {
			t.Fatal(err)
		}
	}
	w := h.watch()
	defer w.Close()
	w.Take()
	last[ids[1]].Message = "heard"
	say <- last[ids[0]]
	say <- last[ids[1]]
	for heard := false; !heard; {
		<-w.Bell()
		heard = slices.ContainsFunc(w.Take(), func(s *gpuctlv1.Session) bool { return s.GetMessage() == "heard" })
	}
	if got := h.Sessions(); len(got) != 1 || got[0].GetId() != ids[1] {
		t.Errorf("sessions are %v; only %s runs", got, ids[1])
	}
	if h.Knows(claims[0].GetClaim().GetId()) {
		t.Error("the claim of the session that ended is back")
	}
	if !h.Knows(claims[1].GetClaim().GetId()) {
		t.Error("the claim of the session that runs is gone")
	}
	// One that the stream is the first to speak of is taken in from the list.
	c := f.claim(&gpuctlv1.CreateClaimRequest{Count: 1})
	id, err := f.guest.Begin(c.GetToken(), 1, "x", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	say <- &gpuctlv1.Session{Id: id, Claim: c.GetClaim().GetId(), State: gpuctlv1.SessionState_SESSION_STATE_RUNNING}
	for heard := false; !heard; {
		<-w.Bell()
		heard = slices.ContainsFunc(w.Take(), func(s *gpuctlv1.Session) bool { return s.GetId() == id })
	}
}

// A GPU of this host has two names. Both say where a session goes.
func TestSessionGoesToOwnGPUByFullName(t *testing.T) {
	for what, to := range map[string]string{"name": "mid", "name in the cluster": "here/mid", "two of them": "here/duo-1,here/duo-0"} {
		t.Run(what, func(t *testing.T) {
			f := newFixture(t, filepath.Join(t.TempDir(), "state.json"))
			defer f.close()
			gpus := strings.Split(strings.ReplaceAll(to, "here/", ""), ",")
			id, err := f.guest.Begin(f.claim(&gpuctlv1.CreateClaimRequest{Count: uint32(len(gpus)), Remote: remoteAllowed}).GetToken(), 1, "x", 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			if r, err := f.swap(id, gpuctlv1.Verb_VERB_MIGRATE, to, ""); err != nil || r.GetError() != "" || r.GetSession().GetTarget().GetGpu() != strings.Join(gpus, ",") {
				t.Errorf("%v %v", r, err)
			}
		})
	}
}
