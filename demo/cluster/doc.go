// Command cluster shows three hosts as one cluster on this machine: each hostd
// is in a network namespace of its own, on a bridge. It joins them, runs an
// application, kills the leader while that runs, shows that the others go on,
// lets the killed one come back, and cleans up. It needs root.
package main
