package xen

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// softRoCE gives a host a device for RDMA: its interface between the hosts, by rdma_rxe.
const softRoCE = `set -e; modprobe -a rdma_rxe rdma_ucm; i=$(ip -o -4 address show | awk '$4 == "%s/24" {print $2}')
rdma link show | grep -q rxe0 || rdma link add rxe0 type rxe netdev $i; rdma link`

// rdmaTests are what runs on a host as it does elsewhere with stand-ins.
var rdmaTests = []string{"./internal/rdma", "./guest/fabric"}

// TestRDMA has a session of a host swapped to the other host's GPU, compute there over RDMA, through a cut of
// the network and the death of either gpuguest, and swapped home, twice.
func TestRDMA(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 25*time.Minute)
	defer cancel()
	l := labtest.Start(t)
	hosts := l.Hosts()
	for _, h := range hosts {
		if out, err := h.Run(ctx, fmt.Sprintf(softRoCE, h.Address)); err != nil {
			t.Fatalf("%s: %v: %s", h.Name, err, out)
		}
	}
	for _, pkg := range rdmaTests {
		onHost(ctx, t, hosts[0], pkg)
	}
	a, b := pair(ctx, t, l)
	g, err := labtest.NewComputeGuest(ctx, l)
	must(t, err)
	root, err := lab.Root()
	must(t, err)
	for _, h := range []*host{a, b} {
		t.Cleanup(func() {
			_, _ = h.Run(context.Background(), "systemctl stop "+unit+"; pkill -x gpuguest; umount -l /usr; rdma link delete rxe0")
		})
		for from, to := range map[string]string{"lib/libgpuctl-opencl.so": "/usr/local/lib/", "test/cl/bin/model": "/usr/local/bin/"} {
			must(t, h.Put(ctx, filepath.Join(root, from), to+filepath.Base(from)))
		}
		must(t, g.Runtimes(ctx, h.Host))
		h.stop(ctx)
		h.run(ctx, "pkill -x gpuguest; sed -i 's/^cluster: {/cluster: {rdma: true, /' /etc/gpuctl.yaml && cat >> /etc/gpuctl.yaml <<'END'\n"+liveConfig+"END")
		h.start(ctx)
	}
	testkit.Until(t, "each host has a GPU", func() error {
		out, err := a.gpuctl(ctx, "get", "gpus", "-o", "wide")
		return testkit.Want(err == nil && strings.Contains(out, a.Name+"/far") && strings.Contains(out, b.Name+"/far"), out, err)
	})
	quiet := a.connections(ctx)
	// It ends when its standard input does.
	must(t, labtest.StartUnit(ctx, a.Host, "model", "sh -c 'tail -f /dev/null | gpuctl run -- model --seconds 100000 --kib 16 --no-images'"))
	t.Cleanup(func() { _, _ = a.Run(context.Background(), "systemctl stop model") })
	goesOn := func(when string) {
		t.Helper()
		before := a.operations(ctx)
		testkit.Until(t, "the program computes "+when, func() error {
			now := a.operations(ctx)
			return testkit.Want(now > before+20, now, before)
		})
	}
	over := func(when string) {
		t.Helper()
		goesOn(when)
		if n := a.connections(ctx); n <= quiet {
			t.Errorf("%s there are %d connections over RDMA, %d without a session: %s", when, n, quiet, a.run(ctx, "rdma resource show qp; tail -n 30 /run/gpuctl/gpuguest.log"))
		}
	}
	swap := func(gpu string) {
		t.Helper()
		out := a.must(ctx, "sessions", "-o", "json")
		var all []struct {
			ID string `json:"id"`
		}
		if err := json.Unmarshal([]byte(out), &all); err != nil || len(all) != 1 {
			t.Fatal(err, out)
		}
		began := time.Now()
		// A program in emulation may keep its GPU busy for longer than a swap waits.
		testkit.Until(t, "a swap to "+gpu, func() error {
			out, err := a.gpuctl(ctx, "migrate", all[0].ID, "--to", gpu)
			return testkit.Want(err == nil, out, err)
		})
		t.Logf("a swap to %s: %v", gpu, time.Since(began).Round(time.Second))
	}
	goesOn("at home")
	swap(b.Name + "/far")
	over("on the other host's GPU")
	must(t, a.Link(ctx, false))
	time.Sleep(8 * time.Second) // how long the network is gone
	must(t, a.Link(ctx, true))
	goesOn("after a cut")
	for _, h := range []*host{b, a} {
		h.run(ctx, "pkill -KILL -x gpuguest")
		goesOn("after the death of " + h.Name + "'s gpuguest")
	}
	swap(a.Name + "/far") // home
	goesOn("at home again")
	swap(b.Name + "/far")
	over("on the other host's GPU again")
	if out := a.run(ctx, "journalctl -q --no-pager -o cat -u model | grep -v '^ops'; true"); strings.Contains(out, "BAD") {
		t.Errorf("wrong results: %s", out)
	}
	t.Logf("%d operations of the program, all right", a.operations(ctx))
}

// operations returns how many the program says that it has done.
func (h *host) operations(ctx context.Context) int {
	out, _ := h.Run(ctx, "journalctl -q --no-pager -o cat -u model | awk '/^ops/ {n = $2} END {print n}'")
	n, _ := strconv.Atoi(strings.TrimSpace(out)) // 0 before the first
	return n
}

// connections returns how many queue pairs there are: each connection over RDMA has one.
func (h *host) connections(ctx context.Context) int {
	h.t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(h.run(ctx, "rdma resource show qp | grep -c . || true")))
	must(h.t, err)
	return n
}

// onHost runs the tests of a package on a host, whose device they use.
func onHost(ctx context.Context, t *testing.T, h *lab.Host, pkg string) {
	t.Helper()
	root, err := lab.Root()
	must(t, err)
	program := filepath.Join(t.TempDir(), "rdma.test")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-o", program, pkg)
	build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", pkg, err, out)
	}
	must(t, h.Put(ctx, program, "/root/rdma.test"))
	out, err := h.Run(ctx, "cd /root && GPUCTL_TEST_RDMA="+h.Address+" ./rdma.test -test.v -test.timeout 3m")
	if err != nil || !strings.Contains(out, "--- PASS") || strings.Contains(out, "names no address") { // for want of which tests skip
		t.Errorf("%s: %v\n%s", pkg, err, out)
	}
}
