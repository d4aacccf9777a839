package metrics_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/telemetry/metrics"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

var update = flag.Bool("update", false, "write docs/metrics.md")

// log applies commands to a state, one entry each.
type log struct {
	t     testing.TB
	store *state.Store
	index uint64
	clock int64
}

func newLog(t testing.TB) *log {
	l := &log{t: t, store: state.New(), clock: 1_700_000_000_000}
	l.apply(&clusterv1.Command{Op: &clusterv1.Command_InitCluster{InitCluster: &clusterv1.InitCluster{ClusterId: "c1"}}})
	return l
}

func (l *log) apply(c *clusterv1.Command) {
	l.t.Helper()
	l.index++
	c.Version, c.UnixMs, c.Actor = 1, l.clock, "test"
	if r := l.store.Apply(l.index, c); r.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		l.t.Fatalf("%v: %v", c, r)
	}
}

func (l *log) host(name, model string, gpus int) {
	l.t.Helper()
	r := &clusterv1.ReportHost{Host: &clusterv1.Host{Name: name, Id: "id-" + name, Address: name + ":7070", Version: "1", Protocol: 1}}
	for i := range gpus {
		r.Gpus = append(r.Gpus, &clusterv1.GPU{
			Name: fmt.Sprintf("gpu%d", i), Model: model, Vendor: "v", Type: "gpu", Health: clusterv1.Health_HEALTH_OK,
			Runtime: "pocl", RuntimeKey: "pocl", Limits: &gpuctlv1.Limits{GlobalMemory: 16 << 30},
		})
	}
	l.apply(&clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: r}})
}

func (l *log) claim(id string, choices ...*clusterv1.Choice) {
	l.t.Helper()
	l.apply(&clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
		Claim: &clusterv1.Claim{Id: id, MinMemory: 4 << 30, Unmet: clusterv1.Unmet_UNMET_WAIT}, Choices: choices,
	}}})
}

func (l *log) assign(id string, choices ...*clusterv1.Choice) {
	l.t.Helper()
	l.apply(&clusterv1.Command{Op: &clusterv1.Command_Assign{Assign: &clusterv1.Assign{Claim: id, Choices: choices}}})
}

func share(gpu string) *clusterv1.Choice {
	return &clusterv1.Choice{Gpu: gpu, Memory: 4 << 30, Kind: clusterv1.VGPUKind_VGPU_KIND_SHARE}
}

func full(t testing.TB) (*log, metrics.Sources) {
	l := newLog(t)
	l.host("a", "Big", 3)
	l.host("b", "Small", 2)
	l.host("c", "Small", 1)
	l.claim("c-1", share("a/gpu0"))
	l.claim("c-2")
	l.apply(&clusterv1.Command{Op: &clusterv1.Command_CordonGpu{CordonGpu: &clusterv1.CordonGPU{Gpu: "a/gpu2", Cordoned: true}}})
	l.apply(&clusterv1.Command{Op: &clusterv1.Command_DrainHost{DrainHost: &clusterv1.DrainHost{Host: "c", Draining: true}}})
	l.apply(&clusterv1.Command{Op: &clusterv1.Command_ReportSessions{ReportSessions: &clusterv1.ReportSessions{Host: "a", Sessions: []*clusterv1.Session{
		{Id: "a/s1", Host: "a", Claim: "c-1", State: gpuctlv1.SessionState_SESSION_STATE_RUNNING, Gpus: []string{"a/gpu0"}, Generation: 1},
	}}}})
	l.apply(&clusterv1.Command{Op: &clusterv1.Command_PutMigration{PutMigration: &clusterv1.PutMigration{Migration: &clusterv1.Migration{
		Id: "m-1", Verb: "upgrade", Object: "a/s1", Claim: "c-1", From: "a/gpu0", Driver: "a", State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
	}}}})
	busy, celsius, milliwatts, used := uint32(25), int32(61), uint32(70_500), uint64(1<<30)
	return l, metrics.Sources{
		View: func() *state.View { return l.store.View() },
		Status: func() *clusterv1.StatusResponse {
			return &clusterv1.StatusResponse{
				Joined: true, Host: "a", Leader: "a", Quorum: true, Term: 7, LastIndex: 30, CommitIndex: 29, AppliedIndex: 28, Protocol: 1,
				CertificateExpiresUnixMs: 1_700_000_000_500,
				Members: []*clusterv1.MemberStatus{
					{Host: "a", Voter: true, Healthy: true}, {Host: "b", Voter: true}, {Host: "c", Healthy: true},
				},
			}
		},
		Health:  func() error { return nil },
		Skipped: func() uint64 { return 3 },
		Facts: func(context.Context) (*clusterv1.HostFacts, error) {
			return &clusterv1.HostFacts{Host: "a", Load1: 1.5, FreeMemory: 2 << 30, Gpus: []*clusterv1.GPUFacts{
				{
					Gpu: "a/gpu0", Utilization: &busy, MemoryUtilization: &busy, UsedMemory: &used, Temperature: &celsius, Power: &milliwatts, PowerLimit: &milliwatts,
					Sessions: []*clusterv1.SessionFacts{{Session: "s1"}}, Health: clusterv1.Health_HEALTH_DEGRADED,
				},
				{Gpu: "a/gpu1"},
			}}, nil
		},
		Audit:   func() access.AuditCounts { return access.AuditCounts{Lines: 5, Lost: 2, Errors: 1} },
		Version: "1.2.3",
	}
}

// exercise calls every hook.
func exercise(c *metrics.Counters) {
	c.Operation("upgrade", 3*time.Second, &gpuctlv1.SwapResult{
		StoppedNs: 20e6, BytesPrecopied: 100, BytesFrozen: 10, Steps: []*gpuctlv1.StepTime{{Step: "precopy", DurationNs: 2e9}},
	})
	c.Refused(clusterv1connect.ClusterServiceListProcedure, connect.CodePermissionDenied)
}

func exposed(t testing.TB, m *metrics.Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

func expect(t *testing.T, text string, lines ...string) {
	t.Helper()
	for _, want := range lines {
		if !strings.Contains(text, "\n"+want+"\n") {
			name, _, _ := strings.Cut(want, "{")
			var near []string
			for line := range strings.Lines(text) {
				if strings.HasPrefix(line, strings.Fields(name)[0]) {
					near = append(near, line)
				}
			}
			t.Errorf("no line %q; there are:\n%s", want, strings.Join(near, ""))
		}
	}
}

func TestScrapeShowsStateAsItIs(t *testing.T) {
	_, s := full(t)
	m := metrics.New(metrics.NewCounters(), s)
	exercise(m.Counters)
	text := exposed(t, m)
	expect(t, text,
		`gpuctl_cluster_joined 1`, `gpuctl_cluster_is_leader 1`, `gpuctl_cluster_has_leader 1`, `gpuctl_cluster_quorum 1`,
		`gpuctl_cluster_term 7`, `gpuctl_cluster_last_index 30`, `gpuctl_cluster_commit_index 29`, `gpuctl_cluster_applied_index 28`,
		`gpuctl_cluster_skipped_entries_total 3`, `gpuctl_cluster_node_healthy 1`, `gpuctl_cluster_protocol 1`,
		`gpuctl_cluster_certificate_expiry_timestamp_seconds 1.7000000005e+09`,
		`gpuctl_cluster_members{health="healthy",role="voter"} 1`, `gpuctl_cluster_members{health="unhealthy",role="voter"} 1`,
		`gpuctl_cluster_members{health="healthy",role="nonvoter"} 1`, `gpuctl_cluster_members{health="unhealthy",role="nonvoter"} 0`,
		`gpuctl_objects{kind="gpu"} 6`, `gpuctl_objects{kind="host"} 3`, `gpuctl_objects{kind="vgpu"} 1`, `gpuctl_objects{kind="migration"} 1`,
		`gpuctl_objects{kind="model"} 2`, `gpuctl_objects{kind="reservation"} 0`,
		`gpuctl_hosts{state="ready"} 2`, `gpuctl_hosts{state="draining"} 1`, `gpuctl_hosts{state="down"} 0`,
		`gpuctl_gpus{health="ok",model="Big",state="used"} 1`, `gpuctl_gpus{health="ok",model="Big",state="free"} 1`,
		`gpuctl_gpus{health="ok",model="Big",state="cordoned"} 1`, `gpuctl_gpus{health="ok",model="Small",state="free"} 2`,
		`gpuctl_gpus{health="ok",model="Small",state="draining"} 1`,
		`gpuctl_gpu_memory_bytes{model="Big"} 5.1539607552e+10`,
		`gpuctl_gpu_memory_used_bytes{model="Big"} 4.294967296e+09`,
		`gpuctl_claims{state="pending"} 1`, `gpuctl_claims{state="bound"} 1`, `gpuctl_claims{state="releasing"} 0`,
		`gpuctl_assignments{residence="scheduled"} 1`, `gpuctl_sessions{state="running"} 1`, `gpuctl_sessions{state="lost"} 0`,
		`gpuctl_migrations{state="running",verb="upgrade"} 1`,
		`gpuctl_host_facts_up 1`, `gpuctl_host_load1 1.5`, `gpuctl_host_gpu_utilization_ratio{gpu="gpu0"} 0.25`,
		`gpuctl_host_gpu_temperature_celsius{gpu="gpu0"} 61`, `gpuctl_host_gpu_power_watts{gpu="gpu0"} 70.5`,
		`gpuctl_host_gpu_health{gpu="gpu0",health="degraded"} 1`, `gpuctl_host_gpu_sessions{gpu="gpu0"} 1`, `gpuctl_host_gpu_sessions{gpu="gpu1"} 0`,
		`gpuctl_audit_lines_total 5`, `gpuctl_audit_lost_lines_total 2`, `gpuctl_audit_errors_total 1`,
		`gpuctl_operations_total{outcome="done",verb="upgrade"} 1`, `gpuctl_operation_duration_seconds_sum{verb="upgrade"} 3`,
		`gpuctl_operation_stopped_seconds_sum{verb="upgrade"} 0.02`, `gpuctl_operation_copied_bytes_total{phase="precopied",verb="upgrade"} 100`,
		`gpuctl_operation_step_duration_seconds_count{step="precopy",verb="upgrade"} 1`,
		`gpuctl_refused_calls_total{code="permission_denied",procedure="/gpuctl.cluster.v1.ClusterService/List"} 1`,
	)
	if strings.Contains(text, `gpuctl_host_gpu_utilization_ratio{gpu="gpu1"}`) {
		t.Error("a GPU that says nothing has a utilization")
	}
	for _, name := range []string{"go_goroutines", "process_open_fds", `gpuctl_build_info{go_version="go`} {
		if !strings.Contains(text, "\n"+name) {
			t.Errorf("no %s", name)
		}
	}
	var age float64
	if _, err := fmt.Sscanf(text[strings.Index(text, "\ngpuctl_claim_oldest_pending_age_seconds ")+1:], "gpuctl_claim_oldest_pending_age_seconds %g", &age); err != nil || age < 1e6 {
		t.Errorf("the oldest pending claim is %v s old (%v)", age, err)
	}
}

// What is remembered between scrapes is never older than the state, nor of
// another cluster's.
func TestScrapesFollowTheState(t *testing.T) {
	l, s := full(t)
	now := l
	s.View = func() *state.View { return now.store.View() }
	m := metrics.New(metrics.NewCounters(), s)
	expect(t, exposed(t, m), `gpuctl_claims{state="pending"} 1`, `gpuctl_objects{kind="vgpu"} 1`)
	l.assign("c-2", share("b/gpu1"))
	for range 2 {
		expect(t, exposed(t, m), `gpuctl_claims{state="pending"} 0`, `gpuctl_claim_oldest_pending_age_seconds 0`, `gpuctl_assignments{residence="scheduled"} 2`,
			`gpuctl_objects{kind="vgpu"} 2`, `gpuctl_gpus{health="ok",model="Small",state="used"} 1`)
	}
	l.apply(&clusterv1.Command{Op: &clusterv1.Command_SetHostDown{SetHostDown: &clusterv1.SetHostDown{Host: "b", Down: true}}})
	expect(t, exposed(t, m), `gpuctl_gpus{health="ok",model="Small",state="down"} 2`, `gpuctl_hosts{state="down"} 1`)
	now = newLog(t)
	expect(t, exposed(t, m), `gpuctl_objects{kind="gpu"} 0`, `gpuctl_claims{state="bound"} 0`)
}

func TestNamesAreGood(t *testing.T) {
	_, s := full(t)
	m := metrics.New(metrics.NewCounters(), s)
	exercise(m.Counters)
	problems, err := testutil.GatherAndLint(m.Registry())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestHostOutsideOfAnyCluster(t *testing.T) {
	for name, s := range map[string]metrics.Sources{
		"no sources": {},
		"not joined": {View: func() *state.View { return nil }, Status: func() *clusterv1.StatusResponse { return nil }},
	} {
		t.Run(name, func(t *testing.T) {
			text := exposed(t, metrics.New(metrics.NewCounters(), s))
			expect(t, text, "gpuctl_cluster_joined 0")
			for _, absent := range []string{"gpuctl_cluster_term", "gpuctl_objects", "gpuctl_host_load1"} {
				if strings.Contains(text, absent) {
					t.Errorf("%s is there", absent)
				}
			}
		})
	}
}

func TestLabelsAreBounded(t *testing.T) {
	l := newLog(t)
	for n := range 300 {
		l.host(fmt.Sprintf("h%03d", n), fmt.Sprintf("model %03d", n), 1)
	}
	m := metrics.New(metrics.NewCounters(), metrics.Sources{
		View:   func() *state.View { return l.store.View() },
		Status: func() *clusterv1.StatusResponse { return &clusterv1.StatusResponse{Joined: true} },
		Facts: func(context.Context) (*clusterv1.HostFacts, error) {
			f := &clusterv1.HostFacts{Host: "a"}
			for n := range 2000 {
				f.Gpus = append(f.Gpus, &clusterv1.GPUFacts{Gpu: fmt.Sprintf("a/%d", n)})
			}
			f.Gpus = append(f.Gpus, f.GetGpus()[0], &clusterv1.GPUFacts{Gpu: "a/\xff\xfe"})
			return f, nil
		},
	})
	for n := range 1000 {
		m.Refused(fmt.Sprintf("/evil/%d", n), connect.CodeUnauthenticated)
		m.Operation(fmt.Sprintf("verb%d", n), time.Second, &gpuctlv1.SwapResult{Steps: []*gpuctlv1.StepTime{{Step: fmt.Sprint(n)}}})
	}
	for name, most := range map[string]int{
		"gpuctl_gpu_memory_bytes": 257, "gpuctl_host_gpu_sessions": 512, "gpuctl_refused_calls_total": 1, "gpuctl_operations_total": 1,
		"gpuctl_operation_step_duration_seconds": 1,
	} {
		n, err := testutil.GatherAndCount(m.Registry(), name)
		if err != nil || n == 0 || n > most {
			t.Errorf("%s: %d series, want 1 to %d (%v)", name, n, most, err)
		}
	}
	expect(t, exposed(t, m), `gpuctl_gpus{health="ok",model="other",state="free"} 44`)
}

func TestOutcomes(t *testing.T) {
	for want, r := range map[string]*gpuctlv1.SwapResult{
		"done": {}, "refused": {Refused: true, Error: "no"}, "rolled_back": {RolledBack: true, Error: "no"}, "failed": {Error: "lost"},
	} {
		if got := metrics.Outcome(r); got != want {
			t.Errorf("%v: %s, want %s", r, got, want)
		}
	}
	if metrics.Outcome(nil) != "failed" {
		t.Error("no result is not a failure")
	}
}

// A host that hangs must neither hold up scrapes nor gather them.
func TestScrapesSurviveAHostThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var mu sync.Mutex
		asked := 0
		m := metrics.New(metrics.NewCounters(), metrics.Sources{Facts: func(context.Context) (*clusterv1.HostFacts, error) {
			mu.Lock()
			asked++
			mu.Unlock()
			<-release
			return nil, errors.New("too late")
		}})
		began := time.Now()
		for range 3 {
			expect(t, exposed(t, m), "gpuctl_host_facts_up 0", "gpuctl_cluster_joined 0")
		}
		if d := time.Since(began); d > 8*time.Second {
			t.Errorf("three scrapes took %v", d)
		}
		mu.Lock()
		if asked != 1 {
			t.Errorf("asked %d times", asked)
		}
		mu.Unlock()
		close(release)
		synctest.Wait()
		expect(t, exposed(t, m), "gpuctl_host_facts_up 0")
		mu.Lock()
		defer mu.Unlock()
		if asked != 2 {
			t.Errorf("asked %d times", asked)
		}
	})
}

func TestScrapesAreLimited(t *testing.T) {
	inside, release := make(chan struct{}, 8), make(chan struct{})
	m := metrics.New(metrics.NewCounters(), metrics.Sources{Status: func() *clusterv1.StatusResponse {
		inside <- struct{}{}
		<-release
		return nil
	}})
	h := m.Handler()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil)) })
	}
	for range 4 {
		<-inside
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	if w.Code != http.StatusServiceUnavailable {
		t.Errorf("the fifth scrape got %d", w.Code)
	}
	close(release)
	wg.Wait()
}

func TestHooksOfNothing(t *testing.T) {
	exercise(nil)
}

type service struct {
	clusterv1connect.UnimplementedClusterServiceHandler
	open chan struct{}
}

func (s service) Status(context.Context, *connect.Request[clusterv1.StatusRequest]) (*connect.Response[clusterv1.StatusResponse], error) {
	return connect.NewResponse(&clusterv1.StatusResponse{}), nil
}

func (s service) Watch(ctx context.Context, _ *connect.Request[clusterv1.WatchRequest], stream *connect.ServerStream[clusterv1.WatchResponse]) error {
	_ = stream.Send(&clusterv1.WatchResponse{})
	<-s.open
	return connect.NewError(connect.CodeUnavailable, errors.New("stopping"))
}

func TestCallsAreCounted(t *testing.T) {
	m := metrics.New(metrics.NewCounters(), metrics.Sources{})
	s := service{open: make(chan struct{})}
	mux := http.NewServeMux()
	mux.Handle(clusterv1connect.NewClusterServiceHandler(s, connect.WithInterceptors(m.Interceptor())))
	server := httptest.NewServer(mux)
	defer server.Close()
	// The same interceptor on a client counts nothing.
	client := clusterv1connect.NewClusterServiceClient(server.Client(), server.URL, connect.WithInterceptors(m.Interceptor()))
	for range 2 {
		if _, err := client.Status(t.Context(), connect.NewRequest(&clusterv1.StatusRequest{})); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.List(t.Context(), connect.NewRequest(&clusterv1.ListRequest{})); connect.CodeOf(err) != connect.CodeUnimplemented {
		t.Fatal(err)
	}
	stream, err := client.Watch(t.Context(), connect.NewRequest(&clusterv1.WatchRequest{}))
	if err != nil || !stream.Receive() {
		t.Fatal(err, stream.Err())
	}
	const watch = `procedure="/gpuctl.cluster.v1.ClusterService/Watch"`
	expect(t, exposed(t, m), `gpuctl_api_streams{`+watch+`} 1`)
	close(s.open)
	if stream.Receive() {
		t.Error("the stream goes on")
	}
	_ = stream.Close()
	var text string
	testkit.Until(t, "the stream is not counted any more", func() error { // the handler returns after its client has heard
		text = exposed(t, m)
		return testkit.Want(strings.Contains(text, `gpuctl_api_streams{`+watch+`} 0`), text)
	})
	expect(t, text, `gpuctl_api_streams{`+watch+`} 0`, `gpuctl_api_requests_total{code="unavailable",`+watch+`} 1`,
		`gpuctl_api_requests_total{code="ok",procedure="/gpuctl.cluster.v1.ClusterService/Status"} 2`,
		`gpuctl_api_request_duration_seconds_count{procedure="/gpuctl.cluster.v1.ClusterService/Status"} 2`,
		`gpuctl_api_requests_total{code="unimplemented",procedure="/gpuctl.cluster.v1.ClusterService/List"} 1`)
	if strings.Contains(text, `gpuctl_api_request_duration_seconds_count{`+watch) {
		t.Error("the time of a stream is counted")
	}
}

// What claims waited for is counted once, by the leader alone, from when they
// were made or lost what they had.
func TestWaitsOfClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLog(t)
		l.host("a", "Big", 4)
		l.claim("before", share("a/gpu0"))
		leader := "a"
		var mu sync.Mutex
		m := metrics.New(metrics.NewCounters(), metrics.Sources{
			View: func() *state.View { return l.store.View() },
			Status: func() *clusterv1.StatusResponse {
				mu.Lock()
				defer mu.Unlock()
				return &clusterv1.StatusResponse{Joined: true, Host: "a", Leader: leader}
			},
		})
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { m.Follow(ctx) })
		settle := func() {
			time.Sleep(10 * time.Second)
			synctest.Wait()
		}
		settle()
		l.claim("at-once", share("a/gpu0"))
		l.claim("later")
		settle()
		l.clock += 5000
		l.assign("later", share("a/gpu1"))
		settle()
		expect(t, exposed(t, m), "gpuctl_claim_bound_seconds_count 2", "gpuctl_claim_bound_seconds_sum 5")
		v := l.store.View()
		id := v.Claim("later").GetAssignments()[0]
		l.clock += 60_000
		l.apply(&clusterv1.Command{Op: &clusterv1.Command_ReleaseAssignments{ReleaseAssignments: &clusterv1.ReleaseAssignments{Assignments: []string{id}}}})
		l.apply(&clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{ConfirmAssignments: &clusterv1.ConfirmAssignments{Host: "a", Confirmations: []*clusterv1.Confirmation{
			{Assignment: id, Token: v.Assignment(id).GetToken(), Gone: true},
		}}}})
		l.clock += 7000
		l.assign("later", share("a/gpu2"))
		settle()
		expect(t, exposed(t, m), "gpuctl_claim_bound_seconds_count 3", "gpuctl_claim_bound_seconds_sum 12")
		mu.Lock()
		leader = "b"
		mu.Unlock()
		l.claim("elsewhere", share("a/gpu2"))
		settle()
		mu.Lock()
		leader = "a"
		mu.Unlock()
		l.claim("here", share("a/gpu3"))
		settle()
		expect(t, exposed(t, m), "gpuctl_claim_bound_seconds_count 4", "gpuctl_claim_bound_seconds_sum 12")
		stop()
		wg.Wait()
	})
}

// The manual lists what there is, no more and no less.
func TestManualIsComplete(t *testing.T) {
	_, s := full(t)
	m := metrics.New(metrics.NewCounters(), s)
	exercise(m.Counters)
	families, err := m.Registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]metrics.Definition{}
	for _, d := range m.Definitions() {
		listed[d.Name] = d
	}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "gpuctl_") {
			continue
		}
		d, ok := listed[f.GetName()]
		if !ok {
			t.Errorf("%s is not listed", f.GetName())
			continue
		}
		if d.Help != f.GetHelp() || !strings.EqualFold(d.Type, f.GetType().String()) {
			t.Errorf("%s is %s (%s), listed as %v", f.GetName(), f.GetType(), f.GetHelp(), d)
		}
		if n := len(f.GetMetric()[0].GetLabel()); n != len(d.Labels) {
			t.Errorf("%s has %d labels, listed with %v", f.GetName(), n, d.Labels)
		}
	}
	const file = "../../../docs/metrics.md"
	want := manual(m)
	if *update {
		if err := os.WriteFile(file, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("docs/metrics.md is not what there is (go test ./hostd/telemetry/metrics -update writes it):\n%s", diff)
	}
}

func manual(m *metrics.Metrics) []byte {
	var b bytes.Buffer
	io.WriteString(&b, `# Metrics

hostd serves these in Prometheus' format. State is read when it is asked for: values of the cluster are this host's view of it,
so take them from the leader (`+"`... and on(instance) gpuctl_cluster_is_leader == 1`"+`) or the maximum over hosts; what
happened on hosts (operations, calls, refusals) is summed over all of them. Metrics of the Go runtime (`+"`go_*`"+`) and of the
process (`+"`process_*`"+`) are there, too. A dashboard for Grafana is grafana/gpuctl.json.

| metric | type | labels | meaning |
|---|---|---|---|
`)
	for _, d := range m.Definitions() {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", d.Name, d.Type, strings.Join(d.Labels, ", "), d.Help)
	}
	return b.Bytes()
}

// fleet is 10 000 hosts of 8 GPUs, a share of half of them given away.
func fleet(tb testing.TB) *log {
	l := newLog(tb)
	for n := range 10_000 {
		name := fmt.Sprintf("host-%05d", n)
		l.host(name, fmt.Sprintf("Model %d", n%6), 8)
		for g := range 4 {
			l.claim(fmt.Sprintf("c-%s-%d", name, g), share(fmt.Sprintf("%s/gpu%d", name, g)))
		}
	}
	return l
}

func BenchmarkScrape(b *testing.B) {
	l := fleet(b)
	status := &clusterv1.StatusResponse{Joined: true, Host: "host-00000", Leader: "host-00000"}
	for range 10_000 {
		status.Members = append(status.Members, &clusterv1.MemberStatus{Healthy: true})
	}
	m := metrics.New(metrics.NewCounters(), metrics.Sources{
		View:   func() *state.View { return l.store.View() },
		Status: func() *clusterv1.StatusResponse { return status },
	})
	h := m.Handler()
	scrape := func() int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		return w.Body.Len()
	}
	b.Run("unchanged", func(b *testing.B) {
		scrape()
		for b.Loop() {
			b.ReportMetric(float64(scrape()), "bytes")
		}
	})
	b.Run("all-changed", func(b *testing.B) {
		var used time.Duration
		for b.Loop() {
			b.StopTimer()
			l.claim(fmt.Sprintf("new-%d", l.index), share(fmt.Sprintf("host-%05d/gpu7", l.index%10_000)))
			b.StartTimer()
			before := processorTime(b)
			scrape()
			used += processorTime(b) - before
		}
		// On a machine with other work, the time on the clock is the others'.
		b.ReportMetric(float64(used.Nanoseconds())/float64(b.N), "cpu-ns/op")
	})
}

// processorTime is what this process has used of processors.
func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
