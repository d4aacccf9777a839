// Package install installs gpuctl's hook for libvirt,
// etc/libvirt/hooks/DRIVER.d/50-gpuctl below a root, removes it, and reports its status.
// What the hook does is in internal/hook/dropin.
//
// libvirt looks for hooks when it starts. If a driver has none then, it never calls one
// for that driver. Otherwise it reads the folder for each call. So after the first hook
// of a driver is installed, libvirtd must be restarted; after an update it need not. The
// file's modification time is that of its first installation; an update keeps it. A
// daemon that was started before that time does not know the hook.
//
// A file with that name that is not ours is never changed. The operator's other hooks
// run, too, in the order of their names, and the script etc/libvirt/hooks/DRIVER first.
package install
