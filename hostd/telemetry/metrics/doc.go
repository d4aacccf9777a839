// Package metrics has hostd's metrics for Prometheus.
//
// The state of the cluster and of the host is read at each scrape, so nothing polls, and
// nothing is counted twice. The daemon calls hooks that count events: operations, calls,
// refusals.
//
// No label has values that others choose without a limit: never a session, a process, a
// claim or a text. A host has series for its own GPUs only. For the cluster there are
// sums by model.
package metrics
