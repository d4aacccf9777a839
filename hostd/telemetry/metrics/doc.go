// Package metrics is what hostd tells Prometheus.
//
// What the cluster and the host are like is read when somebody asks, from the
// replicated state and from what they answer: nothing polls and nothing is
// counted twice. What happens (operations, calls, refusals) is counted by hooks
// that the daemon calls.
//
// No label has a value from outside whose number nobody bounds: never a
// session, a process, a claim or a text. GPUs have series of their own on their
// own host only; of the cluster there are sums by model.
package metrics
