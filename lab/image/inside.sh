#!/bin/bash
# inside.sh TREE WHAT: run `provision.sh WHAT` inside a Debian in TREE. It needs root.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tree=$1
if mountpoint -q "$tree/proc"; then # of a build that was killed
	umount "$tree/proc"
fi
rm -rf "$tree/var/tmp/lab"
mkdir -p "$tree/var/tmp/lab"
cp -R "$here/provision.sh" "$here/root" "$tree/var/tmp/lab/"
mount -t proc proc "$tree/proc"
trap 'umount "$tree/proc"' EXIT
chroot "$tree" /var/tmp/lab/provision.sh "$2"
rm -rf "$tree/var/tmp/lab"
