#!/bin/sh
# build.sh [--replay] OUT: the fuzz target for what a connection takes from the other end (test/fuzzc.sh).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/../../../test/fuzzc.sh" "$@" "$here"/testdata/stream.c
