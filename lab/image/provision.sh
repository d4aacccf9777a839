#!/bin/bash
# provision.sh packages|configure|all: make a Xen host of the lab of the Debian
# 12 it runs in: a chroot that debootstrap made (build.sh), or a Vagrant
# machine. It can run again. Files beside it in root/ go to / as they are.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export DEBIAN_FRONTEND=noninteractive LC_ALL=C

base="ca-certificates systemd systemd-sysv udev dbus iproute2 kmod pciutils socat procps busybox-static cpio
initramfs-tools openssh-server openssh-client iputils-ping zstd netcat-openbsd bridge-utils python3-minimal nfs-kernel-server
rdma-core ibverbs-providers librdmacm1"
xen="linux-image-amd64 xen-system-amd64 xen-utils-4.17 qemu-system-xen
libvirt-daemon-system libvirt-daemon libvirt-daemon-driver-xen libvirt-clients"
kvm=qemu-system-x86 # libvirt-daemon has the driver
guest=linux-image-cloud-amd64 # small, but without a dom0's side of Xen

packages() {
	# Nothing that is installed starts before the machine has booted under Xen.
	policy=/usr/sbin/policy-rc.d
	if [ ! -e $policy ]; then
		printf '#!/bin/sh\nexit 101\n' >$policy
		chmod 755 $policy
		trap 'rm -f $policy' EXIT
	fi
	# The initramfs holds what the root needs and no more; said first, so that
	# it is made once.
	mkdir -p /etc/initramfs-tools/conf.d
	printf 'MODULES=list\nCOMPRESS=zstd\n' >/etc/initramfs-tools/conf.d/gpuctl-lab
	printf 'virtio_pci\nvirtio_blk\nvirtio_scsi\nsd_mod\next4\n' >/etc/initramfs-tools/modules
	apt-get update -q
	# shellcheck disable=SC2086 # lists of words
	apt-get install -y -q --no-install-recommends $base $xen $kvm
	# The guests' kernel is unpacked only: it is not to become this machine's.
	cloud=$(apt-cache depends --important $guest | sed -n 's/^ *Depends: \(linux-image-.*-cloud-amd64\)$/\1/p' | head -1)
	work=$(mktemp -d /var/tmp/guest-kernel.XXXXXX)
	chown _apt "$work"
	(cd "$work" && apt-get download -q "$cloud" && dpkg-deb -x ./*.deb tree)
	rm -rf /opt/lab/guest/kernel
	mkdir -p /opt/lab/guest
	mv "$work/tree" /opt/lab/guest/kernel
	rm -rf "$work"
}

configure() {
	cp -R --no-preserve=ownership "$here/root/." /
	systemctl enable libvirtd.service libvirtd-tcp.socket lab-host.service ssh.service
	systemctl disable libvirt-guests.service xendomains.service nfs-server.service nfs-client.target rpcbind.service rpcbind.socket || true
	# What guests print is kept in /var/log/xen/console.
	grep -q '^XENCONSOLED_ARGS=' /etc/default/xen || echo 'XENCONSOLED_ARGS="--log=guest"' >>/etc/default/xen
	mkdir -p /var/log/xen/console
	# libvirt's default network and what runs by the clock only cost time here.
	rm -f /etc/libvirt/qemu/networks/autostart/default.xml
	systemctl mask apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer e2scrub_reap.service \
		fstrim.timer dpkg-db-backup.timer systemd-timesyncd.service
}

case ${1:-all} in
packages) packages ;;
configure) configure ;;
all) packages && configure ;;
*)
	echo "usage: provision.sh packages|configure|all" >&2
	exit 2
	;;
esac
