// Package nvml talks to hostd-nvml, the helper process that loads NVIDIA's management
// library. The library needs cgo, opens the driver's devices, and may be missing, crash
// or hang. In a process of its own, none of that affects hostd, and a card is certainly
// closed when the process has ended.
//
// The Client starts the helper at the first request. If the helper has died, it starts it
// again, after a pause that grows. If a request gets no answer in time, the client kills
// the helper. While the kernel cannot end that process, no other one is started. On a
// host without the library, the helper reports that and ends. The client then answers
// with ErrNoDriver, and checks again only now and then.
//
// # Protocol
//
// Requests and answers go over the helper's standard input and output, one answer for
// each request, in order. A message is JSON after its length in four bytes, most
// significant byte first. Both contain the version of the protocol and the request's
// number.
package nvml
