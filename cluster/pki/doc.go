// Package pki says who is who in a cluster. One certificate authority per
// cluster signs short-lived certificates of hosts and users; a join token that
// works once, and names the authority by its fingerprint, is how a new one
// gets its first.
//
// # Who somebody is
//
// A certificate names its owner in one URI, gpuctl://CLUSTER/host/ID or
// gpuctl://CLUSTER/user/ID, and nothing else of it is believed: what the owner
// may do is in the replicated identity, so that taking it away acts at once
// and everywhere. The authority signs for one cluster only, and no other
// authority (path length 0). It carries no name constraints: hosts have
// arbitrary DNS names and addresses, and a constraint on URIs is one that
// several TLS libraries refuse as a whole, GnuTLS among them. Verify checks
// the cluster in the URI instead.
//
// # One port
//
// Hosts offer everything on one port, TLS 1.3 only. The protocol chosen in the
// handshake (ALPN) says what a connection is for. Raft needs a host's
// certificate and is refused in the handshake without. HTTP is let in without
// a certificate, or with one that does not hold, because a TLS alert cannot
// tell a person what to do next; such a connection has no identity, there are
// few of them at a time, and they end soon. Package access answers it.
//
// # Time
//
// Certificates are valid from an hour before they are made, so that hosts
// whose clocks differ understand each other. Nothing here waits for a moment
// of the wall clock: a Renewer looks at the clock again and again, so that a
// clock that jumps costs at most one renewal.
//
// # Files
//
// A Dir survives a crash at any moment with a certificate and a key that fit:
// the new key is stored beside the old one until the certificate is in place,
// and Load finishes what was begun.
package pki
