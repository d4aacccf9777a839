// Package news hands on what happens to readers who may be slow, and never keeps
// those who tell of it waiting.
//
// A Relay is for the moments of one operation: a reader who is far behind misses
// some in the middle, and hears the last. Changes are for the states of many
// things: a reader who is behind misses states, never the newest of a thing, and
// takes no more memory than there are things.
package news
