#!/bin/sh
# get-go.sh DIR: put the Go toolchain that go.mod asks for into DIR, the way the go command itself does: as the module
# golang.org/toolchain of the module proxy. The proxy is the first of $GOPROXY, else the go command's own default.
set -eu
dir=${1:?usage: get-go.sh DIR}
root=$(cd "$(dirname "$0")/.." && pwd)
version=$(sed -n 's/^go \([0-9.]*\).*/\1/p' "$root/go.mod")
case $(uname -m) in
x86_64) arch=amd64 ;;
aarch64) arch=arm64 ;;
*) echo "get-go.sh: no toolchain for $(uname -m)" >&2; exit 1 ;;
esac
[ -x "$dir/bin/go" ] && [ "$("$dir/bin/go" env GOVERSION)" = "go$version" ] && exit 0
list=${GOPROXY:-}
if [ -z "$list" ]; then
	# Debian's own go command, too old to build with, knows the default. Not
	# asked in this folder: it can't read our go.mod.
	command -v go >/dev/null || apt-get install -y --no-install-recommends golang-go >/dev/null
	list=$(cd / && go env GOPROXY)
fi
proxy=$(printf %s "$list" | tr '|' ',' | cut -d, -f1)
case $proxy in
http://* | https://*) ;;
*) echo "get-go.sh: GOPROXY=$list names no proxy first" >&2; exit 1 ;;
esac
name=golang.org/toolchain@v0.0.1-go$version.linux-$arch
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
echo "fetching Go $version"
curl -fsSL --retry 3 -o "$tmp/go.zip" "${proxy%/}/golang.org/toolchain/@v/v0.0.1-go$version.linux-$arch.zip"
unzip -q "$tmp/go.zip" -d "$tmp"
chmod -R u+w "$tmp/$name"
find "$tmp/$name/bin" "$tmp/$name/pkg/tool" -type f -exec chmod +x {} +
mkdir -p "$(dirname "$dir")"
rm -rf "$dir"
mv "$tmp/$name" "$dir"
"$dir/bin/go" version
