// Package install puts gpuctl's hook where libvirt looks for it,
// etc/libvirt/hooks/DRIVER.d/50-gpuctl below a root, takes it away, and says
// how things stand. What the hook does is in internal/hook/dropin.
//
// libvirt looks for hooks when it starts, and calls none for a driver that had
// none then. Later it reads the folder for every call. So the first hook of a
// driver wants a restart of libvirtd, and a new version of it does not. The
// file's time of change is that of its first installation, which an update
// keeps: what began before it does not know the hook.
//
// A file of that name which is not ours is never touched. Other hooks of the
// operator run beside ours, in the order of their names, the script
// etc/libvirt/hooks/DRIVER first.
package install
