// Package clusterapi serves ClusterService to people and programs, and
// PeerService to other hosts. It turns requests into commands, views and
// placements, and their errors into codes. Who may call what is decided before
// (package access); how this host became a member, and its connections to
// others, are package member's.
package clusterapi
