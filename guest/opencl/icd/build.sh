#!/bin/sh
# build.sh OUT.so [extra gcc flags]: compile the application-side OpenCL library.
set -eu
out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$(dirname "$out")"
# nodelete: the callback thread and the application's handles outlive a dlclose.
exec "${CC:-gcc}" -std=gnu11 -O2 -g -fPIC -shared -fvisibility=hidden -Wall -Wextra -Werror \
	-Wl,-Bsymbolic -Wl,-z,nodelete -Wl,-z,relro -Wl,-z,now -Wl,-soname,libgpuctl-opencl.so \
	"$@" -o "$out" "$here"/*.c -pthread
