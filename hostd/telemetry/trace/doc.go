// Package trace makes an OpenTelemetry trace of each long operation: a root span for the
// operation and a span for each of its steps, with the times at which they ran. It is off
// unless the configuration names a collector. If a collector is slow or down, spans are
// lost, and no operation waits. Only Shutdown waits for the collector, with a limit.
package trace
