#!/bin/bash
# vmlinux.sh BZIMAGE OUT: unpack the ELF kernel of a bzImage, which a PVH guest
# boots without spending its time on decompression. Where the payload is says
# the boot protocol (Documentation/x86/boot.rst, payload_offset).
set -eu
number() { od -An -v -t "u$2" -j "$1" -N "$2" "$in" | tr -d ' '; }
in=$1
[ "$(dd if="$in" bs=1 skip=$((0x202)) count=4 status=none)" = HdrS ] || {
	echo "$in has no Linux boot header" >&2
	exit 1
}
start=$((($(number $((0x1f1)) 1) + 1) * 512 + $(number $((0x248)) 4)))
length=$(number $((0x24c)) 4)
payload() { tail -c +$((start + 1)) "$in" | head -c $((length - 4)); } # its last word is its size
case $(number $start 4) in
$((0x184c2102))) payload | lz4 -dc >"$2" ;;
$((0xfd2fb528))) payload | zstd -dcq >"$2" ;;
*)
	echo "$in is packed in a way that is not known here" >&2
	exit 1
	;;
esac
