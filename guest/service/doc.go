// Package service serves GuestService over engines of sessions. It finds a session's engine
// by the session's id, and gives an offer to every engine that can use its target.
//
// What an engine must do is declared here, as this package is what uses it. Engines
// themselves are in guest/session (portable) and guest/cuda (driver), which this package
// does not know.
package service
