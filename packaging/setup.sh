#!/bin/sh
# setup.sh [packages]: install what building, tests and demo need on Debian 12; quick when everything is there.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
packages="build-essential git pkg-config curl unzip ca-certificates librdmacm-dev libibverbs-dev ocl-icd-opencl-dev opencl-headers pocl-opencl-icd oclgrind
x264 ffmpeg clinfo clpeak clblast-tests protobuf-compiler iproute2 util-linux clang-15
libvirt-daemon-system libvirt-daemon libvirt-daemon-driver-qemu qemu-system-x86 $*"
missing=
for p in $packages; do
	[ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing="$missing $p"
done
if [ -n "$missing" ]; then
	echo "installing$missing"
	sudo=
	[ "$(id -u)" = 0 ] || sudo=sudo
	$sudo apt-get update -q
	# shellcheck disable=SC2086 # a list of words
	$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
fi
# A Go older than go.mod asks for will not do, whatever it could fetch by itself.
want=$(sed -n 's/^go \([0-9.]*\).*/\1/p' "$root/go.mod")
have=$(go env GOVERSION 2>/dev/null | sed -n 's/^go\([0-9.]*\).*/\1/p') || have=
if [ -z "$have" ] || [ "$(printf '%s\n%s\n' "$want" "$have" | sort -V | tail -1)" != "$have" ]; then
	"$root/packaging/get-go.sh" "${GODIR:-$root/.cache/go}"
fi
