#!/bin/bash
# base.sh TREE: make a Debian with all packages of a lab host in TREE. It needs
# root. GPUCTL_LAB_MIRROR names another mirror than Debian's own.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tree=$1 part=$1.part
if mountpoint -q "$part/proc"; then
	umount "$part/proc"
fi
rm -rf "$part"
echo "Debian"
debootstrap --variant=minbase bookworm "$part" ${GPUCTL_LAB_MIRROR:+"$GPUCTL_LAB_MIRROR"}
echo "packages"
"$here/inside.sh" "$part" packages
rm -rf "$part"/var/cache/apt/*.bin "$part"/var/cache/apt/archives/*.deb "$part"/var/lib/apt/lists/* \
	"$part"/usr/share/doc/* "$part"/usr/share/man/* "$part"/usr/share/locale/*
mv "$part" "$tree"
