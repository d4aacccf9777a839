package virt

import (
	"testing"
	"testing/fstest"
)

func TestLockManager(t *testing.T) {
	for text, want := range map[string]string{
		"":                                    "",
		"#lock_manager = \"lockd\"\n":         "",
		"lock_manager = \"lockd\"\n":          "lockd",
		"  lock_manager='sanlock' # shared\n": "sanlock",
		"lock_manager = \"nop\"\n":            "",
		"lock_manager_x = \"lockd\"\nautoballoon = \"auto\"\n": "",
	} {
		for driver, path := range map[Driver]string{Xen: "etc/libvirt/libxl.conf", QEMU: "etc/libvirt/qemu.conf"} {
			if got := LockManager(fstest.MapFS{path: {Data: []byte(text)}}, driver); got != want {
				t.Errorf("%s %q: %q, not %q", driver, text, got, want)
			}
		}
	}
	if got := LockManager(fstest.MapFS{}, Xen); got != "" {
		t.Error(got)
	}
}
