// Package trace makes an OpenTelemetry trace of every long operation: a root
// span for the operation and a span for each of its steps, with the times at
// which they really ran. It is off unless the configuration names a collector;
// then a collector that is slow or down costs spans and never time: nothing
// here waits for it but Shutdown, and that no longer than it is told to.
package trace
