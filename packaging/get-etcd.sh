#!/bin/sh
# get-etcd.sh DIR: unpack Debian's etcd below DIR, for the benchmarks to compare with. It is not installed: that would
# start a service.
set -eu
dir=${1:?usage: get-etcd.sh DIR}
command -v etcd >/dev/null && exit 0
[ -x "$dir/usr/bin/etcd" ] && exit 0
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
chmod 755 "$tmp"
(cd "$tmp" && apt-get -q -o APT::Sandbox::User=root download etcd-server)
mkdir -p "$dir"
dpkg-deb -x "$tmp"/etcd-server_*.deb "$dir"
"$dir/usr/bin/etcd" --version
