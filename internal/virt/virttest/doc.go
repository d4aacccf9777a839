// Package virttest is a libvirtd for tests: a server of libvirt's protocol on a Unix
// socket, with domains that follow the rules of the libxl or the qemu driver, and with
// each fault that a client must survive: answers that never come, come late, are
// truncated or malformed, connections that are closed before or after the work was done,
// and a daemon that is restarted.
//
// It starts no guests. Real libvirt is tested in test/libvirt.
package virttest
