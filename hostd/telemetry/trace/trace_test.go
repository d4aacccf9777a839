package trace_test

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/telemetry/trace"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// keeper keeps what is exported when the tracer is shut down.
type keeper struct{ *tracetest.InMemoryExporter }

func (keeper) Shutdown(context.Context) error { return nil }

func traced(t *testing.T, c trace.Config, work func(*trace.Tracer)) tracetest.SpanStubs {
	t.Helper()
	k := keeper{tracetest.NewInMemoryExporter()}
	c.Exporter = k
	tr, err := trace.New(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	work(tr)
	if err := tr.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	return k.GetSpans()
}

func attributes(s tracetest.SpanStub) map[string]string {
	m := map[string]string{}
	for _, a := range s.Attributes {
		m[string(a.Key)] = a.Value.String()
	}
	return m
}

type timed struct {
	Name       string
	Start, End time.Duration // since the operation began
}

func steps(t *testing.T, spans tracetest.SpanStubs, since time.Time) (root tracetest.SpanStub, all []timed) {
	t.Helper()
	root = spans[len(spans)-1]
	for _, s := range spans[:len(spans)-1] {
		if s.Parent.SpanID() != root.SpanContext.SpanID() || s.SpanContext.TraceID() != root.SpanContext.TraceID() {
			t.Errorf("step %s is not a child of the operation", s.Name)
		}
		all = append(all, timed{s.Name, s.StartTime.Sub(since), s.EndTime.Sub(since)})
	}
	return root, all
}

func TestOperationIsATrace(t *testing.T) {
	at := time.Now().Add(-time.Hour)
	ms := func(n int) time.Time { return at.Add(time.Duration(n) * time.Millisecond) }
	var id string
	spans := traced(t, trace.Config{Version: "1.2.3", Host: "a"}, func(tr *trace.Tracer) {
		op := tr.Begin(t.Context(), trace.Op{ID: "m-1", Verb: "upgrade", Object: "s-1", Claim: "c-1", From: "small", At: at})
		id = op.TraceID()
		op.Step("check", ms(10))
		op.Step("check", ms(15))
		op.Step("freeze", ms(20))
		op.End("done", "large", &gpuctlv1.SwapResult{StoppedNs: 5e6, BytesPrecopied: 100, BytesFrozen: 7}, ms(50))
		op.End("failed", "", nil, ms(99)) // once is enough
		op.Step("late", ms(99))
	})
	root, got := steps(t, spans, at)
	if diff := cmp.Diff([]timed{{"check", 10e6, 20e6}, {"freeze", 20e6, 50e6}}, got); diff != "" {
		t.Error(diff)
	}
	if root.Name != "upgrade" || !root.StartTime.Equal(at) || !root.EndTime.Equal(ms(50)) || root.Status.Code != codes.Ok || root.SpanContext.TraceID().String() != id {
		t.Errorf("root: %+v", root)
	}
	want := map[string]string{
		"gpuctl.operation": "m-1", "gpuctl.verb": "upgrade", "gpuctl.object": "s-1", "gpuctl.claim": "c-1", "gpuctl.from": "small", "gpuctl.to": "large",
		"gpuctl.outcome": "done", "gpuctl.bytes_precopied": "100", "gpuctl.bytes_frozen": "7", "gpuctl.stopped_seconds": "0.005",
	}
	if diff := cmp.Diff(want, attributes(root)); diff != "" {
		t.Error(diff)
	}
	if s := root.Resource.String(); s != "host.name=a,service.name=gpuctl-hostd,service.version=1.2.3" {
		t.Errorf("resource %s", s)
	}
}

// The guest's own times are exact; an earlier attempt at another GPU, which the
// result does not speak of, stays as it was heard.
func TestTimesOfTheResultCount(t *testing.T) {
	at := time.Now().Add(-time.Hour)
	ms := func(n int) time.Time { return at.Add(time.Duration(n) * time.Millisecond) }
	result := &gpuctlv1.SwapResult{TotalNs: 100e6, Steps: []*gpuctlv1.StepTime{
		{Step: "check", StartNs: 0, DurationNs: 30e6}, {Step: "switch", StartNs: 30e6, DurationNs: 69e6},
	}}
	for name, c := range map[string]struct {
		heard map[int]string
		end   int
		want  []timed
	}{
		"nothing heard": {nil, 150, []timed{{"check", 50e6, 80e6}, {"switch", 80e6, 149e6}}},
		"heard late":    {map[int]string{52: "check", 95: "switch"}, 150, []timed{{"check", 50e6, 80e6}, {"switch", 80e6, 149e6}}},
		"ended late":    {map[int]string{42: "check", 73: "switch"}, 150, []timed{{"check", 42e6, 72e6}, {"switch", 72e6, 141e6}}},
		"check said again": {map[int]string{5: "check", 51: "check", 52: "switch"}, 150, []timed{
			{"check", 5e6, 35e6}, {"switch", 35e6, 104e6},
		}},
		"attempt before": {map[int]string{5: "check", 20: "start", 51: "check", 82: "switch"}, 150, []timed{
			{"check", 5e6, 20e6}, {"start", 20e6, 50e6}, {"check", 50e6, 80e6}, {"switch", 80e6, 149e6},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			spans := traced(t, trace.Config{}, func(tr *trace.Tracer) {
				op := tr.Begin(t.Context(), trace.Op{Verb: "migrate", At: at})
				for i := range 200 {
					op.Step(c.heard[i], ms(i))
				}
				op.End("done", "", result, ms(c.end))
			})
			if _, got := steps(t, spans, at); !cmp.Equal(c.want, got) {
				t.Error(cmp.Diff(c.want, got))
			}
		})
	}
}

func TestFailuresShow(t *testing.T) {
	for outcome, want := range map[string]codes.Code{"done": codes.Ok, "refused": codes.Error, "rolled_back": codes.Error, "failed": codes.Error} {
		r := &gpuctlv1.SwapResult{}
		if want == codes.Error {
			r.Error = "no room"
		}
		spans := traced(t, trace.Config{}, func(tr *trace.Tracer) {
			op := tr.Begin(t.Context(), trace.Op{Verb: "migrate"})
			op.Step("check", time.Now())
			op.Step("start", time.Now())
			op.End(outcome, "", r, time.Now())
		})
		root := spans[2]
		if root.Status.Code != want || root.Status.Description != r.GetError() {
			t.Errorf("%s: %v", outcome, root.Status)
		}
		if bad := outcome == "failed" || outcome == "rolled_back"; (spans[1].Status.Code == codes.Error) != bad || spans[0].Status.Code == codes.Error {
			t.Errorf("%s: steps %v, %v", outcome, spans[0].Status, spans[1].Status)
		}
	}
}

func TestSamples(t *testing.T) {
	const n = 2000
	spans := traced(t, trace.Config{SampleRatio: 0.25}, func(tr *trace.Tracer) {
		for range n {
			op := tr.Begin(t.Context(), trace.Op{Verb: "migrate"})
			op.Step("check", time.Now())
			op.End("done", "", nil, time.Now())
			if n := len(op.TraceID()); n != 0 && n != 32 {
				t.Fatal(op.TraceID())
			}
		}
	})
	if len(spans) < n/2*6/10 || len(spans) > n/2*14/10 || len(spans)%2 != 0 {
		t.Errorf("%d spans of %d operations", len(spans), n)
	}
}

func TestOffCostsNothing(t *testing.T) {
	tr, err := trace.New(t.Context(), trace.Config{})
	if tr != nil || err != nil {
		t.Fatal(tr, err)
	}
	now := time.Now()
	if n := testing.AllocsPerRun(100, func() {
		op := tr.Begin(t.Context(), trace.Op{Verb: "migrate"})
		op.Step("check", now)
		_ = op.TraceID()
		op.End("done", "", nil, now)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if err := tr.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestConfig(t *testing.T) {
	for name, c := range map[string]trace.Config{
		"ratio":     {Endpoint: "c:4318", SampleRatio: 1.5},
		"no number": {Endpoint: "c:4318", SampleRatio: math.NaN()},
		"negative":  {Endpoint: "c:4318", SampleRatio: -0.1},
		"scheme":    {Endpoint: "ftp://c:4318"},
		"no host":   {Endpoint: "http://:4318"},
		"blank":     {Endpoint: "a b"},
		"query":     {Endpoint: "http://c:4318/?x=1"},
		"secret":    {Endpoint: "http://u:p@c:4318/"},
	} {
		if _, err := trace.New(t.Context(), c); !errors.Is(err, trace.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// received is a collector.
type received struct {
	*httptest.Server
	mu    sync.Mutex
	paths []string
	spans []string
}

func receive(t *testing.T) *received {
	r := &received{}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		z, err := gzip.NewReader(req.Body)
		if err != nil {
			t.Error(err)
			return
		}
		body, err := io.ReadAll(z)
		var m collector.ExportTraceServiceRequest
		if err != nil || proto.Unmarshal(body, &m) != nil {
			t.Errorf("not a request: %v", err)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.paths = append(r.paths, req.URL.Path)
		for _, rs := range m.GetResourceSpans() {
			for _, ss := range rs.GetScopeSpans() {
				for _, s := range ss.GetSpans() {
					r.spans = append(r.spans, s.GetName())
				}
			}
		}
		w.Header().Set("Content-Type", "application/x-protobuf")
	}))
	t.Cleanup(r.Close)
	return r
}

func TestCollectorGetsTraces(t *testing.T) {
	for _, form := range []string{"address", "url", "path"} {
		t.Run(form, func(t *testing.T) {
			r := receive(t)
			c, path := trace.Config{Endpoint: r.Listener.Addr().String(), Insecure: true}, "/v1/traces"
			switch form {
			case "url":
				c = trace.Config{Endpoint: r.URL}
			case "path":
				c, path = trace.Config{Endpoint: r.URL + "/otlp/v1/traces"}, "/otlp/v1/traces"
			}
			tr, err := trace.New(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			op := tr.Begin(t.Context(), trace.Op{Verb: "suspend"})
			op.Step("check", time.Now())
			op.End("done", "", nil, time.Now())
			if err := tr.Shutdown(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			if diff := cmp.Diff([]string{"check", "suspend"}, r.spans); diff != "" || r.paths[0] != path {
				t.Error(r.paths, diff)
			}
		})
	}
}

// A collector that hangs, or is not there, costs spans and no time.
func TestCollectorThatIsDownHoldsNothingUp(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	for name, address := range map[string]string{"hangs": l.Addr().String(), "gone": gone.Addr().String()} {
		t.Run(name, func(t *testing.T) {
			var out testkit.Log
			tr, err := trace.New(t.Context(), trace.Config{Endpoint: address, Insecure: true, Log: slog.New(slog.NewTextHandler(&out, nil))})
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			for range 5_000 { // more than the queue takes
				op := tr.Begin(t.Context(), trace.Op{Verb: "migrate"})
				op.Step("check", time.Now())
				op.End("done", "", nil, time.Now())
			}
			if d := time.Since(began); d > 5*time.Second { // one batch that was waited for would take longer
				t.Errorf("5000 operations took %v", d)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			began = time.Now()
			err = tr.Shutdown(ctx)
			if d := time.Since(began); d > 2*time.Second {
				t.Errorf("shutdown took %v (%v)", d, err)
			}
			if n := strings.Count(out.String(), "traces cannot be sent"); n > 1 {
				t.Errorf("said %d times:\n%s", n, out.String())
			}
		})
	}
}

// stuck is an exporter that waits until it is told to stop.
type stuck struct {
	began chan struct{}
	ended chan struct{}
}

func (s stuck) ExportSpans(ctx context.Context, _ []sdk.ReadOnlySpan) error {
	s.began <- struct{}{}
	<-ctx.Done()
	s.ended <- struct{}{}
	return ctx.Err()
}

func (stuck) Shutdown(context.Context) error { return nil }

// After Shutdown nothing is sent any more, however much waits.
func TestShutdownEndsWhatIsBeingSent(t *testing.T) {
	s := stuck{make(chan struct{}, 100), make(chan struct{}, 100)}
	tr, err := trace.New(t.Context(), trace.Config{Exporter: s})
	if err != nil {
		t.Fatal(err)
	}
	for range 3000 { // several batches
		tr.Begin(t.Context(), trace.Op{Verb: "migrate"}).End("done", "", nil, time.Now())
	}
	<-s.began
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := tr.Shutdown(ctx); err == nil {
		t.Error("spans that were not sent are no error")
	}
	select {
	case <-s.ended:
	case <-time.After(5 * time.Second):
		t.Fatal("it is still being sent")
	}
	select {
	case <-s.began:
		t.Error("the next batch was sent")
	case <-time.After(100 * time.Millisecond):
	}
}

func BenchmarkOperation(b *testing.B) {
	tr, err := trace.New(b.Context(), trace.Config{Exporter: keeper{tracetest.NewInMemoryExporter()}})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = tr.Shutdown(context.WithoutCancel(b.Context())) }()
	for b.Loop() {
		op := tr.Begin(b.Context(), trace.Op{Verb: "migrate"})
		for _, s := range []string{"check", "start", "prepare", "precopy", "freeze", "transfer", "switch", "retire"} {
			op.Step(s, time.Now())
		}
		op.End("done", "", nil, time.Now())
	}
}
