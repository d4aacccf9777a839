#!/bin/sh
# build.sh [VERSION [FOLDER]]: make FOLDER/gpuguest_VERSION_ARCH.deb, for VMs: the
# agent, its unit and the applications' OpenCL library. Equal sources give equal
# packages; SOURCE_DATE_EPOCH is the last commit's time unless it is set.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/packaging/deb
stamp=$(git -C "$root" log -1 --format=%ct 2>/dev/null) || stamp=0
: "${SOURCE_DATE_EPOCH:=$stamp}"
export SOURCE_DATE_EPOCH
version=${1:-0~$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y%m%d%H%M%S)}
out=${2:-$root/bin}
arch=$(dpkg --print-architecture)
case $version in
[0-9]*) ;;
*) echo "build.sh: version $version does not begin with a digit" >&2 && exit 2 ;;
esac
umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
mkdir -p "$tree/DEBIAN" "$out"

put() { # put MODE FROM TO
	mkdir -p "$tree/$(dirname "$3")"
	cp "$2" "$tree/$3"
	chmod "$1" "$tree/$3"
}

cd "$root"
CGO_ENABLED=1 "${GO:-go}" build -trimpath -buildvcs=false -ldflags="-s -w -buildid= -linkmode=external -extldflags=-Wl,--build-id=none" -o "$work/gpuguest" ./cmd/gpuguest
guest/opencl/icd/build.sh "$work/libgpuctl-opencl.so" -g0 -ffile-prefix-map="$root=." -Wl,--build-id=none -Wl,-s
put 755 "$work/gpuguest" usr/bin/gpuguest
put 644 "$work/libgpuctl-opencl.so" usr/lib/gpuctl/libgpuctl-opencl.so
put 644 "$here/gpuguest.service" lib/systemd/system/gpuguest.service
put 644 "$here/gpuctl-sessions.service" lib/systemd/system/gpuctl-sessions.service
put 644 "$here/gpuguest.yaml" etc/gpuctl/gpuguest.yaml
echo /usr/lib/gpuctl/libgpuctl-opencl.so > "$work/icd"
put 644 "$work/icd" etc/OpenCL/vendors/gpuctl.icd
mkdir -p "$tree/etc/gpuctl/profiles.d"
gzip -9n < "$here/gpuguest.8" > "$work/man"
put 644 "$work/man" usr/share/man/man8/gpuguest.8.gz
for script in postinst prerm postrm; do
	put 755 "$here/$script" "DEBIAN/$script"
done

# What the two need of the C library.
mkdir "$work/debian"
: > "$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O gpuguest libgpuctl-opencl.so 2>/dev/null | sed -n 's/^shlibs:Depends=//p')
cat > "$tree/DEBIAN/control" <<END
Package: gpuguest
Version: $version
Architecture: $arch
Maintainer: gpuctl maintainers <maintainers@gpuctl.invalid>
Section: admin
Priority: optional
Depends: ${depends:-libc6}, systemd, ocl-icd-libopencl1 | libopencl1
Installed-Size: $(du -k -s --apparent-size --exclude=DEBIAN "$tree" | cut -f1)
Description: GPUs that can be swapped under applications, for VMs
 The agent of gpuctl in a virtual machine. It serves the OpenCL applications of
 the VM with the GPU that the host has plugged in, and lets the host take it out
 and plug in another, also on another host, while they run.
END
printf '%s\n' /etc/OpenCL/vendors/gpuctl.icd /etc/gpuctl/gpuguest.yaml > "$tree/DEBIAN/conffiles"
(cd "$tree" && find . -path ./DEBIAN -prune -o -type f -print | LC_ALL=C sort | sed 's,^\./,,' | xargs md5sum) > "$tree/DEBIAN/md5sums"
find "$tree" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
deb=$out/gpuguest_${version}_$arch.deb
dpkg-deb --root-owner-group --threads-max=1 -Zxz --build "$tree" "$deb.new" > /dev/null 2>&1 ||
	dpkg-deb --root-owner-group -Zxz --build "$tree" "$deb.new" > /dev/null
mv "$deb.new" "$deb"
echo "$deb"
