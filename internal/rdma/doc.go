// Package rdma makes connections over RDMA networks (InfiniBand, RoCE, iWARP), as net.Conn
// and net.Listener. They are rsockets of librdmacm (rsocket(7) of rdma-core), which is loaded
// when it is asked for, so that programs start without it.
//
// An rsocket lives in the process that made it: it is no descriptor that another process can
// take over, and making one needs /dev/infiniband. So gpuguest makes them, for its carriers
// and for far executors, and package relay passes on what comes.
//
// Not here: who may connect, and what the bytes mean.
package rdma
