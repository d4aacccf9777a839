// Package placementtest makes inventories and replays workloads, to measure what
// placement decides and how long it takes. It uses the real state machine, which refuses
// what does not fit.
package placementtest
