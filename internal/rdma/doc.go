// Package rdma makes connections over RDMA networks (InfiniBand, RoCE, iWARP): streams of bytes
// over reliable connections (InfiniBand Architecture Specification, volume 1, chapter 9), which
// librdmacm establishes. Its libraries are loaded when they are asked for, so that programs
// start without them.
//
// Bytes go in messages of up to 64 KiB with a header of 8 bytes: how many follow, how many buffers
// the other end may use again, and whether it is the last. An end has 16 messages with bytes
// under way at most, so that the other one has a buffer for each. The other end is hostile; its
// device can write to no memory but these buffers.
//
// A connection belongs to the process that made it, and making one needs /dev/infiniband. So
// gpuguest makes them for its carriers and far executors: package fabric.
//
// Not here: who may connect, and what the bytes mean.
package rdma
