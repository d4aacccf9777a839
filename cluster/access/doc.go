// Package access decides what a caller may do, says why not, and writes down
// who changed what.
//
// A Caller is a process on this host, known by the kernel's word on its
// socket; a host or user, known by the certificate and by what the cluster's
// state says of that identity now; or nobody (anonymous). One table says for
// every procedure of the API which kinds of caller may use it and with which
// least role. What is not in the table is refused.
//
// A Gate applies the table: Middleware before a request's body is read,
// WrapUnary and WrapStreamingHandler before the handler is called. A
// connection outlives decisions, so nothing is remembered with it but whose
// certificate it showed: every request, and every message and second of a
// stream, looks anew at the certificate's end, at removal and at the role.
//
// # Audit trail
//
// An AuditLog has one JSON line for each call that changes something, and for
// each that was refused to a known caller. Lines are on the disk (fsync) at
// most 100 ms after the call has ended; the call does not wait for that, so
// that the trail does not slow down what it watches. What a crash of the
// machine may cost is thus the last 100 ms of it. The trail never stops the
// daemon: while the disk is full, lines wait in memory; when there are too
// many, the oldest are given up, and a line says how many.
package access
