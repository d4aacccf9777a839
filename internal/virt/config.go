package virt

import (
	"io/fs"
	"strings"
)

// LockManager is what libvirt's driver on this machine has every VM locked by
// before it runs (lock_manager in its configuration), so that one that runs on
// another host, too, is not started or let go on. Empty: nothing does that.
func LockManager(root fs.FS, d Driver) string {
	name := map[Driver]string{Xen: "etc/libvirt/libxl.conf", QEMU: "etc/libvirt/qemu.conf"}[d]
	data, err := fs.ReadFile(root, name)
	if err != nil {
		return "" // then libvirt takes its default, which is none
	}
	manager := ""
	for line := range strings.Lines(string(data)) {
		line, _, _ = strings.Cut(line, "#")
		key, value, ok := strings.Cut(line, "=")
		if ok && strings.TrimSpace(key) == "lock_manager" {
			manager = strings.Trim(strings.TrimSpace(value), `"'`)
		}
	}
	if manager == "nop" {
		return ""
	}
	return manager
}
