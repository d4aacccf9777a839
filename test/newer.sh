#!/bin/bash
# newer.sh FOLDER CHAOSTIME MEMORY...: conformance, random programs and chaos through gpuctl with the OpenCL runtimes of Debian 13, in
# a system of their own in FOLDER. FOLDER has the test programs. Runtimes change what they are called, how they wait
# and what they forgive: PoCL computed wrong results after it had renamed a device. In the
# memory called mesa, one of the GPUs is of another runtime, which Debian 12 has only an early version of.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"
folder=$(cd "$1" && pwd) chaos=$2
shift 2
[ "$(id -u)" = 0 ] || { echo "newer.sh: it makes a system of its own: run it as root" >&2; exit 1; }
if [ ! -e "$folder/complete" ]; then
	command -v debootstrap >/dev/null || apt-get install -y -q debootstrap >"$folder/install.log" 2>&1
	rm -rf "$folder/system"
	debootstrap --variant=minbase --include=pocl-opencl-icd,mesa-opencl-icd,ocl-icd-libopencl1 trixie "$folder/system" >>"$folder/install.log" 2>&1 ||
		{ tail -5 "$folder/install.log" >&2; exit 1; }
	touch "$folder/complete"
fi
# What it mounts is gone when it ends.
inside() {
	unshare --mount bash -euc '
		system=$1 tests=$2 root=$3; shift 3
		mkdir -p "$system/src" "$system/tests"
		mount --bind "$root" "$system/src"
		mount --bind "$tests" "$system/tests"
		mount -t proc proc "$system/proc"
		mount --rbind /dev "$system/dev"
		mount --rbind /sys "$system/sys"
		mount -t tmpfs tmpfs "$system/tmp"
		exec chroot "$system" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root GPUCTL_ROOT=/src "$@"' - "$folder/system" "$folder" "$PWD" "$@"
}
failed=0
for memory; do
	# With every transfer in a lane, the library is built anew, for which the system has no compiler.
	for run in 'e2e -test.run ^TestConform$/gpuctl' 'property -test.skip ^TestSwapsDoNotShowWithEveryTransferInALane' 'e2e -test.run ^TestChaos'; do
		read -r test args <<<"$run"
		echo "== $test ${args#-test.}, $memory memory"
		log=$folder/$memory.$(tr -dc A-Za-z <<<"${args##*^}").log
		inside GPUCTL_TEST_MEMORY="$memory" GPUCTL_CHAOS="$chaos" bash -c "cd /src/test/$test && exec /tests/$test.test -test.v -test.timeout 24h $args" >"$log" 2>&1 ||
			{ failed=1; grep -E 'FAIL|BAD|panic:' "$log" | head -30; tail -30 "$log"; }
		grep -E '^(--- |ok|PASS|FAIL)|cases, ' "$log" || true
	done
done
exit $failed
