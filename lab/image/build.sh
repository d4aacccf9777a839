#!/bin/bash
# build.sh TREE GUESTINIT OUT: configure the Debian that base.sh made in TREE and
# make of it what QEMU boots in OUT: root.img, xen, vmlinuz, initrd.img, the key
# that opens its root account and the host's public key. It needs root.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tree=$1 init=$2 out=$3

echo "configuration"
"$here/inside.sh" "$tree" configure

echo "guests"
guest=$tree/opt/lab/guest
version=$(ls "$guest/kernel/lib/modules")
cp "$guest/kernel/boot/vmlinuz-$version" "$guest/vmlinuz"
"$here/vmlinux.sh" "$guest/vmlinuz" "$guest/vmlinux"
[ -e "$guest/kernel/lib/modules/$version/modules.dep" ] || chroot "$tree" depmod -b /opt/lab/guest/kernel "$version"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# initrd OUT MODULE…: what a guest begins with.
initrd() {
	local out=$1
	shift
	rm -rf "${work:?}"/*
	mkdir -p "$work"/{bin,dev,proc,sys,run,tmp,etc,lib/modules,mnt}
	install -m 755 "$init" "$work/init"
	install -m 755 "$tree/bin/busybox" "$work/bin/busybox"
	for m in "$@" squashfs overlay loop; do
		chroot "$tree" modprobe -d /opt/lab/guest/kernel -S "$version" --show-depends "$m"
	done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$0]++' | while read -r ko; do
		cp "$tree$ko" "$work/lib/modules/"
		basename "$ko" >>"$work/lib/modules/order"
	done
	# The firmware reads it byte by byte through emulated ports: the smaller the better.
	(cd "$work" && find . | sort | cpio --quiet -o -H newc -R 0:0 | gzip -9) >"$guest/$out"
}
initrd initrd.img xen-blkfront xen-netfront xen-evtchn xen-gntdev xen-gntalloc xen-privcmd xenfs uio_pci_generic
initrd initrd-kvm.img virtio_pci virtio_blk virtio_console vmw_vsock_virtio_transport

echo "file system"
rm -rf "$out.part"
mkdir -p "$out.part"
ssh-keygen -q -t ed25519 -N '' -C gpuctl-lab -f "$out.part/key"
install -d -m 700 "$tree/root/.ssh"
install -m 600 "$out.part/key.pub" "$tree/root/.ssh/authorized_keys"
rm -f "$tree"/etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -C lab -f "$tree/etc/ssh/ssh_host_ed25519_key"
cp "$tree/etc/ssh/ssh_host_ed25519_key.pub" "$out.part/host.pub"
: >"$tree/etc/machine-id" # each host gets its own from its command line
gunzip -c "$tree"/boot/xen-4.17-amd64.gz >"$out.part/xen"
cp "$tree"/boot/vmlinuz-* "$out.part/vmlinuz"
cp "$tree"/boot/initrd.img-* "$out.part/initrd.img"
mkfs.ext4 -q -F -E lazy_itable_init=0 -d "$tree" "$out.part/root.img" 4096M
[ -z "${SUDO_UID:-}" ] || chown -R "$SUDO_UID:${SUDO_GID:-}" "$out.part"
mv "$out.part" "$out"
