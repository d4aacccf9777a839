package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// farConfig is a host with one GPU.
const farConfig = `version: 1
discover: false
cluster: {host: %s, listen: "%s", lendListen: "127.0.0.1:%s"}
gpus:
  - id: one
    runtime: pocl
    env: {POCL_DEVICES: basic, POCL_MEMORY_LIMIT: "1"}
    model: Small
`

// farHosts makes a cluster of hosts with one GPU each, that lend to each other.
func farHosts(t *testing.T, ctx context.Context, r root, names ...string) []*host {
	t.Helper()
	var hosts []*host
	for i, name := range names {
		h := newHost(t, r, name)
		if err := os.WriteFile(filepath.Join(h.dir, "hostd.yaml"), fmt.Appendf(nil, farConfig, name, h.port, freePort(t)), 0o600); err != nil {
			t.Fatal(err)
		}
		h.start()
		if i == 0 {
			h.must(ctx, "cluster", "init")
		} else {
			h.must(ctx, "cluster", "join", strings.TrimSpace(hosts[0].must(ctx, "cluster", "token", "create")))
		}
		hosts = append(hosts, h)
	}
	testkit.Until(t, "all GPUs are known", func() error {
		gpus, err := hosts[len(hosts)-1].get(ctx, "gpus")
		if err == nil && len(gpus) != len(names) {
			err = fmt.Errorf("%v", names)
		}
		return err
	})
	return hosts
}

// app is a run of the stream program. It ends when stop is called, and prints a checksum
// that depends on the number of its iterations alone.
type app struct {
	host  *host
	stop  func()
	out   *testkit.Log
	ended chan error
}

func (h *host) run(ctx context.Context, args ...string) *app {
	h.t.Helper()
	a := &app{host: h, out: &testkit.Log{}, ended: make(chan error, 1)}
	cmd := h.command(ctx, append(append([]string{"run"}, args...), "--", h.root.program("stream"), "--kib", "256", "--stdin", "--verbose")...)
	cmd.Stdout, cmd.Stderr = a.out, a.out
	in, err := cmd.StdinPipe()
	if err != nil {
		h.t.Fatal(err)
	}
	a.stop = func() { _ = in.Close() }
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	go func() { a.ended <- cmd.Wait() }()
	h.t.Cleanup(a.stop)
	return a
}

// iterations is how many the program has done so far.
func (a *app) iterations() int { return strings.Count(a.out.String(), "iteration ") }

// goesOn waits until the program has done some more iterations.
func (a *app) goesOn(t *testing.T) {
	t.Helper()
	was := a.iterations()
	testkit.Until(t, "the application goes on", func() error {
		select {
		case err := <-a.ended:
			t.Fatalf("it has ended: %v: %s", err, a.out)
		default:
		}
		return testkit.Want(a.iterations() >= was+3)
	})
}

// checked ends the program, and compares its result with that of a run in one place.
func (a *app) checked(t *testing.T, ctx context.Context) {
	t.Helper()
	a.stop()
	if err := <-a.ended; err != nil {
		t.Fatalf("%v: %s", err, a.out)
	}
	m := regexp.MustCompile(`checksum (\d+) [0-9a-f]+`).FindStringSubmatch(a.out.String())
	if m == nil {
		t.Fatalf("no checksum: %s", a.out)
	}
	want := a.host.must(ctx, "run", "--local", "--wait", "--", a.host.root.program("stream"), "--kib", "256", "--iterations", m[1])
	if !strings.Contains(want, m[0]) {
		t.Errorf("%s, on a GPU of its own host alone it is %s", m[0], want)
	}
}

type seen struct {
	ID      string `json:"id"`
	PID     int    `json:"pid"`
	State   string `json:"state"`
	GPU     string `json:"gpu"`
	Message string `json:"message"`
}

func (h *host) sessions(ctx context.Context) (out []seen, err error) {
	text, err := h.gpuctl(ctx, "-o", "json", "sessions")
	if err == nil {
		err = json.Unmarshal([]byte(text), &out)
	}
	return out, err
}

// on waits until a host has a session on the GPU, and returns its id.
func (h *host) on(t *testing.T, ctx context.Context, gpu string) (id string) {
	t.Helper()
	testkit.Until(t, "a session of "+h.name+" is on "+gpu, func() error {
		all, err := h.sessions(ctx)
		for _, s := range all {
			if s.GPU == gpu && s.State == "running" {
				id = s.ID
				return nil
			}
		}
		return errors.Join(err, fmt.Errorf("%+v", all))
	})
	return id
}

// free waits until no claim has any GPU of the cluster, and nothing is lent.
func free(t *testing.T, ctx context.Context, hosts ...*host) {
	t.Helper()
	for _, h := range hosts {
		testkit.Until(t, "everything is given back, as "+h.name+" sees it", func() error {
			all, err := h.get(ctx, "assignments")
			if err != nil || len(all) > 0 {
				return errors.Join(err, fmt.Errorf("assignments %v", all))
			}
			text, err := h.gpuctl(ctx, "inventory")
			if err != nil || strings.Contains(text, "held by") {
				return errors.Join(err, errors.New(text))
			}
			return nil
		})
	}
}

// oneOwner checks that no GPU has two claims.
func oneOwner(t *testing.T, ctx context.Context, h *host) {
	t.Helper()
	all, err := h.get(ctx, "assignments")
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]string{}
	for _, as := range all {
		gpu, claim := fmt.Sprint(as["gpu"]), fmt.Sprint(as["claim"])
		if by[gpu] != "" && by[gpu] != claim {
			t.Errorf("%s has claims %s and %s", gpu, by[gpu], claim)
		}
		by[gpu] = claim
	}
}

// TestASessionStartsOnAnotherHostsGPUAndComesHome is the life of a session under MRQ.
func TestASessionStartsOnAnotherHostsGPUAndComesHome(t *testing.T) {
	built := build(t) // its time is not the hosts'
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	hosts := farHosts(t, ctx, built, "a", "b")
	a, b := hosts[0], hosts[1]
	first := a.run(ctx)
	a.on(t, ctx, "one")

	if _, err := a.gpuctl(ctx, "run", "--local", "--", "true"); err == nil || !strings.Contains(err.Error(), "held by claim") && !strings.Contains(err.Error(), "in use") {
		t.Errorf("--local: %v", err)
	}
	second := a.run(ctx)
	id := a.on(t, ctx, "b/one")
	second.goesOn(t)
	oneOwner(t, ctx, b)
	if text := b.must(ctx, "inventory"); !strings.Contains(text, "lent to a") {
		t.Errorf("the lender does not say so: %s", text)
	}
	if text := a.must(ctx, "describe", "session", id); !strings.Contains(text, "on host b, until a GPU is free here") {
		t.Error(text)
	}
	if _, err := b.gpuctl(ctx, "run", "--local", "--", "true"); err == nil {
		t.Error("a lent GPU was given to somebody on its own host")
	}
	if _, err := a.gpuctl(ctx, "run", "--count", "2", "--", "true"); err == nil || !strings.Contains(err.Error(), "all GPUs of a session are on one host") {
		t.Errorf("two GPUs, of two hosts: %v", err)
	}
	testkit.Until(t, "the link is measured", func() error {
		links, err := b.get(ctx, "links")
		if err == nil && len(links) == 0 {
			err = errors.New("no link")
		}
		return err
	})

	first.stop()
	if err := <-first.ended; err != nil {
		t.Fatal(err)
	}
	a.on(t, ctx, "one")
	second.goesOn(t)
	testkit.Until(t, "the lender's GPU is free", func() error {
		text, err := b.gpuctl(ctx, "inventory")
		return errors.Join(err, testkit.Want(strings.Contains(text, "free")))
	})

	plan := a.must(ctx, "migrate", id, "--to", "b", "--plan")
	for _, want := range []string{"a → b", "each second of computing takes about", "downtime"} {
		if !strings.Contains(plan, want) {
			t.Errorf("the plan does not say %q: %s", want, plan)
		}
	}
	a.must(ctx, "migrate", id, "--to", "b/one")
	second.goesOn(t)
	if text := a.must(ctx, "describe", "session", id); !strings.Contains(text, "where it stays") {
		t.Error(text)
	}
	a.must(ctx, "migrate", id, "--to", "one")
	second.goesOn(t)
	second.checked(t, ctx)
	free(t, ctx, a, b)
	moves, err := a.get(ctx, "migrations")
	if err != nil {
		t.Fatal(err)
	}
	var verbs []string
	for _, m := range moves {
		if m["verb"] == "home" && m["state"] != "done" {
			continue // on a busy machine it may take more than one attempt
		}
		verbs = append(verbs, fmt.Sprint(m["verb"], " ", m["state"]))
	}
	slices.Sort(verbs)
	if !slices.Equal(verbs, []string{"home done", "migrate done", "migrate done"}) {
		t.Errorf("%v", verbs)
	}
}

// TestASessionOfAnotherHostTakesTurns has a GPU shared by a session of its host and one of
// another host.
func TestASessionOfAnotherHostTakesTurns(t *testing.T) {
	built := build(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	hosts := farHosts(t, ctx, built, "a", "b")
	a, b := hosts[0], hosts[1]
	here := b.run(ctx, "--local", "--min-memory", "128MiB")
	id := b.on(t, ctx, "one")
	shared := func() (bool, error) {
		text, err := b.gpuctl(ctx, "-o", "json", "describe", "session", id)
		return strings.Contains(text, `"shared": true`), err
	}
	if is, err := shared(); is || err != nil {
		t.Fatalf("alone, and it takes turns: %v %v", is, err)
	}
	there := a.run(ctx, "--remote", "only", "--min-memory", "128MiB")
	a.on(t, ctx, "b/one")
	testkit.Until(t, "they take turns", func() error {
		is, err := shared()
		return errors.Join(err, testkit.Want(is, "no turns"))
	})
	here.goesOn(t)
	there.goesOn(t)
	there.checked(t, ctx)
	testkit.Until(t, "it is alone again", func() error {
		is, err := shared()
		return errors.Join(err, testkit.Want(!is, "turns"))
	})
	here.goesOn(t)
	here.checked(t, ctx)
	free(t, ctx, a, b)
}

// TestHostsOfALeaseDie kills each process of both hosts while a session is on a GPU of
// another host.
func TestHostsOfALeaseDie(t *testing.T) {
	built := build(t)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	hosts := farHosts(t, ctx, built, "a", "b", "c")
	complete(ctx, t, hosts)
	a, b, c := hosts[0], hosts[1], hosts[2]
	only := []string{"--remote", "only", "--gpu", `id == "b/one"`} // c has one, too

	// The lender's hostd: the session goes on, the next hostd finds the lease.
	work := a.run(ctx, only...)
	a.on(t, ctx, "b/one")
	work.goesOn(t)
	b.kill()
	work.goesOn(t)
	b.start()
	testkit.Until(t, "the lender knows its lease", func() error {
		text, err := b.gpuctl(ctx, "inventory")
		return errors.Join(err, testkit.Want(strings.Contains(text, "lent to a")))
	})
	work.goesOn(t)
	oneOwner(t, ctx, c)

	// The borrower's hostd, and the leader: the session goes on.
	a.kill()
	work.goesOn(t)
	a.start()
	a.on(t, ctx, "b/one")
	l, _, err := leader(ctx, hosts)
	if err != nil {
		t.Fatal(err)
	}
	l.kill()
	work.goesOn(t)
	l.start()
	work.checked(t, ctx)
	free(t, ctx, a, b, c)

	// The borrower's application: its lease ends.
	work = a.run(ctx, only...)
	a.on(t, ctx, "b/one")
	all, err := a.sessions(ctx)
	if err != nil || len(all) != 1 {
		t.Fatal(all, err)
	}
	if err := syscall.Kill(all[0].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-work.ended
	free(t, ctx, a, b, c)

	// The far executor: the session is lost, and says so.
	work = a.run(ctx, only...)
	id := a.on(t, ctx, "b/one")
	work.goesOn(t)
	far, err := farExecutors(b)
	if err != nil || len(far) == 0 {
		t.Fatalf("%v %v", far, err)
	}
	for _, pid := range far {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	if err := <-work.ended; err == nil {
		t.Errorf("it went on without its GPU: %s", work.out)
	}
	if text := a.log.String(); !strings.Contains(text, id) || !strings.Contains(text, "b/one") {
		t.Errorf("hostd says nothing about it")
	}
	free(t, ctx, a, b, c)
}

// farExecutors returns the processes of a host's leases, from gpuguest's records.
func farExecutors(h *host) ([]int, error) {
	records, err := filepath.Glob(filepath.Join(h.dir, "guest", "leases", "*", "lease.json"))
	if err != nil {
		return nil, err
	}
	var out []int
	for _, path := range records {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended meanwhile
		}
		var rec struct {
			PID int `json:"pid"`
		}
		if err := json.Unmarshal(data, &rec); err == nil && rec.PID > 0 {
			out = append(out, rec.PID)
		}
	}
	return out, nil
}

// freePort returns the number of a port that nothing listens on now.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}
