// Package pace limits the work that one client can cause in a server. A server's work for
// a client begins with reading what the client has sent. Many small frames keep a
// processor busy, and limits of connections or of memory do not prevent that. So all
// connections of a client together may be read only so often in a second. What arrives
// sooner stays in the socket, and the client waits.
package pace
