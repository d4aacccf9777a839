package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// kvmName is the host without Xen.
const kvmName = "kvma"

// newKVM is beside the two hosts of the instance, and on no network with them.
func (l *Lab) newKVM() *Host {
	dir := filepath.Join(l.run, kvmName)
	return &Host{Name: kvmName, Address: "10.77.0.3", lab: l, index: 2, kvm: true, dir: dir, group: "gpuctl-" + filepath.Base(l.run) + "-" + kvmName}
}

// kvmArguments are QEMU's for a host that boots Linux alone. Its KVM runs VMs by the processor's
// virtualization, which QEMU emulates as it does for Xen.
func (h *Host) kvmArguments(img image, port int) []string {
	args := append(h.machine(port), "-smp", "2", "-m", "2560",
		"-device", "intel-iommu,intremap=on,device-iotlb=on",
		"-kernel", img.path("vmlinuz"), "-initrd", img.path("initrd.img"), "-append", "console=ttyS0 intel_iommu=on "+h.commandLine(),
		"-netdev", "hubport,id=lan,hubid=0")
	return append(append(args, h.devices()...), cardArgs()...)
}

// KVM boots a host without Xen, a minute or two: its VMs are KVM's, by libvirt's qemu driver. With keep, one
// that is up already is returned as it is. Down ends it.
func (l *Lab) KVM(ctx context.Context, keep bool) (*Host, error) {
	unlock, err := l.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	h := l.kvm
	if keep && h.Alive() {
		return h, nil
	}
	if h.Alive() {
		return nil, fmt.Errorf("lab: %s is up already; `lab down` ends it", h.Name)
	}
	unlockCache, err := l.lockCache(ctx)
	if err != nil {
		return nil, err
	}
	img, err := l.build(ctx)
	unlockCache()
	if err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	if err := os.MkdirAll(h.dir, 0o755); err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	if err := h.coldBoot(ctx, img); err != nil {
		return nil, fmt.Errorf("%s: %w", h.Name, err)
	}
	if err := h.resume(ctx); err != nil {
		return nil, fmt.Errorf("%s: %w", h.Name, err)
	}
	return h, nil
}
