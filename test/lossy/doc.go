// Package lossy is a bad network for tests: two network namespaces, and between them
// a link that loses, delays and reorders packets, and that can be cut.
//
// Here live the namespaces, the two ends of the link (TUN devices), and what passes
// packets from one to the other. What tc netem would do is done in the test's process,
// since many kernels, those of CI for example, are built without netem. TCP in the
// namespaces is the kernel's.
//
// Not here: what runs in the namespaces.
package lossy
