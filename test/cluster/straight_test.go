package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// ballast is what the session of the test below has on its GPU and does not touch, in MiB.
const ballast = 48

// moved is what a migration has reported.
type moved struct {
	Result *struct {
		Precopied uint64 `json:"bytes_precopied"`
		Frozen    uint64 `json:"bytes_frozen"`
		Straight  uint64 `json:"bytes_straight"`
		Detour    string `json:"detour"`
	} `json:"result"`
}

// migrate moves a session, and returns what was reported.
func (h *host) migrate(ctx context.Context, id, to string) moved {
	h.t.Helper()
	text := h.must(ctx, "-o", "json", "migrate", id, "--to", to)
	var last moved
	for dec := json.NewDecoder(strings.NewReader(text)); dec.More(); {
		var m moved
		if err := dec.Decode(&m); err != nil {
			h.t.Fatalf("%v: %s", err, text)
		}
		if m.Result != nil {
			last = m
		}
	}
	if last.Result == nil {
		h.t.Fatalf("no result: %s", text)
	}
	return last
}

// carried returns how many bytes the connections of a session's carrier have carried since it
// was started, to the far executor and from it. What it returns may be some seconds old.
func (h *host) carried(ctx context.Context, id string) (to, from uint64, err error) {
	text, err := h.gpuctl(ctx, "-o", "json", "describe", "session", id)
	if err != nil {
		return 0, 0, err
	}
	for field, n := range map[string]*uint64{"to_far": &to, "from_far": &from} {
		m := regexp.MustCompile(`"` + field + `":\s*\{([^}]*)\}`).FindStringSubmatch(text)
		if m == nil {
			return 0, 0, fmt.Errorf("no %s: %s", field, text)
		}
		for _, x := range regexp.MustCompile(`"(?:plain|compressed_to)":\s*(\d+)`).FindAllStringSubmatch(m[1], -1) {
			var k uint64
			if _, err := fmt.Sscan(x[1], &k); err != nil {
				return 0, 0, err
			}
			*n += k
		}
	}
	return to, from, nil
}

// TestContentsGoStraightFromHostToHost moves a session of one host between GPUs of two others.
// The connections of its own host carry its calls, and not its contents.
func TestContentsGoStraightFromHostToHost(t *testing.T) {
	built := build(t)
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	hosts := farHosts(t, ctx, built, "a", "b", "c")
	complete(ctx, t, hosts)
	a, b, c := hosts[0], hosts[1], hosts[2]

	stop := filepath.Join(t.TempDir(), "stop")
	args := []string{"--kib", "64", "--ballast", fmt.Sprint(ballast)}
	out := &testkit.Log{}
	cmd := a.command(ctx, append([]string{"run", "--remote", "only", "--gpu", `id == "b/one"`, "--", built.program("endure"), "--until", stop, "--pause", "50"}, args...)...)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	app := &app{host: a, out: out, ended: make(chan error, 1), stop: func() { _ = os.WriteFile(stop, nil, 0o600) }}
	go func() { app.ended <- cmd.Wait() }()
	t.Cleanup(app.stop)
	id := a.on(t, ctx, "b/one")
	app.goesOn(t)
	testkit.Until(t, "what the application wrote is counted", func() error {
		up, _, err := a.carried(ctx, id)
		return errors.Join(err, testkit.Want(up > ballast<<20, up))
	})

	if plan := a.must(ctx, "migrate", id, "--to", "c", "--plan"); !strings.Contains(plan, "b → c") {
		t.Errorf("the plan does not name the path: %s", plan)
	}
	for _, to := range []string{"c/one", "b/one"} {
		m := a.migrate(ctx, id, to)
		copied := m.Result.Precopied + m.Result.Frozen
		if m.Result.Straight != copied || copied < ballast<<20 || m.Result.Detour != "" {
			t.Errorf("to %s: %d of %d bytes went straight: %s", to, m.Result.Straight, copied, m.Result.Detour)
		}
		a.on(t, ctx, to)
		app.goesOn(t)
		// These only grow: had contents passed through the application's host, they would never be
		// so small.
		testkit.Until(t, "the connections to "+to+" have carried little", func() error {
			up, down, err := a.carried(ctx, id)
			if err != nil {
				return err
			}
			return testkit.Want(up+down < ballast<<20/4, up, down, "of", copied)
		})
	}

	app.stop()
	if err := <-app.ended; err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	m := regexp.MustCompile(`result OK (\d+) [0-9a-f]+`).FindStringSubmatch(out.String())
	if m == nil {
		t.Fatalf("no result: %s", out)
	}
	// The processor alone, without OpenCL.
	alone := a.command(ctx)
	alone.Path, alone.Args = built.program("endure"), append([]string{"endure", "--cpu", "--iterations", m[1]}, args...)
	want, err := alone.Output()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(want), m[0]) {
		t.Errorf("%s, on the processor alone it is %s", m[0], want)
	}
	free(t, ctx, a, b, c)
}
