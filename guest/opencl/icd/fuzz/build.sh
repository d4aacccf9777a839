#!/bin/sh
# build.sh [--replay] OUT: the fuzz target for what the library takes from its executor (test/fuzzc.sh).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/../../../../test/fuzzc.sh" "$@" -Wl,--wrap=syscall -Wl,--wrap=gx_connect -Wl,--wrap=pthread_create "$here"/testdata/replies.c "$here"/../*.c -pthread
