// Package cli is the gpuctl command: it talks to a hostd and shows the answers
// to people (tables, a progress bar) and to programs (JSON, YAML).
//
// What concerns this machine's applications goes to HostService: run, sessions,
// inventory, the swaps. All else goes to ClusterService, at the same place or,
// through the Remote that the command was given, on another machine. Kinds of
// objects are a table (kinds.go) with their columns; package view makes of any
// message what programs read. Streams that break are taken up again where they
// were.
//
// Data goes to standard output, what is said on the way to standard error. Exit
// statuses are those of package cmdutil; `gpuctl run` exits as the command that
// it ran.
package cli
