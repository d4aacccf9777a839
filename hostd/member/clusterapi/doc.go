// Package clusterapi serves ClusterService to users and programs, and PeerService to
// other hosts. It converts requests to commands, reads and placements, and errors to
// codes. Package access decides before who may call what. Package member joins this host
// to the cluster, and connects to other hosts.
package clusterapi
