// Package clustertest runs clusters inside a test: real stores with Raft's own
// network transport over loopback, whose network, disks and clocks fail on
// command.
//
// A node that is killed loses its connections and its disk at once and then
// its process's memory; what its files hold at that moment stays, as after
// kill -9. Links fail per direction: a cut one swallows what is sent on it, so
// that a request may arrive whose answer does not.
package clustertest
