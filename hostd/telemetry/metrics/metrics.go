package metrics

import (
	"context"
	"log/slog"
	"net/http"
	"runtime"
	"slices"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/mmio/server"
)

const (
	scrapeTimeout = 10 * time.Second
	scrapesAtOnce = 4
	factsPatience = 2 * time.Second
	other         = "other" // label for values that have no label of their own
)

// Sources are the functions that provide values at each scrape. Each may be nil, and each
// may be called by several goroutines at once.
type Sources struct {
	View    func() *state.View               // returns nil if the host is in no cluster
	Status  func() *clusterv1.StatusResponse // nil: as if not joined
	Health  func() error                     // health of the host as a member of the cluster
	Skipped func() uint64                    // number of log entries that this version has not applied
	Facts   func(context.Context) (*clusterv1.HostFacts, error)
	Audit   func() access.AuditCounts
	// Mediated returns what is known of parts of mediated GPUs, by GPU; nil: there are none.
	Mediated func() map[string][]server.Status
	Version  string // version of the program
	Log      *slog.Logger
}

// Metrics has its own registry. It is safe for concurrent use. A nil *Metrics is valid:
// its hooks do nothing.
type Metrics struct {
	sources     Sources
	registry    *prometheus.Registry
	definitions []Definition
	scraped     []family
	procedures  map[string]bool
	asking      asking
	state       knownState

	cluster clusterFamilies
	host    hostFamilies

	mediated mediatedFamilies

	operations *prometheus.CounterVec
	duration   *prometheus.HistogramVec
	stopped    *prometheus.HistogramVec
	steps      *prometheus.HistogramVec
	copied     *prometheus.CounterVec
	refused    *prometheus.CounterVec
	bound      *prometheus.HistogramVec
	requests   *prometheus.CounterVec
	took       *prometheus.HistogramVec
	streams    *prometheus.GaugeVec
}

// New makes the registry with all metrics.
func New(s Sources) *Metrics {
	m := &Metrics{sources: s, registry: prometheus.NewRegistry(), procedures: map[string]bool{}}
	for p := range access.Table() {
		m.procedures[p] = true
	}
	m.cluster = m.clusterFamilies()
	m.host = m.hostFamilies()
	m.mediated = m.mediatedFamilies()
	m.operations = m.counter("gpuctl_operations_total",
		"Swaps, suspensions and resumptions that ended, by verb and outcome (done, refused, rolled_back, held, ended with its application, failed).", "verb", "outcome")
	m.duration = m.histogram("gpuctl_operation_duration_seconds",
		"How long operations took, from their beginning to their end.", []float64{.01, .03, .1, .3, 1, 3, 10, 30, 100, 300, 1000}, "verb")
	m.stopped = m.histogram("gpuctl_operation_stopped_seconds",
		"Downtime of applications in operations that changed something.", []float64{.001, .003, .01, .03, .1, .3, 1, 3, 10, 30, 100}, "verb")
	m.steps = m.histogram("gpuctl_operation_step_duration_seconds",
		"How long the steps of operations took.", []float64{.001, .01, .1, 1, 10, 100, 1000}, "verb", "step")
	m.copied = m.counter("gpuctl_operation_copied_bytes_total",
		"Bytes that operations copied, while the application ran (precopied) and while it was frozen (frozen).", "verb", "phase")
	m.refused = m.counter("gpuctl_refused_calls_total", "Calls that were not authorized.", "procedure", "code")
	m.bound = m.histogram("gpuctl_claim_bound_seconds",
		"How long claims waited in the log for what they need, as the leader saw it; 0 if they got it at once.",
		[]float64{.001, .01, .1, 1, 10, 60, 600, 3600, 36000})
	m.requests = m.counter("gpuctl_api_requests_total", "Calls of the API that ended, streams too.", "procedure", "code")
	m.took = m.histogram("gpuctl_api_request_duration_seconds", "How long calls of the API took that are not streams.",
		[]float64{.0005, .001, .0025, .005, .01, .025, .1, .25, 1, 10}, "procedure")
	m.streams = m.gauge("gpuctl_api_streams", "Streams of the API that are open.", "procedure")
	m.registry.MustRegister(scraper{m}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Registry returns the registry with all metrics.
func (m *Metrics) Registry() *prometheus.Registry { return m.registry }

// Handler returns the handler for scrapes. A metric that cannot be read is left out of
// the answer.
func (m *Metrics) Handler() http.Handler {
	options := promhttp.HandlerOpts{
		Timeout: scrapeTimeout, MaxRequestsInFlight: scrapesAtOnce, ErrorHandling: promhttp.ContinueOnError,
	}
	if m.sources.Log != nil {
		options.ErrorLog = scrapeErrors{m.sources.Log}
	}
	return promhttp.HandlerFor(m.registry, options)
}

type scrapeErrors struct{ log *slog.Logger }

func (e scrapeErrors) Println(v ...any) { e.log.Warn("metrics cannot all be read", "err", v) }

// Operation counts an operation that has ended. took is the time since the host began it.
// The application's downtime is in the result.
func (m *Metrics) Operation(verb string, took time.Duration, r *gpuctlv1.SwapResult) {
	if m == nil {
		return
	}
	verb = known(verb, "upgrade", "downgrade", "migrate", "suspend", "resume", "rehearse")
	outcome := Outcome(r)
	m.operations.WithLabelValues(verb, outcome).Inc()
	m.duration.WithLabelValues(verb).Observe(max(took, 0).Seconds())
	if outcome == "refused" {
		return // nothing was changed
	}
	m.stopped.WithLabelValues(verb).Observe(time.Duration(max(r.GetStoppedNs(), 0)).Seconds())
	m.copied.WithLabelValues(verb, "precopied").Add(float64(r.GetBytesPrecopied()))
	m.copied.WithLabelValues(verb, "frozen").Add(float64(r.GetBytesFrozen()))
	for _, s := range r.GetSteps() {
		step := known(s.GetStep(), "check", "start", "prepare", "precopy", "freeze", "transfer", "switch", "retire", "export", "mark", "load", "discard")
		m.steps.WithLabelValues(verb, step).Observe(time.Duration(max(s.GetDurationNs(), 0)).Seconds())
	}
}

// Outcome returns the outcome of an operation in one word.
func Outcome(r *gpuctlv1.SwapResult) string {
	switch {
	case r == nil:
		return "failed"
	case r.GetRefused():
		return "refused"
	case r.GetRolledBack():
		return "rolled_back"
	case r.GetHeld():
		return "held"
	case r.GetEnded():
		return "ended"
	case r.GetError() != "":
		return "failed"
	}
	return "done"
}

// Refused counts a call that was refused by access control.
func (m *Metrics) Refused(procedure string, code connect.Code) {
	if m != nil {
		m.refused.WithLabelValues(m.procedure(procedure), code.String()).Inc()
	}
}

// procedure returns the name of an existing procedure. All other names, which anybody can
// make up, have one label.
func (m *Metrics) procedure(name string) string {
	if m.procedures[name] {
		return name
	}
	return other
}

func known(word string, words ...string) string {
	if slices.Contains(words, word) {
		return word
	}
	return other
}

// scraper implements prometheus.Collector for values that are read at each scrape.
type scraper struct{ *Metrics }

// Describe implements prometheus.Collector.
func (s scraper) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range s.scraped {
		ch <- f.desc
	}
}

// Collect implements prometheus.Collector.
func (s scraper) Collect(ch chan<- prometheus.Metric) {
	s.cluster.build.put(ch, 1, s.sources.Version, runtime.Version())
	answer := s.asking.begin(s.sources.Facts) // the rest is read during this call
	s.collectCluster(ch)
	if s.sources.Audit != nil {
		c := s.sources.Audit()
		s.cluster.auditLines.put(ch, float64(c.Lines))
		s.cluster.auditLost.put(ch, float64(c.Lost))
		s.cluster.auditErrors.put(ch, float64(c.Errors))
	}
	if s.sources.Mediated != nil {
		s.collectMediated(ch, s.sources.Mediated())
	}
	s.collectHost(ch, answer)
}
