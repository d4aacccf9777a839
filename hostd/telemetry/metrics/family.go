package metrics

import (
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

// family defines a metric whose values are read at each scrape.
func (m *Metrics) family(name, kind, help string, labels ...string) family {
	m.define(name, kind, help, labels)
	f := family{prometheus.NewDesc(name, help, labels, nil), prometheus.GaugeValue}
	if kind == counter {
		f.kind = prometheus.CounterValue
	}
	m.scraped = append(m.scraped, f)
	return f
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

// word returns an enum's value without its prefix, in lower case.
func word(name, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(name, prefix))
}
