// Package xentest is a hypervisor in this process for tests of ioreq servers. It has
// domains with vCPUs and memory, and it keeps the rules of Xen's ABI: who breaks one gets
// the error that Xen returns, or fails the test where real Xen would hang a vCPU or a
// domain. It knows nothing of the package that it tests but its interfaces.
package xentest
