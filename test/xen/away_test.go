package xen

import (
	"context"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/lab/labtest"
)

// TestMigrateAway moves a VM that has no room for the state of its card: that
// goes out to both hosts over a vchan, and comes back from the second.
func TestMigrateAway(t *testing.T) {
	ctx := t.Context()
	v := newTraveller(ctx, t, labtest.Start(t), labtest.Endure{KiB: 8, Ballast: 110, PauseMS: 200, Seed: 6})
	for _, h := range v.hosts { // as docs/migration.md says: /run is too small
		h.stop(ctx)
		h.run(ctx, "mount -t tmpfs -o size=220m,mode=0700 tmpfs /run/gpuctl/stash")
		t.Cleanup(func() { _, _ = h.Run(context.Background(), "umount -l /run/gpuctl/stash") })
		h.start(ctx)
	}
	// Leave less than the state needs, and no more to carry than that takes: in the lab, where
	// a system call costs milliseconds, a MiB of state needs four to ten seconds through both hosts, and three back.
	out, err := v.guest.Run(ctx, `left() { awk '/MemAvailable/{print int($2/1024)}' /proc/meminfo; }
for i in 1 2 3 4 5; do [ $(left) -le 95 ] && break; dd if=/dev/zero bs=1M count=$(($(left)-(i>1?85:60))) >>/run/fill 2>/dev/null; done; grep MemAvailable /proc/meminfo; df -m /run`)
	must(t, err)
	t.Log(out)
	l := leg{"migrate", virtio}
	to := v.next(l)
	plan := v.at.host.must(ctx, "migrate", "web", "--to", to.gpu(), "--plan")
	t.Log(plan)
	if !strings.Contains(plan, "go out to hosts") {
		t.Error("the state is to stay in the VM")
	}
	m := v.over(ctx, v.begin(ctx, l, to))
	if !v.ended(ctx, m, to) {
		t.Error("it was not done")
	}
	_, err = v.guest.Run(ctx, "rm /run/fill")
	must(t, err)
	for _, h := range v.hosts {
		log, err := labtest.Journal(ctx, h.Host, unit)
		must(t, err)
		if strings.Contains(log, "slow way") {
			t.Errorf("no vchan on %s: %s", h.Name, log)
		}
		if left := h.run(ctx, "find /run/gpuctl/stash -type f | head -n 3"); left != "" {
			t.Errorf("%s keeps %s", h.Name, left)
		}
	}
	v.arrive(ctx)
}
