// Package room reports how much more there is room for: in the memory of this machine, in a
// file system, and where an open file is.
//
// Not here: who may have how much of it.
package room
