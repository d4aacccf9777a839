package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// TestCluster goes through the life of a cluster of three hosts.
func TestCluster(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 25*time.Minute)
	defer cancel()
	r := build(t)
	began := time.Now()
	var hosts []*host
	for _, name := range []string{"n1", "n2", "n3"} {
		hosts = append(hosts, newHost(t, r, name))
	}
	unmount := tmpfs(t, hosts[2])
	t.Cleanup(unmount)
	var wg sync.WaitGroup
	for _, h := range hosts {
		wg.Go(h.start)
	}
	wg.Wait()
	c := &life{hosts}
	for _, step := range []struct {
		name string
		run  func(*testing.T, context.Context)
	}{
		{"outside", c.outside},
		{"init", c.init},
		{"join", c.join},
		{"look", c.look},
		{"claims", c.claims},
		{"cordon", c.cordon},
		{"drain", c.drain},
		{"viewer", c.viewer},
		{"session", c.session},
		{"full disk", c.fullDisk},
		{"stopped leader", c.stoppedLeader},
		{"no quorum", c.noQuorum},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			for _, h := range hosts {
				h.t = t
			}
			defer func() {
				for _, h := range hosts {
					h.t = t
				}
			}()
			step.run(t, ctx)
		}) {
			break
		}
	}
	for _, h := range hosts {
		h.t = t
	}
	t.Logf("it took %v beside building", time.Since(began).Round(100*time.Millisecond))
}

// tmpfs puts a host's data on a file system that can be filled.
func tmpfs(t *testing.T, h *host) (unmount func()) {
	t.Helper()
	if err := os.MkdirAll(h.data, 0o700); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 {
		return func() {}
	}
	if err := unix.Mount("tmpfs", h.data, "tmpfs", 0, "size=64m,mode=0700"); err != nil {
		t.Logf("no tmpfs: %v", err)
		return func() {}
	}
	return func() {
		h.stop()
		if err := unix.Unmount(h.data, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}
}

type life struct{ hosts []*host }

// outside: a host that is in no cluster says what to do.
func (c *life) outside(t *testing.T, ctx context.Context) {
	_, err := c.hosts[0].gpuctl(ctx, "get", "hosts")
	if err == nil || !strings.Contains(err.Error(), "cluster init") || !strings.Contains(err.Error(), "cluster join") {
		t.Errorf("%v", err)
	}
	if s, _ := c.hosts[0].status(ctx); s.Joined {
		t.Errorf("%+v", s)
	}
}

// init is asked for twice at once.
func (c *life) init(t *testing.T, ctx context.Context) {
	errs := make([]error, 3)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { _, errs[i] = c.hosts[0].gpuctl(ctx, "cluster", "init") })
	}
	wg.Wait()
	ok := 0
	for _, err := range errs {
		switch {
		case err == nil:
			ok++
		case !strings.Contains(err.Error(), "already belongs to a cluster"):
			t.Error(err)
		}
	}
	if ok != 1 {
		t.Errorf("%d of %d made a cluster", ok, len(errs))
	}
}

func (c *life) join(t *testing.T, ctx context.Context) {
	for _, h := range c.hosts[1:] {
		token := strings.TrimSpace(c.hosts[0].must(ctx, "cluster", "token", "create", "--name", h.name))
		if _, err := h.gpuctl(ctx, "cluster", "join", token[:len(token)-3]); err == nil {
			t.Error("a token that was cut lets a host in")
		}
		h.must(ctx, "cluster", "join", token)
		if _, err := h.gpuctl(ctx, "cluster", "join", token); err == nil || !strings.Contains(err.Error(), "already belongs to a cluster") {
			t.Errorf("%v", err)
		}
	}
	complete(ctx, t, c.hosts)
}

func (c *life) look(t *testing.T, ctx context.Context) {
	for _, h := range c.hosts {
		testkit.Until(t, h.name+" lists hosts and GPUs", func() error { // a slow machine elects for longer than a read waits
			hosts, err := h.get(ctx, "hosts")
			gpus, gerr := h.get(ctx, "gpus", "--where", `model == "Large" && free`)
			return errors.Join(err, gerr, testkit.Want(slices.Equal(names(hosts, "name"), []string{"n1", "n2", "n3"}), hosts),
				testkit.Want(slices.Equal(names(gpus, "id"), []string{"n1/large", "n2/large", "n3/large"}), gpus))
		})
	}
	if text := c.hosts[1].must(ctx, "describe", "host", "n3"); !strings.Contains(text, "n3/small") || !strings.Contains(text, "Joined") {
		t.Error(text)
	}
	if text := c.hosts[1].must(ctx, "events", "host/n2"); !strings.Contains(text, "Joined") {
		t.Error(text)
	}
	if _, err := c.hosts[1].gpuctl(ctx, "describe", "host", "n9"); err == nil || !strings.Contains(err.Error(), "n9") {
		t.Errorf("%v", err)
	}
	if _, err := c.hosts[1].gpuctl(ctx, "get", "gpus", "--where", "modell == 'x'"); err == nil || !strings.Contains(err.Error(), "model") {
		t.Errorf("%v", err)
	}
}

// owners are the claims by GPU, as one host knows them.
func owners(t *testing.T, ctx context.Context, h *host) map[string][]string {
	t.Helper()
	list, err := h.get(ctx, "assignments")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	for _, as := range list {
		out[fmt.Sprint(as["gpu"])] = append(out[fmt.Sprint(as["gpu"])], fmt.Sprint(as["claim"]))
	}
	return out
}

func (c *life) claims(t *testing.T, ctx context.Context) {
	c.hosts[1].must(ctx, "claim", "create", "vm", "--min-memory", "2GiB", "--on", "n3")
	c.hosts[1].must(ctx, "claim", "create", "vm", "--min-memory", "2GiB", "--on", "n3") // again
	if _, err := c.hosts[0].gpuctl(ctx, "claim", "create", "vm", "--min-memory", "2GiB", "--on", "n3"); err == nil || !strings.Contains(err.Error(), "owner") {
		t.Errorf("root of another host: %v", err)
	}
	if _, err := c.hosts[2].gpuctl(ctx, "claim", "create", "vm", "--min-memory", "3GiB", "--on", "n3"); err == nil || !strings.Contains(err.Error(), "other needs") {
		t.Errorf("%v", err)
	}
	for _, h := range c.hosts {
		if got := owners(t, ctx, h); len(got) != 1 || !slices.Equal(got["n3/large"], []string{"vm"}) {
			t.Errorf("%s: %v", h.name, got)
		}
	}
	_, err := c.hosts[0].gpuctl(ctx, "claim", "create", "big", "--min-memory", "64GiB")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 3 || !strings.Contains(err.Error(), "GiB") {
		t.Errorf("%v", err)
	}
	// More at once than there is.
	errs := make([]error, 9)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			_, errs[i] = c.hosts[i%3].gpuctl(ctx, "claim", "create", fmt.Sprintf("many-%d", i), "--gpu", "model == 'Small'")
		})
	}
	wg.Wait()
	bound := 0
	for i, err := range errs {
		switch {
		case err == nil:
			bound++
			c.hosts[0].must(ctx, "claim", "delete", fmt.Sprintf("many-%d", i))
		case !errors.As(err, &exit) || exit.ExitCode() != 3:
			t.Error(err)
		}
	}
	if bound != 3 {
		t.Errorf("%d claims of 3 GPUs", bound)
	}
	c.hosts[0].must(ctx, "claim", "delete", "vm")
	c.empty(t, ctx)
}

// empty waits until nobody owns anything.
func (c *life) empty(t *testing.T, ctx context.Context) {
	t.Helper()
	testkit.Until(t, "released", func() error {
		if got := owners(t, ctx, c.hosts[1]); len(got) > 0 {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
}

func (c *life) cordon(t *testing.T, ctx context.Context) {
	c.hosts[1].must(ctx, "cordon", "n1/large")
	if _, err := c.hosts[2].gpuctl(ctx, "claim", "create", "x", "--on", "n1", "--min-memory", "2GiB"); err == nil || !strings.Contains(err.Error(), "cordon") {
		t.Errorf("%v", err)
	}
	if _, err := c.hosts[0].gpuctl(ctx, "run", "--local", "--gpu", "model == 'Large'", "--", c.hosts[0].root.program("stream"), "--seconds", "1"); err == nil || !strings.Contains(err.Error(), "cordon") {
		t.Errorf("run: %v", err)
	}
	c.hosts[1].must(ctx, "uncordon", "n1/large")
}

func (c *life) drain(t *testing.T, ctx context.Context) {
	c.hosts[0].must(ctx, "drain", "n2")
	if _, err := c.hosts[2].gpuctl(ctx, "claim", "create", "x", "--on", "n2"); err == nil || !strings.Contains(err.Error(), "drain") {
		t.Errorf("%v", err)
	}
	if _, err := c.hosts[1].gpuctl(ctx, "run", "--local", "--", c.hosts[1].root.program("stream"), "--seconds", "1"); err == nil || !strings.Contains(err.Error(), "drain") {
		t.Errorf("run: %v", err)
	}
	c.hosts[1].must(ctx, "undrain", "n2")
}

// viewer reaches the cluster from outside, with a certificate.
func (c *life) viewer(t *testing.T, ctx context.Context) {
	token := strings.TrimSpace(c.hosts[1].must(ctx, "cluster", "token", "create", "--role", "viewer", "--name", "eve"))
	home := t.TempDir()
	gpuctl := func(args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, c.hosts[0].root.bin("gpuctl"), args...)
		cmd.Env = append(os.Environ(), "HOME="+home, "XDG_CONFIG_HOME="+filepath.Join(home, "config"), "GPUCTL_HOST=", "USER=eve", "LOGNAME=eve")
		return output(cmd)
	}
	if out, err := gpuctl("cluster", "login", token, "--as", "prod"); err != nil {
		t.Fatal(out, err)
	}
	for _, host := range []string{"prod", "https://" + c.hosts[2].port} {
		if out, err := gpuctl("--host", host, "get", "hosts", "-o", "name"); err != nil || !strings.Contains(out, "n3") {
			t.Errorf("%s: %s, %v", host, out, err)
		}
	}
	for _, args := range [][]string{{"claim", "create", "x"}, {"drain", "n1"}, {"cordon", "n1/small"}, {"cluster", "token", "create"}, {"cluster", "remove", "n3", "--yes"}} {
		_, err := gpuctl(append([]string{"--host", "prod"}, args...)...)
		if err == nil || !strings.Contains(err.Error(), "viewer") {
			t.Errorf("%v: %v", args, err)
		}
	}
	c.hosts[0].must(ctx, "cluster", "revoke", "eve", "--yes")
	testkit.Until(t, "revoked", func() error {
		if _, err := gpuctl("--host", "prod", "get", "hosts"); err == nil || !strings.Contains(err.Error(), "removed") {
			return fmt.Errorf("%w", errors.Join(err, errors.New("not refused as removed")))
		}
		return nil
	})
	if _, err := gpuctl("cluster", "login", token, "--as", "again"); err == nil {
		t.Error("a token was used twice")
	}
}

// session runs an application on the leader, moves it, kills hostd under it,
// and has it owned once all the time.
func (c *life) session(t *testing.T, ctx context.Context) {
	l, others, err := leader(ctx, c.hosts)
	if err != nil {
		t.Fatal(err)
	}
	app := l.command(ctx, "run", "--gpu", "model == 'Small' || model == 'Large'", "--", l.root.program("stream"), "--mib", "8", "--buffers", "2", "--stdin")
	said := &testkit.Log{}
	app.Stdout, app.Stderr = said, said
	end, err := app.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the application: %s", said)
		}
	})
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- app.Wait() }()
	owned := func(by *host, gpu string) string {
		t.Helper()
		claim := ""
		testkit.Until(t, "owned: "+gpu, func() error {
			sessions, err := by.get(ctx, "sessions")
			if err != nil {
				return err
			}
			got := owners(t, ctx, by)
			if len(sessions) != 1 || len(got) != 1 || len(got[l.name+"/"+gpu]) != 1 {
				return fmt.Errorf("sessions %v, owners %v", sessions, got)
			}
			if claim = fmt.Sprint(sessions[0]["claim"]); claim != got[l.name+"/"+gpu][0] || fmt.Sprint(sessions[0]["gpus"]) != "["+l.name+"/"+gpu+"]" {
				return fmt.Errorf("session %v, owners %v", sessions[0], got)
			}
			return nil
		})
		return claim
	}
	claim := owned(others[0], "large")                                  // the best there is
	l.must(ctx, "downgrade", "--to", "small", "--freeze-timeout", "1m") // a busy machine builds for long
	if now := owned(others[1], "small"); now != claim {
		t.Errorf("claim %s, not %s", now, claim)
	}
	l.must(ctx, "upgrade", "--freeze-timeout", "1m")
	owned(others[0], "large")
	testkit.Until(t, "migrations", func() error {
		list, err := others[0].get(ctx, "migrations")
		if err != nil {
			return err
		}
		var got []string
		for _, m := range list {
			got = append(got, fmt.Sprint(m["verb"], " ", m["state"]))
		}
		slices.Sort(got)
		if !slices.Equal(got, []string{"downgrade done", "upgrade done"}) {
			return fmt.Errorf("%v", list)
		}
		return nil
	})
	l.kill()
	killed := time.Now()
	others[0].must(ctx, "claim", "create", "after", "--on", others[1].name, "--min-memory", "1MiB")
	within(t, "from the leader's death to the next assignment", time.Since(killed), 1500*time.Millisecond)
	if _, err := others[0].gpuctl(ctx, "claim", "create", "thief", "--on", l.name, "--gpu", "model == 'Large'"); err == nil {
		t.Error("a GPU was given away that a session uses")
	}
	others[0].must(ctx, "claim", "delete", "after")
	l.start()
	if now := owned(others[0], "large"); now != claim {
		t.Errorf("claim %s, not %s", now, claim)
	}
	if got := owners(t, ctx, l); len(got[l.name+"/large"]) != 1 {
		t.Errorf("%v", got)
	}
	if err := end.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil || !strings.Contains(said.String(), "checksum") {
			t.Errorf("%v: %s", err, said.String())
		}
	case <-ctx.Done():
		t.Fatal("the application does not end")
	}
	c.empty(t, ctx)
	complete(ctx, t, c.hosts)
}

// fullDisk fills the folder of one host: the others go on, it says what is
// wrong, and is well again when there is room.
func (c *life) fullDisk(t *testing.T, ctx context.Context) {
	sick, well := c.hosts[2], c.hosts[:2]
	var fs unix.Statfs_t
	if err := unix.Statfs(sick.data, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Skip("no small file system for the data folder: needs root and mount(2)")
	}
	filler := filepath.Join(sick.data, "filler")
	f, err := os.Create(filler)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	// The log has room in the segment that it is in, which is used up first.
	said := ""
	for i := 0; said == "" && i < 150; i++ {
		labels := []string{"label", "host", "n1"}
		for k := range 60 {
			labels = append(labels, fmt.Sprintf("k%d=%0200d", k, i))
		}
		well[0].must(ctx, labels...)
		if s, err := sick.status(ctx); err == nil && strings.Contains(s.Message, "no space left") {
			t.Logf("%d: %q", i, s.Message)
			said = s.Message
		}
	}
	if said == "" {
		t.Error("the host whose disk is full does not say so")
	}
	well[0].must(ctx, "claim", "create", "full", "--on", "n1")
	well[1].must(ctx, "claim", "delete", "full")
	if sick.cmd.ProcessState != nil {
		t.Error("hostd ended")
	}
	// Room comes back with the last who has it open.
	if err := errors.Join(f.Close(), os.Remove(filler)); err != nil {
		t.Fatal(err)
	}
	complete(ctx, t, c.hosts)
	// The leader asks it less and less often while it refuses.
	testkit.Until(t, "caught up", func() error {
		_, err := sick.get(ctx, "hosts")
		return err
	})
	c.empty(t, ctx)
}

// stoppedLeader freezes the leader for longer than anybody waits for it.
func (c *life) stoppedLeader(t *testing.T, ctx context.Context) {
	l, others, err := leader(ctx, c.hosts)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	others[0].must(ctx, "claim", "create", "frozen", "--on", others[1].name)
	within(t, "from the leader's freezing to the next assignment", time.Since(began), 5*time.Second)
	time.Sleep(max(0, 5*time.Second-time.Since(began))) // how long it is frozen
	testkit.Until(t, "down", func() error {
		hosts, err := others[1].get(ctx, "hosts", "--where", "state == 'down'")
		if err != nil || !slices.Equal(names(hosts, "name"), []string{l.name}) {
			return fmt.Errorf("%v, %w", hosts, errors.Join(err))
		}
		return nil
	})
	if err := l.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	// It must not answer with what it knew.
	if list, err := l.get(ctx, "claims"); err != nil || !slices.Contains(names(list, "id"), "frozen") {
		t.Errorf("%v, %v", list, err)
	}
	l.must(ctx, "claim", "delete", "frozen")
	c.empty(t, ctx)
	complete(ctx, t, c.hosts)
}

// noQuorum leaves one host, the leader or another: it answers what it knows, if
// that will do.
func (c *life) noQuorum(t *testing.T, ctx context.Context) {
	for _, leads := range []bool{true, false} {
		l, others, err := leader(ctx, c.hosts)
		if err != nil {
			t.Fatal(err)
		}
		left, lost := l, others
		if !leads {
			left, lost = others[0], []*host{l, others[1]}
		}
		t.Logf("left is %s; it led: %v", left.name, leads)
		c.leave(t, ctx, left, lost, leads)
	}
}

func (c *life) leave(t *testing.T, ctx context.Context, h *host, lost []*host, led bool) {
	for _, x := range lost {
		x.kill()
	}
	if got, err := h.get(ctx, "hosts", "--stale"); err != nil || len(got) != 3 {
		t.Errorf("%v, %v", got, err)
	}
	// What nobody took is tried until gpuctl's time is up, which for a claim is a
	// minute; what a leader took is in doubt before.
	asked := [][]string{{"get", "hosts"}, {"drain", h.name, "--timeout", "10s"}}
	if led {
		asked = append(asked, []string{"claim", "create", "x"})
	}
	errs := make([]error, len(asked))
	var wg sync.WaitGroup
	for i, args := range asked {
		wg.Go(func() {
			began := time.Now()
			_, errs[i] = h.gpuctl(ctx, args...)
			if errs[i] == nil || !strings.Contains(errs[i].Error(), "leader") {
				t.Errorf("%v: %v", args, errs[i])
			}
			t.Logf("%v: %v", args, errs[i])
			within(t, fmt.Sprint(args), time.Since(began), 14*time.Second)
		})
	}
	wg.Wait()
	text, _ := h.gpuctl(ctx, "-o", "json", "cluster", "status")
	var s status
	if err := json.Unmarshal([]byte(text), &s); err != nil || s.Message == "" {
		t.Errorf("%v: %s", err, text)
	}
	for _, x := range lost {
		x.start()
	}
	complete(ctx, t, c.hosts)
	// A leader that has just lost its followers has the entry in its log. It is
	// committed if that host leads again: that is what it said. What was refused
	// must not have been done.
	for i, what := range [][]string{1: {"hosts", "--where", "draining"}, 2: {"claims", "--where", "id == 'x'"}}[:len(asked)] {
		if what == nil {
			continue
		}
		got, err := h.get(ctx, what[0], what[1:]...)
		unknown := errs[i] != nil && strings.Contains(errs[i].Error(), replica.ErrTimeout.Error())
		if err != nil || len(got) > 0 && !unknown {
			t.Errorf("%v, but: %v, %v", errs[i], got, err)
		}
		t.Logf("%v: done: %v, the outcome was not known: %v", asked[i], len(got) > 0, unknown)
		if i == 2 && len(got) > 0 {
			h.must(ctx, "claim", "delete", "x")
		}
	}
	h.must(ctx, "undrain", h.name)
	h.must(ctx, "claim", "create", "back")
	h.must(ctx, "claim", "delete", "back")
	c.empty(t, ctx)
}
