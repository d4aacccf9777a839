#!/bin/bash
# older.sh FOLDER COMMIT MEMORY...: swaps, failed ones among them, kills and random programs with executors and far executors of an earlier
# release beside those of this one, by turns within each session, under the application's library of this release and
# then of the earlier one. So it is while hosts are upgraded one after the other and applications run on. What has been
# mended since may fail in the earlier release's executors: that is for the reader to tell.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(git -c safe.directory='*' rev-parse --verify "$2^{commit}") folder=$1/${commit:0:12}
shift 2
if [ ! -e "$folder/complete" ]; then
	rm -rf "$folder"
	mkdir -p "$folder/src"
	git -c safe.directory='*' archive "$commit" | tar -x -C "$folder/src"
	(cd "$folder/src" && CGO_ENABLED=1 go build -trimpath -buildvcs=false -o ../bin/gpuguest ./cmd/gpuguest)
	"$folder/src/guest/opencl/icd/build.sh" "$folder/lib/libgpuctl-opencl.so"
	rm -rf "$folder/src"
	touch "$folder/complete"
fi
folder=$(cd "$folder" && pwd)
failed=0
for memory; do
	for release in . "$folder"; do
		for run in 'e2e ^Test(SwapPairs|SwapBackAndForth|SuspendResume|ExecutorKilled|GpuguestKilled|FailedSwapsDoNotShow)$' \
			'property ^TestSwapsDoNotShow$'; do
			read -r test names <<<"$run"
			echo "== $test $names, $memory memory, library of $(basename "$(realpath "$release")")"
			GPUCTL_TEST_MEMORY=$memory GPUCTL_TEST_CARRIER=older GPUCTL_TEST_OLDER=$folder/bin/gpuguest \
				GPUCTL_ICD=$(realpath "$release")/lib/libgpuctl-opencl.so \
				go test -count=1 -timeout 30m -v -run "$names" "./test/$test" || failed=1
		done
	done
done
exit $failed
