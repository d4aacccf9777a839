// Package throttle keeps what others can cause as often as they like from
// filling a log.
package throttle
