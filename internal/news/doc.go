// Package news passes news to readers that may be slow. The sender never waits for them.
//
// A Relay is for the updates of one operation: a reader that is far behind misses some in
// the middle, but gets the last one. Changes is for the states of many things: a reader
// that is behind misses older states, but never the newest state of a thing. It needs no
// more memory than there are things.
package news
