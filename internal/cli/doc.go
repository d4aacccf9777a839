// Package cli is the gpuctl command: it talks to a hostd and shows the answers
// to people (tables, a progress bar) and to programs (JSON, YAML).
//
// Data goes to standard output, what is said on the way to standard error. Exit
// statuses are those of package program; `gpuctl run` exits as the command that
// it ran.
package cli
