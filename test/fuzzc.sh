#!/bin/sh
# fuzzc.sh OUT ARGUMENT…: build a fuzz target in C; the arguments are clang's.
# fuzzc.sh --replay OUT ARGUMENT…: the same as a program that plays files, with any compiler.
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
mkdir -p "$(dirname "$out")"
# shellcheck disable=SC2086 # the compiler may have a flag
exec $clang -std=gnu11 -O1 -g -fsanitize=$sanitize -fno-sanitize-recover=undefined -fno-sanitize=alignment,pointer-overflow -Wall -Wextra -o "$out" "$@"
