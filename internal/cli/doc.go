// Package cli is the gpuctl command: it calls a hostd and shows the answers to people
// (tables, a progress bar) and to programs (JSON, YAML).
//
// Commands about this host's applications use HostService: run, sessions, inventory, the
// swaps. All others use ClusterService, of the same hostd or, through the Remote that the
// command was given, of another computer. The kinds of objects are a table (kinds.go)
// with their columns. Package view converts any message for programs. A stream that
// breaks is opened again and continues where it was.
//
// Data goes to standard output, everything else to standard error. Exit statuses are
// those of package cmdutil; `gpuctl run` returns the exit status of the command that it
// ran.
package cli
