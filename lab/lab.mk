# The lab: two Xen hosts in QEMU on this machine (docs/lab.md).
.PHONY: lab-setup lab-program lab-image lab-up lab-ssh lab-put lab-snapshot lab-status lab-down lab-test lab-migrate lab-chaos lab-bench lab-mmio

LAB_HOST ?= xena
# QUOTA=50 slows each host down to half of a processor: make lab-test QUOTA=50 LAB_TIMEOUT=2h
export GPUCTL_LAB_QUOTA ?= $(QUOTA)
LAB_TIMEOUT ?= 30m

lab-setup: setup
	@lab/setup.sh

lab-program: lab-setup
	@mkdir -p bin
	@CGO_ENABLED=0 $(GO) build -trimpath -o bin/lab ./lab/cmd/lab
	@CGO_ENABLED=0 $(GO) build -trimpath -ldflags='-s -w' -o bin/vchanperf ./lab/cmd/vchanperf
	@CGO_ENABLED=0 $(GO) build -trimpath -ldflags='-s -w' -o bin/mmiolab ./lab/cmd/mmiolab

# COLD=1 boots the hosts and makes new snapshots.
lab-up: lab-program
	bin/lab up $(if $(COLD),--cold)

lab-image: lab-program
	bin/lab image

# make lab-ssh LAB_HOST=xenb
lab-ssh: lab-program
	@bin/lab ssh $(LAB_HOST)

lab-status: lab-program
	@bin/lab status

lab-snapshot: lab-program
	bin/lab snapshot

lab-down: lab-program
	bin/lab down

# Tests of real Xen, one package after the other: they share the two hosts.
LAB_PKGS ?= ./lab/labtest ./test/xen
lab-test: build lab-program
	GPUCTL_LAB=1 $(GO) test -count=1 -p 1 -timeout $(LAB_TIMEOUT) -v -skip '^TestMigrate|^TestComputeGuest|^TestBench|^TestVchan|^TestMediated' $(LAB_PKGS)

# Two guests of real Xen with parts of one mediated GPU, one of them hostile. Then
# one that computes moves to the other host and back.
lab-mmio: build lab-program
	GPUCTL_LAB=1 $(GO) test -count=1 -p 1 -timeout 2h -v -run '^TestMediated(Move)?$$' $(LAB_PKGS)

# A VM that computes gets a lower model, goes to the other host, gets a higher
# one; then goes there and back while one thing after the other goes wrong.
# Before, the way that states take which have no room in their VM. Once with
# libvirt's lock manager on both.
lab-migrate: build lab-program
	GPUCTL_LAB=1 $(GO) test -count=1 -p 1 -timeout 3h -v -run '^Test(Vchan|Migrate(Away|Live|Locked|CUDA|Faults)?)$$' $(LAB_PKGS)

# Such a VM goes round while hostd is killed KILLS times.
KILLS ?= 200
lab-chaos: build lab-program
	GPUCTL_LAB=1 GPUCTL_LAB_KILLS=$(KILLS) $(GO) test -count=1 -timeout 24h -v -run '^Test(PassthroughKills|MigrateKills)$$' ./test/xen

# What gpuctl adds to libvirt's own time, and a migration beside one by hand.
# Nothing else should run on the machine.
lab-bench: build lab-program
	GPUCTL_LAB=1 $(GO) test -count=1 -timeout 2h -v -run '^TestBench' ./test/xen
