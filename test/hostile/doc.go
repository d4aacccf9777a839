// Package hostile has clients that attack a host: its gpuguest by the socket for
// applications, its executors by OpenCL programs, its hostd by the local socket,
// and the cluster by the port for hosts and users. They run in processes of
// their own, as other users where the test is root's, and on processors that
// nobody else wants, as far as the kernel can do that (see Group): what others
// notice of them is then mostly what gpuctl does for them.
//
// A program that starts them calls Main first.
package hostile
