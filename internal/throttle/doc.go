// Package throttle limits a log, so that others cannot fill it with lines that they
// cause.
package throttle
