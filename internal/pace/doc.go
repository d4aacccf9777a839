// Package pace bounds the work that one client can make a server do. What a
// server does for a client begins with reading what that has sent: small frames
// without end take a processor, and no limit of connections or of memory stops
// that. So each client's connections together may be read so often a second;
// what comes sooner stays in the socket, and its sender waits.
package pace
