// Package clustertest runs clusters inside a test. It uses real stores with Raft's own
// network transport over loopback. Their network, disks and clocks fail on command.
//
// A killed node first loses its connections and its disk, and then its memory. Its files
// stay as they are at that moment, as after kill -9. Links fail for each direction
// separately: messages on a broken link are lost, so a request may arrive whose answer
// does not.
package clustertest
