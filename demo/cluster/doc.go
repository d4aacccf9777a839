// Command cluster shows three hosts as one cluster on this machine: each hostd
// is in a network namespace of its own, on a bridge. It joins them, runs an
// application, kills the leader while that runs, shows that the others go on,
// lets the killed one come back, and cleans up. It needs root.
//
// With --remote there are two hosts: an application starts on the GPU of the other host,
// because its own has none free, and comes home when there is one. The result is compared
// with that of a run on one host, and the timeline is drawn.
package main
