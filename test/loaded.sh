#!/bin/sh
# loaded.sh COMMAND…: run a command beside two busy loops per core.
set -eu
loops=
trap 'kill $loops' EXIT
trap 'exit 130' INT TERM
for _ in $(seq $((2 * $(nproc)))); do
	sh -c 'while :; do :; done' &
	loops="$loops $!"
done
"$@"
