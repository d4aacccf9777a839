// Package nvml talks to hostd-nvml, the helper process that holds NVIDIA's
// management library. The library needs cgo, opens the driver's devices, and
// may be missing, crash or hang; in a process of its own none of that reaches
// hostd, and letting go of a card is certain: the process has ended.
//
// The Client starts the helper when it is first asked, and again, after a
// pause that grows, when it has died. A request that gets no answer in time
// kills the helper; while the kernel does not let it die no other is started.
// On a machine without the library the helper says so and ends; the client
// then answers ErrNoDriver by itself and looks again only now and then.
//
// # Protocol
//
// Over the helper's standard input and output, one answer for each request, in
// order: a message is JSON after its length as four bytes, most significant
// first. Both carry the version of the protocol and the request's number.
package nvml
