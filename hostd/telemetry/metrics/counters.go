package metrics

import (
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
)

// Counters count what happens in the daemon. They have no sources, so the parts that call
// them can be made before those that Metrics reads. They are safe for concurrent use. A nil
// *Counters is valid: it counts nothing.
type Counters struct {
	registry    *prometheus.Registry
	definitions []Definition
	procedures  map[string]bool

	operations *prometheus.CounterVec
	duration   *prometheus.HistogramVec
	stopped    *prometheus.HistogramVec
	steps      *prometheus.HistogramVec
	copied     *prometheus.CounterVec
	refused    *prometheus.CounterVec
	requests   *prometheus.CounterVec
	took       *prometheus.HistogramVec
	streams    *prometheus.GaugeVec
}

// NewCounters makes the counters, and the registry that they are in.
func NewCounters() *Counters {
	c := &Counters{registry: prometheus.NewRegistry(), procedures: map[string]bool{}}
	for p := range access.Table() {
		c.procedures[p] = true
	}
	c.operations = c.counter("gpuctl_operations_total",
		"Swaps, suspensions and resumptions that ended, by verb and outcome (done, refused, rolled_back, held, ended with its application, failed).", "verb", "outcome")
	c.duration = c.histogram("gpuctl_operation_duration_seconds",
		"How long operations took, from their beginning to their end.", []float64{.01, .03, .1, .3, 1, 3, 10, 30, 100, 300, 1000}, "verb")
	c.stopped = c.histogram("gpuctl_operation_stopped_seconds",
		"Downtime of applications in operations that changed something.", []float64{.001, .003, .01, .03, .1, .3, 1, 3, 10, 30, 100}, "verb")
	c.steps = c.histogram("gpuctl_operation_step_duration_seconds",
		"How long the steps of operations took.", []float64{.001, .01, .1, 1, 10, 100, 1000}, "verb", "step")
	c.copied = c.counter("gpuctl_operation_copied_bytes_total",
		"Bytes that operations copied, while the application ran (precopied) and while it was frozen (frozen).", "verb", "phase")
	c.refused = c.counter("gpuctl_refused_calls_total", "Calls that were not authorized.", "procedure", "code")
	c.requests = c.counter("gpuctl_api_requests_total", "Calls of the API that ended, streams too.", "procedure", "code")
	c.took = c.histogram("gpuctl_api_request_duration_seconds", "How long calls of the API took that are not streams.",
		[]float64{.0005, .001, .0025, .005, .01, .025, .1, .25, 1, 10}, "procedure")
	c.streams = c.gauge("gpuctl_api_streams", "Streams of the API that are open.", "procedure")
	c.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return c
}

// Registry returns the registry with all metrics.
func (c *Counters) Registry() *prometheus.Registry { return c.registry }

// Operation counts an operation that has ended. took is the time since the host began it.
// The application's downtime is in the result.
func (c *Counters) Operation(verb string, took time.Duration, r *gpuctlv1.SwapResult) {
	if c == nil {
		return
	}
	verb = known(verb, "upgrade", "downgrade", "migrate", "suspend", "resume", "rehearse")
	outcome := Outcome(r)
	c.operations.WithLabelValues(verb, outcome).Inc()
	c.duration.WithLabelValues(verb).Observe(max(took, 0).Seconds())
	if outcome == "refused" {
		return // nothing was changed
	}
	c.stopped.WithLabelValues(verb).Observe(time.Duration(max(r.GetStoppedNs(), 0)).Seconds())
	c.copied.WithLabelValues(verb, "precopied").Add(float64(r.GetBytesPrecopied()))
	c.copied.WithLabelValues(verb, "frozen").Add(float64(r.GetBytesFrozen()))
	for _, s := range r.GetSteps() {
		step := known(s.GetStep(), "check", "start", "prepare", "precopy", "freeze", "transfer", "switch", "retire", "export", "mark", "load", "discard")
		c.steps.WithLabelValues(verb, step).Observe(time.Duration(max(s.GetDurationNs(), 0)).Seconds())
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
func (c *Counters) Refused(procedure string, code connect.Code) {
	if c != nil {
		c.refused.WithLabelValues(c.procedure(procedure), code.String()).Inc()
	}
}

// procedure returns the name of an existing procedure. All other names, which anybody can
// make up, have one label.
func (c *Counters) procedure(name string) string {
	if c.procedures[name] {
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

// define records a metric for the manual.
func (c *Counters) define(name, kind, help string, labels []string) {
	c.definitions = append(c.definitions, Definition{name, kind, help, labels})
}

func (c *Counters) counter(name, help string, labels ...string) *prometheus.CounterVec {
	c.define(name, counter, help, labels)
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	c.registry.MustRegister(v)
	return v
}

func (c *Counters) gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	c.define(name, gauge, help, labels)
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	c.registry.MustRegister(v)
	return v
}

func (c *Counters) histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	c.define(name, histogram, help, labels)
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	c.registry.MustRegister(v)
	return v
}

// Definitions returns all metrics of gpuctl, by name. Those of the Go runtime and of the
// process are documented by the client library.
func (c *Counters) Definitions() []Definition {
	all := slices.Clone(c.definitions)
	slices.SortFunc(all, func(a, b Definition) int { return strings.Compare(a.Name, b.Name) })
	return all
}
