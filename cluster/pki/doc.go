// Package pki authenticates hosts and users of a cluster. Each cluster has one
// certificate authority. It signs short-lived certificates of hosts and users. A new host
// or user gets its first certificate with a join token, which works once, and contains
// the authority's fingerprint.
//
// # Identities
//
// A certificate names its owner in one URI, gpuctl://CLUSTER/host/ID or
// gpuctl://CLUSTER/user/ID. Nothing else in it is used. What the owner may do is in the
// replicated identity, so that a removal takes effect at once and everywhere. The
// authority signs for one cluster only, and for no other authority (path length 0). It
// has no name constraints, because hosts have arbitrary DNS names and addresses, and
// several TLS libraries, such as GnuTLS, refuse certificates with a constraint on URIs.
// Verify checks the cluster in the URI instead.
//
// # One port
//
// Hosts serve everything on one port, with TLS 1.3 only. The protocol that the handshake
// negotiates (ALPN) selects the service. Raft needs a host's certificate; without one,
// the handshake fails. HTTP is accepted without a certificate, or with one that is not
// valid, because a TLS alert cannot tell a person what to do next. Such a connection is
// anonymous. Their number and their duration are limited. Package access answers it.
//
// # Time
//
// Certificates are valid from an hour before they are made, so that hosts whose clocks
// differ accept each other's. No code here waits for a point in time of the wall clock. A
// Renewer compares the clock periodically, so a clock that jumps causes at most one
// renewal.
//
// # Files
//
// A Dir survives a crash at any point with a certificate and its key: the new key is
// stored beside the old one until the certificate is replaced, and Load completes an
// interrupted Save.
package pki
