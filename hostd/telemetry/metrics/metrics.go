package metrics

import (
	"context"
	"log/slog"
	"net/http"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
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

// Metrics has all metrics: the counters, and what is read at each scrape. It is safe for
// concurrent use.
type Metrics struct {
	*Counters
	sources Sources
	scraped []family
	asking  asking
	state   knownState

	cluster clusterFamilies
	host    hostFamilies

	mediated mediatedFamilies

	bound *prometheus.HistogramVec
}

// New adds what is read from the sources to the registry of the counters.
func New(c *Counters, s Sources) *Metrics {
	m := &Metrics{Counters: c, sources: s}
	m.cluster = m.clusterFamilies()
	m.host = m.hostFamilies()
	m.mediated = m.mediatedFamilies()
	m.bound = m.histogram("gpuctl_claim_bound_seconds",
		"How long claims waited in the log for what they need, as the leader saw it; 0 if they got it at once.",
		[]float64{.001, .01, .1, 1, 10, 60, 600, 3600, 36000})
	m.registry.MustRegister(scraper{m})
	return m
}

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
