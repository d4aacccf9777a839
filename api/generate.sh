#!/bin/sh
# Regenerates the Go code of the protobuf API. Run by `make generate`.
set -eu
cd "$(dirname "$0")"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
GOBIN="$bin" go install google.golang.org/protobuf/cmd/protoc-gen-go connectrpc.com/connect/cmd/protoc-gen-connect-go
PATH="$bin:$PATH" protoc -I . --go_out=. --go_opt=module=github.com/gpuctl/gpuctl/api \
	--connect-go_out=. --connect-go_opt=module=github.com/gpuctl/gpuctl/api gpuctl/v1/*.proto gpuctl/cluster/v1/*.proto
