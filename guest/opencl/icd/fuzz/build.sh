#!/bin/sh
# build.sh OUT [extra clang flags]: the fuzz target for what the library takes from its executor.
# build.sh --replay OUT: the same as a program that plays files, with any compiler.
set -eu
sanitize=address,undefined,fuzzer
clang=$(command -v clang || command -v clang-15 || command -v clang-14 || true)
if [ "$1" = --replay ]; then
	shift
	sanitize=address,undefined
	clang="${CC:-cc} -DREPLAY"
elif [ -z "$clang" ]; then
	echo "the fuzz target needs clang: packaging/setup.sh" >&2
	exit 1
fi
out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$(dirname "$out")"
# shellcheck disable=SC2086 # the compiler may have a flag
exec $clang -std=gnu11 -O1 -g -fsanitize=$sanitize -fno-sanitize-recover=undefined -fno-sanitize=alignment,pointer-overflow -Wall -Wextra \
	-Wl,--wrap=syscall -Wl,--wrap=gx_connect -Wl,--wrap=pthread_create "$@" -o "$out" "$here"/testdata/replies.c "$here"/../*.c -pthread
