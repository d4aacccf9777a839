// Package fabric has carriers reach GPUs of other hosts over RDMA, and carriers of other hosts
// reach this one's.
//
//	carrier ── socket ── Ways ══ RDMA ══ Ways ── TCP on the host ── far executor
//
// gpuguest does both, since executors and carriers have no right to use RDMA devices, and as a
// connection over RDMA belongs to the process that has made it. TLS is between carrier and far
// executor, as over any other way.
//
// Not here: how connections are made (package rdma) and passed on (package relay), and when a
// carrier takes which way (remote.Dialer).
package fabric
