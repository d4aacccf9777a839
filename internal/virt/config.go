package virt

import (
	"io/fs"
	"strings"
)

// LockManager returns the lock manager that libvirt's driver on this host is configured
// with (lock_manager in its configuration). It prevents a VM that runs on another host
// from being started or resumed here. Empty: none.
func LockManager(root fs.FS, d Driver) string {
	name := map[Driver]string{Xen: "etc/libvirt/libxl.conf", QEMU: "etc/libvirt/qemu.conf"}[d]
	data, err := fs.ReadFile(root, name)
	if err != nil {
		return "" // libvirt's default is none
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
