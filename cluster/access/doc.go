// Package access decides what a caller may do, explains refusals, and records who changed
// what.
//
// A Caller is one of three: a process on this host, identified by the kernel on the Unix
// socket; a host or user, identified by its certificate, with the role that the cluster's
// state contains for it now; or anonymous. A table contains, for each procedure of the
// API, which kinds of caller may call it, and the least role for that. A procedure that
// is not in the table is refused.
//
// A Gate applies the table: Middleware before a request's body is read, WrapUnary and
// WrapStreamingHandler before the handler is called. A connection may live longer than
// its caller's rights. So only the certificate is stored with it. Each request, and each
// message and each second of a stream, checks again whether the certificate has expired,
// whether the identity was removed, and its role.
//
// # Audit trail
//
// An AuditLog has one line of JSON for each call that changes something, and for each
// such call of an identified caller that was refused. A line is synced to the disk at
// most 100 ms after its call has ended. The call does not wait for that. So a crash of
// the host may lose the last 100 ms of the trail. The trail never stops the daemon: while
// the disk is full, lines wait in memory. If there are too many, the oldest are dropped,
// and a line contains how many.
package access
