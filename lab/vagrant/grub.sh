#!/bin/bash
# grub.sh: let the machine that provision.sh configured boot Xen from its own
# boot loader. Under `make lab-up` QEMU loads Xen itself, and this is not run.
set -eu
cat >/etc/default/grub.d/gpuctl-lab.cfg <<'G'
GRUB_CMDLINE_XEN="dom0_mem=1536M,max:1536M dom0_max_vcpus=1 iommu=verbose,no-sharept"
GRUB_CMDLINE_LINUX_XEN_REPLACE="console=hvc0 modprobe.blacklist=bochs modprobe.blacklist=virtio_gpu"
GRUB_TIMEOUT=1
G
# Entries of Xen come after those of Linux; make them the first.
[ ! -e /etc/grub.d/20_linux_xen ] || dpkg-divert --local --rename --divert /etc/grub.d/08_linux_xen /etc/grub.d/20_linux_xen
update-grub
