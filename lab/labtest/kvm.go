package labtest

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/lab"
)

// StartKVM returns a host without Xen, as Start does those with Xen.
func StartKVM(t testing.TB) (*lab.Lab, *lab.Host) {
	t.Helper()
	l := open(t)
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	keep := os.Getenv("GPUCTL_LAB_KEEP") == "1"
	t.Cleanup(func() {
		if !keep {
			if err := l.Down(context.Background()); err != nil {
				t.Error(err)
			}
		}
		l.Close()
	})
	h, err := l.KVM(ctx, keep)
	if err != nil {
		t.Fatal(err)
	}
	return l, h
}

// kvmXML returns the domain of libvirt's qemu driver. What it prints is in
// /var/log/libvirt/qemu/NAME-console.log.
func (g *Guest) kvmXML() string {
	return fmt.Sprintf(`<domain type='kvm'>
  <name>%[1]s</name>
  <uuid>%[2]s</uuid>
  <memory unit='MiB'>%[3]d</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>%[4]s</kernel>
    <initrd>%[5]s</initrd>
    <cmdline>console=ttyS0 loglevel=5 nokaslr panic=1%[6]s</cmdline>
  </os>
  <features><acpi/><apic/></features>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <serial type='file'><source path='/var/log/libvirt/qemu/%[1]s-console.log'/></serial>
    <vsock model='virtio'><cid auto='yes'/></vsock>
    <memballoon model='none'/>
%[7]s%[8]s  </devices>
</domain>
`, g.Name, g.uuid, g.MemoryMiB, g.Kernel, g.Initrd, prefixed(" ", g.CommandLine), virtioChannel(g.channel(), "lab"), prefixed("    ", g.Extra))
}

// virtioChannel is the element of a virtio-serial port.
func virtioChannel(path, name string) string {
	return fmt.Sprintf("    <channel type='unix'><source mode='bind' path='%s'/><target type='virtio' name='%s'/></channel>\n", path, name)
}
