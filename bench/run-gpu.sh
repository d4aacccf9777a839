#!/bin/sh
# run-gpu.sh --only cuda [flags of test/cuda/gpu/run.py]: the engine driver beside NVIDIA's driver alone. It needs python3 with
# PyTorch, bin/gpuguest and test/cuda/bin; for its part llama also programs/llama, with the libraries of a build of llama.cpp
# for CUDA (libllama*.so, libggml*.so) that the machine's driver serves.
# run-gpu.sh [flags of bench]: the bench on a GPU machine that has no Go toolchain and no network. It expects bin/, lib/ and
# test/cl/bin/ as `make build` leaves them, an OpenCL loader and the vendor's driver. Programs that it measures, like clpeak,
# hashcat and clblast_test_xgemm, may lie in the folder programs/ with the libraries that the machine does not have.
set -eu
cd "$(dirname "$0")/.."
case " $* " in
*" --only cuda "*)
	for f in bin/gpuguest test/cuda/bin/cudaloop; do
		[ -e "$f" ] || { echo "run-gpu.sh: $f is missing: run make build first" >&2; exit 1; }
	done
	shift 2
	exec python3 test/cuda/gpu/run.py "$@"
	;;
esac
for f in bin/gpuctl bin/hostd bin/gpuguest bin/gpuctl-bench lib/libgpuctl-opencl.so test/cl/bin/stream; do
	[ -e "$f" ] || { echo "run-gpu.sh: $f is missing: run make build first" >&2; exit 1; }
done
# A driver that no .icd file names is named here; other runtimes may have theirs.
if ! grep -qs nvidia /etc/OpenCL/vendors/*.icd; then
	lib=$(ldconfig -p | sed -n 's/.*=> \(.*libnvidia-opencl\.so\.1\)$/\1/p' | head -1)
	[ -n "$lib" ] || lib=$(find /usr/local/nvidia /usr/lib -name 'libnvidia-opencl.so.1' 2>/dev/null | head -1)
	if [ -n "$lib" ]; then
		set -- --nvidia "$lib" "$@"
	elif ! ls /etc/OpenCL/vendors/*.icd >/dev/null 2>&1; then
		echo "run-gpu.sh: no OpenCL driver found" >&2
		exit 1
	else
		echo "run-gpu.sh: no driver of NVIDIA's found: what follows measures no GPU of theirs" >&2
	fi
fi
if [ -d programs ]; then
	PATH=$PWD/programs:$PATH
	LD_LIBRARY_PATH=$PWD/programs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
	export PATH LD_LIBRARY_PATH
fi
GPUCTL_ROOT=$PWD exec bin/gpuctl-bench "$@"
