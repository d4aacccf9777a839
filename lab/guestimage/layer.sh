#!/bin/bash
# layer.sh OUT: make OUT, the squashfs that goes over the one of base.sh:
# gpuguest out of its package, programs that use OpenCL, and what stands for
# systemd.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=$1
umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
deb=$("$root/packaging/deb/build.sh" "" "$work")
dpkg-deb -x "$deb" "$tree"
mv "$tree/lib" "$work/lib" # /lib is a link to /usr/lib in Debian
cp -a "$work/lib/." "$tree/usr/lib/"
# The emulated cards of the lab stand for GPUs.
sed -i 's/^emulatedDevices:.*/emulatedDevices: true/' "$tree/etc/gpuctl/gpuguest.yaml"
grep -q '^emulatedDevices: true$' "$tree/etc/gpuctl/gpuguest.yaml"
install -m 755 "$here/rc.sh" "$tree/etc/lab.rc"
make -s -C "$root/test/cl" bin/endure bin/stream
install -d "$tree/usr/local/bin"
install -m 755 "$root/test/cl/bin/endure" "$root/test/cl/bin/stream" "$tree/usr/local/bin/"
# The fake of NVIDIA's driver, in a folder that only programs which are told of it use.
make -s -C "$root/test/cuda"
install -m 755 "$root/test/cuda/bin/cudaloop" "$root/test/cuda/bin/fakecard" "$tree/usr/local/bin/"
install -d "$tree/usr/lib/fakecuda"
install -m 644 "$root"/test/cuda/bin/fake/lib*.so.1 "$tree/usr/lib/fakecuda/"
# OCL_ICD_VENDORS=/etc/lab/native leads programs to PoCL, past gpuctl.
install -d "$tree/etc/lab/native"
echo libpocl.so.2 >"$tree/etc/lab/native/pocl.icd"
mksquashfs "$tree" "$out.part" -comp zstd -Xcompression-level 3 -noappend -no-progress -quiet -all-root
mv "$out.part" "$out"
