#!/bin/bash
# base.sh OUT: make OUT, the read-only root of the lab's guests that compute: a
# small Debian 12 with two OpenCL runtimes for processors, and no gpuctl. It
# needs root. GPUCTL_LAB_MIRROR names another mirror than Debian's own.
set -eu
out=$1 tree=$1.tree
if mountpoint -q "$tree/proc"; then # of a build that was killed
	umount "$tree/proc"
fi
rm -rf "$tree" "$out.part"
mkdir -p "$(dirname "$out")"
echo "Debian"
debootstrap --variant=minbase bookworm "$tree" ${GPUCTL_LAB_MIRROR:+"$GPUCTL_LAB_MIRROR"}
echo "packages"
printf '#!/bin/sh\nexit 101\n' >"$tree/usr/sbin/policy-rc.d"
chmod 755 "$tree/usr/sbin/policy-rc.d"
mount -t proc proc "$tree/proc"
trap 'umount "$tree/proc"' EXIT
DEBIAN_FRONTEND=noninteractive LC_ALL=C chroot "$tree" apt-get install -y -q --no-install-recommends \
	pocl-opencl-icd oclgrind ocl-icd-libopencl1 procps
umount "$tree/proc"
trap - EXIT

echo "configuration"
rm -f "$tree/usr/sbin/policy-rc.d"
# Programs find gpuctl and nothing else, so that none computes past it unasked.
rm -f "$tree"/etc/OpenCL/vendors/*
echo guest >"$tree/etc/hostname"
printf '127.0.0.1 localhost guest\n' >"$tree/etc/hosts"
rm -rf "$tree"/var/cache/apt/* "$tree"/var/lib/apt/lists/* "$tree"/usr/share/{doc,man,locale,zoneinfo,info,i18n}/* \
	"$tree"/usr/lib/x86_64-linux-gnu/{gconv,perl*}/* "$tree"/var/log/*
# PoCL's library for processors that the guests don't have, and what only
# compilers of other programs need. PoCL links with ld, by way of clang.
rm -rf "$tree"/usr/share/pocl/*-avx*.bc "$tree"/usr/lib/x86_64-linux-gnu/lib{a,l,t,ub}san.* "$tree"/usr/lib/llvm-*/lib/libPolly* \
	"$tree"/usr/lib/llvm-*/lib/LLVMPolly.so "$tree"/usr/lib/llvm-*/lib/clang/*/lib/linux/* "$tree"/usr/lib/x86_64-linux-gnu/lib{c,m-*,mvec}.a \
	"$tree"/usr/lib/gcc/x86_64-linux-gnu/*/libstdc++.a "$tree"/usr/include/{c++,linux}
# A block is read and unpacked whole: small ones suit an emulated processor.
mksquashfs "$tree" "$out.part" -comp zstd -Xcompression-level 9 -b 64K -noappend -no-progress -quiet -e proc/* sys/* dev/* run/* tmp/*
rm -rf --one-file-system "$tree"
mv "$out.part" "$out"
