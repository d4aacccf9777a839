// Package placementtest makes inventories and replays workloads, to measure
// what placement decides and how long it takes. It runs on the real state
// machine: what does not fit is refused there.
package placementtest
