// Package metrics has hostd's metrics for Prometheus.
//
// The state of the cluster and of the host is read at each scrape, so nothing
// polls and nothing is counted twice. The daemon calls hooks that count events:
// operations, calls, refusals.
//
// No label has a value that others choose and nobody bounds: never a session, a
// process, a claim or a text. A host has series for its own GPUs only; for the
// cluster there are sums by model.
package metrics
