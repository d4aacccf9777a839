#!/bin/sh
# setup.sh: install what the lab needs on Debian 12; quick when everything is there.
set -eu
packages="qemu-system-x86 qemu-utils seabios debootstrap e2fsprogs cpio zstd lz4 squashfs-tools openssh-client"
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
