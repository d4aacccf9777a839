# gpuctl. From a bare Debian 12: `make demo` shows it, `make test` runs all tests; both install what they need.
SHELL := /bin/bash
# A toolchain that setup fetched comes first.
export PATH := $(CURDIR)/.cache/go/bin:$(PATH)
GO ?= go
PKGS = ./...
FUZZTIME ?= 10s
CHAOSTIME ?= 60s
SOAKTIME ?= 10m
# What a test that hangs may take, of each package. A busy machine needs more: make test LIMIT=60m
LIMIT ?= 30m
GODIRS = api bench cluster cmd demo docs guest hostd internal lab migrate mmio passthrough test
# The folder may be somebody else's, as in CI.
GIT = git -c safe.directory='*'
# Where git can tell, programs know their release or commit.
STAMP := $(shell git rev-parse HEAD >/dev/null 2>&1 && echo -buildvcs=true || echo -buildvcs=false)
GOLANGCI = github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.12.2

.DEFAULT_GOAL := build
.PHONY: bad-network setup build programs binaries deb test test-loaded beside modes mode-unified mode-discrete mode-mixed mode-cards mixed-beside cuda-e2e-beside mixed check unit conform e2e cuda-e2e hosts-e2e cluster-e2e libvirt-e2e property demo cluster-demo remote-demo cuda-demo mmio-demo mutate-mmio bench fuzz fuzz-c chaos chaos-newer chaos-cluster test-older soak-hostile soak-remote generate lint clean

setup:
	@packaging/setup.sh

build: setup binaries programs

# gpuguest loads vendors' libraries and needs cgo; the others are static.
binaries:
	@mkdir -p bin lib
	CGO_ENABLED=0 $(GO) build -trimpath $(STAMP) -o bin/gpuctl ./cmd/gpuctl
	CGO_ENABLED=0 $(GO) build -trimpath $(STAMP) -o bin/hostd ./cmd/hostd
	CGO_ENABLED=0 $(GO) build -trimpath $(STAMP) -ldflags='-s -w' -o bin/gpuctl-hook ./cmd/gpuctl-hook
	CGO_ENABLED=1 $(GO) build -trimpath $(STAMP) -o bin/gpuguest ./cmd/gpuguest
	CGO_ENABLED=1 CGO_CFLAGS="-O2 -g -w" $(GO) build -trimpath $(STAMP) -o bin/hostd-nvml ./cmd/hostd-nvml
	CGO_ENABLED=0 $(GO) build -trimpath $(STAMP) -o bin/gpuctl-bench ./bench
	CGO_ENABLED=0 $(GO) build -trimpath $(STAMP) -o bin/gpuctl-demo ./demo
	CGO_ENABLED=0 $(GO) build -trimpath $(STAMP) -o bin/gpuctl-cluster-demo ./demo/cluster
	CGO_ENABLED=0 $(GO) build -trimpath $(STAMP) -o bin/gpuctl-mmio-demo ./demo/mmio
	CGO_ENABLED=0 $(GO) build -trimpath $(STAMP) -o bin/gpuctl-cuda-demo ./demo/cuda
	guest/opencl/icd/build.sh lib/libgpuctl-opencl.so

# GPUs of other hosts over a network that loses packets and is cut. Root is needed.
bad-network:
	GPUCTL_TEST_BAD_NETWORK=1 $(GO) test -count=1 -timeout $(LIMIT) -run 'BadNetwork|NetworkIsGone' -v ./test/e2e

# Programs that check themselves compute on remote and local GPUs in turn, while the cable is pulled at random. As root.
soak-remote: SOAKTIME = 1h
soak-remote: build
	GPUCTL_SOAK_REMOTE=$(SOAKTIME) $(GO) test -count=1 -timeout 0 -run '^TestSoakRemote$$' -v ./test/e2e
	GPUCTL_SOAK_REMOTE=$(SOAKTIME) $(GO) test -count=1 -timeout 0 -run '^TestMappedRegionsGoAlong' -v ./test/property

# The package for VMs.
deb: build
	packaging/deb/build.sh

programs:
	@$(MAKE) --no-print-directory -C test/cl
	@$(MAKE) --no-print-directory -C test/cuda
	CGO_ENABLED=1 $(GO) build -trimpath -o bin/gpuguest-carried ./test/rig/carried

test: build check beside modes
	@echo "all tests passed"

# Those of hosts mostly wait, for elections, leases and guests that boot, and so do many unit tests.
beside:
	@$(MAKE) --no-print-directory -j2 unit hosts-e2e

hosts-e2e:
	@bad=0; for t in cluster-e2e libvirt-e2e; do $(MAKE) --no-print-directory $$t || bad=1; done; exit $$bad

# What swaps GPUs, on such as compute in the host's memory, and on such as have memory of their own, as cards have. "mixed" has both.
# They mostly wait for each other, so all run at the same time, each line with its mode before it.
MEMORY ?= unified discrete
modes:
	@$(MAKE) --no-print-directory -j4 $(addprefix mode-,$(MEMORY)) mixed-beside cuda-e2e-beside

IN_MODE = 2>&1 | sed -u 's/^/$@: /'
mode-unified mode-discrete mode-mixed mode-cards: mode-%:
	@set -o pipefail; { bad=0; for t in conform e2e property; do GPUCTL_TEST_MEMORY=$* $(MAKE) --no-print-directory $$t || bad=1; done; exit $$bad; } $(IN_MODE)

mixed-beside cuda-e2e-beside: %-beside:
	@set -o pipefail; $(MAKE) --no-print-directory $* $(IN_MODE)

# Swaps that fail, between a device of each kind.
mixed:
	GPUCTL_TEST_MEMORY=mixed GPUCTL_VERIFY=1 $(GO) test -count=1 -timeout $(LIMIT) -run '^TestFailedSwapsDoNotShow$$' -v ./test/e2e

# The suite beside two busy loops per core, ROUNDS times in a row.
ROUNDS ?= 3
test-loaded: build
	@set -e; for i in $$(seq $(ROUNDS)); do echo "== round $$i of $(ROUNDS)"; test/loaded.sh $(MAKE) test LIMIT=60m; done

# Functions have at most 100 lines, which is the linter's to say (funlen).
FILELINES = 800
check:
	@find $(GODIRS) \( -name '*.go' -o -name '*.[ch]' \) ! -name '*_gen.*' ! -name '*.pb.go' ! -name '*.connect.go' -print0 | xargs -0 \
		awk 'FNR > $(FILELINES) { print FILENAME ": more than $(FILELINES) lines"; bad = 1; nextfile } END { exit bad }'
	@test -z "$$(gofmt -l $(GODIRS))" || { gofmt -l $(GODIRS); exit 1; }
	$(GO) vet $(PKGS)

# Without the race detector: guest/cuda, which starts a process for each call of the driver, some thousands; and what computes for
# long in one goroutine. The detector makes both ten times slower.
ALONE = ./guest/cuda ./internal/timeshare ./mmio/mediate
# The end-to-end tests of sessions follow on their own: they need the machine to themselves.
# Most packages wait more than they compute. "make check" vets, and nobody debugs what is linked here.
AT_ONCE ?= $(shell echo $$((2 * $$(nproc))))
unit:
	CGO_ENABLED=1 $(GO) test -race -p $(AT_ONCE) -vet=off -ldflags=-w -timeout $(LIMIT) $$($(GO) list $(PKGS) | grep -v -e /test/e2e -e /test/property -e /test/cluster -e /test/libvirt -e /test/migrate $(patsubst ./%,-e '/%$$',$(ALONE)))
	CGO_ENABLED=1 $(GO) test -race -timeout $(LIMIT) -run VCPUs ./mmio/mediate
	$(GO) test -timeout $(LIMIT) $(ALONE)

conform:
	$(GO) test -count=1 -timeout $(LIMIT) -run '^TestConform' -v ./test/e2e

# Three real hosts.
cluster-e2e:
	$(GO) test -count=1 -timeout $(LIMIT) -v ./test/cluster

# Two real libvirtds in namespaces, with guests of qemu.
libvirt-e2e:
	$(GO) test -count=1 -p 1 -timeout $(LIMIT) -v ./test/libvirt ./test/migrate

e2e:
	$(GO) test -count=1 -timeout $(LIMIT) -skip '^TestConform|^TestCUDA' -v ./test/e2e

# CUDA programs on the fake of NVIDIA's driver, which has one kind of memory.
cuda-e2e:
	$(GO) test -count=1 -timeout $(LIMIT) -run '^TestCUDA' -v ./test/e2e

# property compares random programs that are swapped with the same unswapped.
property:
	$(GO) test -count=1 -timeout $(LIMIT) -v ./test/property

# Each check of the mediator of GPUs is removed in turn: a test has to fail.
mutate-mmio:
	$(GO) run ./test/mutate -first '^Test(GX|Push|Changed|HostileRecord|Moved|Paused|Sizes|Lazy|Unmapped|Flood|Command|Nothing|Next|EveryDword)' ./mmio/mediate

# Two VMs share one GPU in software, one of them hostile. Needs nothing but Go.
mmio-demo:
	@mkdir -p bin
	CGO_ENABLED=0 $(GO) build -trimpath $(STAMP) -o bin/gpuctl-mmio-demo ./demo/mmio
	bin/gpuctl-mmio-demo

demo: build
	bin/gpuctl-demo

# A CUDA program, on NVIDIA's driver or on a fake one.
cuda-demo: build
	$(MAKE) -s -C test/cuda
	bin/gpuctl-cuda-demo

# Three hosts in network namespaces of this machine.
cluster-demo: build
	bin/gpuctl-cluster-demo

# Two hosts in network namespaces, of which one lends the other its GPU.
remote-demo: build
	bin/gpuctl-cluster-demo --remote

bench: build
	@packaging/setup.sh hashcat
	@packaging/get-etcd.sh .cache/etcd || echo "no etcd to compare with"
	PATH=$$PATH:$(CURDIR)/.cache/etcd/usr/bin bin/gpuctl-bench

# Every fuzz target for $(FUZZTIME). A run whose time ends within an execution says "context deadline exceeded" and
# no more; that is no finding. Go makes each new input smaller for as long as -fuzzminimizetime says: with a time, a
# target that takes milliseconds does hardly anything else.
fuzz: build fuzz-c
	@set -e; for f in $$(grep -rl --include='*_test.go' '^func Fuzz' . ); do \
		for t in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\).*/\1/p' $$f); do \
			echo "== $$t in $$(dirname $$f)"; \
			$(GO) test -run '^$$' -fuzz "^$$t$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 20x $$(dirname $$f) 2>&1 | tee .cache/fuzz.log; \
			[ $${PIPESTATUS[0]} = 0 ] || { grep -q 'context deadline exceeded' .cache/fuzz.log && ! grep -q 'Failing input' .cache/fuzz.log; }; \
		done; done

# What is in C and takes what others send, with AddressSanitizer: the application's library and connections over RDMA.
fuzz-c: setup
	@set -e; time=$(FUZZTIME); case $$time in *m) time=$$((60 * $${time%m}));; *) time=$${time%s};; esac; \
	for d in guest/opencl/icd/fuzz internal/rdma/fuzz; do \
		out=.cache/fuzz/$$d; mkdir -p $$out/corpus; $$d/build.sh $$out/target; echo "== $$d"; \
		GPUCTL_QUIET=1 $$out/target -max_total_time=$$time -malloc_limit_mb=0 -print_final_stats=1 -artifact_prefix=$$out/ $$out/corpus $$d/testdata/seeds; \
	done

# Random swaps and suspensions under load, CHAOSTIME in each mode of memory.
chaos: MEMORY = unified discrete mixed
chaos: build
	@set -e; for m in $(MEMORY); do echo "== $$m memory"; \
		GPUCTL_TEST_MEMORY=$$m GPUCTL_CHAOS=$(CHAOSTIME) $(GO) test -count=1 -timeout 24h -run '^TestChaos' -v ./test/e2e; done

# The same, conformance and random programs with the runtimes of the Debian release after this one, as root.
chaos-newer: MEMORY = unified discrete
chaos-newer: build
	@for t in e2e property; do CGO_ENABLED=0 $(GO) test -c -trimpath -o .cache/newer/$$t.test ./test/$$t || exit 1; done
	test/newer.sh .cache/newer $(CHAOSTIME) $(MEMORY)

# Sessions whose executors are of the earlier release REV and of this one by turns.
test-older: MEMORY = unified discrete
test-older: build
	@test -n '$(REV)' || { echo 'which earlier release? make test-older REV=COMMIT' >&2; exit 2; }
	test/older.sh .cache/older $(REV) $(MEMORY)

# Faults in a cluster of five nodes; a minute for some 500.
FAULTS ?= 500
chaos-cluster: setup
	GPUCTL_CHAOS_FAULTS=$(FAULTS) $(GO) test -count=1 -timeout 90m -run '^TestChaos' -v ./cluster/replica

# Everything generated, anew: wire and OpenCL tables, protobuf, the manual. Fails if that changes a file.
generate: setup
	$(GO) generate $(PKGS)
	api/generate.sh
	$(GO) run ./docs/gen docs
	@if $(GIT) rev-parse HEAD >/dev/null 2>&1; then $(GIT) diff --exit-code -- '*_gen.*' '*.pb.go' '*.connect.go' docs/cli docs/man docs/errors.md docs/mmio-registers.md; \
		else echo "no git repository to compare with"; fi

# Findings kept of another checkout would name its files, which the exceptions do not match.
lint: setup
	GOLANGCI_LINT_CACHE=$(CURDIR)/.cache/lint $(GO) run $(GOLANGCI) run

include lab/lab.mk

# Hostile clients at every boundary beside honest ones, for $(SOAKTIME) and a fifth of it without them. Best as root.
soak-hostile: build
	bin/gpuctl-bench --only hostile --soak $(SOAKTIME)

clean:
	rm -rf bin lib bench/out .demo
	$(MAKE) -C test/cl clean
	$(MAKE) -C test/cuda clean
