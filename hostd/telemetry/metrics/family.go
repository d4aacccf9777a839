package metrics

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Definition describes a metric for the manual.
type Definition struct {
	Name   string
	Type   string // gauge, counter or histogram
	Help   string
	Labels []string
}

const (
	gauge     = "gauge"
	counter   = "counter"
	histogram = "histogram"
)

// maxLabel is the longest value of a label, in bytes.
const maxLabel = 128

// family is a metric whose values are read at each scrape.
type family struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

// define records a metric for the manual.
func (m *Metrics) define(name, kind, help string, labels []string) {
	m.definitions = append(m.definitions, Definition{name, kind, help, labels})
}

func (m *Metrics) family(name, kind, help string, labels ...string) family {
	m.define(name, kind, help, labels)
	f := family{prometheus.NewDesc(name, help, labels, nil), prometheus.GaugeValue}
	if kind == counter {
		f.kind = prometheus.CounterValue
	}
	m.scraped = append(m.scraped, f)
	return f
}

func (m *Metrics) counter(name, help string, labels ...string) *prometheus.CounterVec {
	m.define(name, counter, help, labels)
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	m.registry.MustRegister(v)
	return v
}

func (m *Metrics) gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	m.define(name, gauge, help, labels)
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	m.registry.MustRegister(v)
	return v
}

func (m *Metrics) histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	m.define(name, histogram, help, labels)
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	m.registry.MustRegister(v)
	return v
}

// put writes one value of a family.
func (f family) put(ch chan<- prometheus.Metric, value float64, labels ...string) {
	for i, l := range labels {
		labels[i] = clean(l)
	}
	metric, err := prometheus.NewConstMetric(f.desc, f.kind, value, labels...)
	if err != nil {
		metric = prometheus.NewInvalidMetric(f.desc, err)
	}
	ch <- metric
}

func (f family) truth(ch chan<- prometheus.Metric, is bool) {
	value := 0.0
	if is {
		value = 1
	}
	f.put(ch, value)
}

// clean makes the value of a label from a text that a host or a user chose.
func clean(s string) string {
	if len(s) > maxLabel {
		s = s[:maxLabel]
	}
	return strings.ToValidUTF8(s, "")
}

// Definitions returns all metrics of gpuctl, by name. Those of the Go runtime and of the
// process are documented by the client library.
func (m *Metrics) Definitions() []Definition {
	all := slices.Clone(m.definitions)
	slices.SortFunc(all, func(a, b Definition) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// word returns an enum's value without its prefix, in lower case.
func word(name, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(name, prefix))
}
