package member

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/remote"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// TestCrashOfInit starts a host again that crashed at some step of Init.
func TestCrashOfInit(t *testing.T) {
	t.Parallel()
	steps := map[string]struct {
		member bool
		undo   func(t *testing.T, m *machine, id identity)
	}{
		"authority alone": {false, func(t *testing.T, m *machine, _ identity) {
			remove(t, identityPath(m.dir), filepath.Join(m.dir, "raft"), filepath.Join(m.dir, "pki", "node.crt"), filepath.Join(m.dir, "pki", "node.key"))
		}},
		"before node.json": {false, func(t *testing.T, m *machine, _ identity) {
			remove(t, identityPath(m.dir), filepath.Join(m.dir, "raft"))
		}},
		"before raft": {true, func(t *testing.T, m *machine, id identity) {
			id.Found = true
			write(t, m, id)
			remove(t, filepath.Join(m.dir, "raft"))
		}},
		"before the first entries are noted": {true, func(t *testing.T, m *machine, id identity) {
			id.Found = true
			write(t, m, id)
		}},
		"complete": {true, func(*testing.T, *machine, identity) {}},
	}
	for name, step := range steps {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := testkit.Context(t)
			m := newMachine(t, "a")
			if err := m.Init(ctx, &clusterv1.InitRequest{}); err != nil {
				t.Fatal(err)
			}
			id := m.member().identity
			m.crash()
			step.undo(t, m, id)
			m.start(ctx)
			if (m.member() != nil) != step.member {
				t.Fatalf("member: %v", m.member() != nil)
			}
			if !step.member {
				if err := m.Init(ctx, &clusterv1.InitRequest{}); err != nil {
					t.Fatal(err)
				}
			} else if m.Self().ID != id.ID {
				t.Errorf("%v, not %v", m.Self(), id)
			}
			complete(ctx, t, []*machine{m})
			b := newMachine(t, "b")
			if err := b.Join(ctx, &clusterv1.JoinRequest{Token: m.token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
				t.Fatal(err)
			}
			complete(ctx, t, []*machine{m, b})
		})
	}
}

// TestCrashOfJoin does so with Join. The token is used up by then; with a new
// one the same host comes in under the same name and address.
func TestCrashOfJoin(t *testing.T) {
	t.Parallel()
	steps := map[string]struct {
		member bool
		undo   func(t *testing.T, m *machine)
	}{
		"let in, nothing noted": {false, func(t *testing.T, m *machine) {
			remove(t, identityPath(m.dir), filepath.Join(m.dir, "raft"), filepath.Join(m.dir, "pki"))
		}},
		"before node.json": {false, func(t *testing.T, m *machine) {
			remove(t, identityPath(m.dir), filepath.Join(m.dir, "raft"))
		}},
		"before raft": {true, func(t *testing.T, m *machine) {
			remove(t, filepath.Join(m.dir, "raft"))
		}},
		"complete": {true, func(*testing.T, *machine) {}},
	}
	for name, step := range steps {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := testkit.Context(t)
			a := cluster(ctx, t, "a")[0]
			b := newMachine(t, "b")
			// It is let in, and then it is gone.
			gone := b.letIn(ctx, t, a)
			step.undo(t, b)
			b.start(ctx)
			if (b.member() != nil) != step.member {
				t.Fatalf("member: %v", b.member() != nil)
			}
			if !step.member {
				if err := b.Join(ctx, &clusterv1.JoinRequest{Token: a.token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
					t.Fatal(err)
				}
			} else if b.Self().ID != gone {
				t.Errorf("%v, not %v", b.Self(), gone)
			}
			complete(ctx, t, []*machine{a, b})
			if err := a.view(ctx).Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// letIn is what Join does up to the moment before the membership begins.
func (m *machine) letIn(ctx context.Context, t *testing.T, by *machine) (id string) {
	t.Helper()
	token := decode(t, by.token(ctx, &clusterv1.CreateTokenRequest{}))
	next, l, err := m.begin(ctx, "", "")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	key, csr, err := newRequest()
	if err != nil {
		t.Fatal(err)
	}
	res, err := remote.Enroll(ctx, token, &clusterv1.EnrollRequest{Csr: csr, Host: next.Host, HostId: next.ID, Address: next.Address, Protocol: state.Protocol})
	if err != nil {
		t.Fatal(err)
	}
	next.Cluster = res.GetClusterId()
	if err := m.joined(token, next, res, key); err != nil {
		t.Fatal(err)
	}
	m.stop()
	return next.ID
}

func decode(t *testing.T, text string) pki.Token {
	t.Helper()
	token, err := pki.DecodeToken(text)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func remove(t *testing.T, paths ...string) {
	t.Helper()
	for _, p := range paths {
		if err := os.RemoveAll(p); err != nil {
			t.Fatal(err)
		}
	}
}

func write(t *testing.T, m *machine, id identity) {
	t.Helper()
	if err := id.write(m.dir); err != nil {
		t.Fatal(err)
	}
}

// TestDamaged starts hosts whose folder is not as they left it.
func TestDamaged(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	m := newMachine(t, "a")
	if err := m.Init(ctx, &clusterv1.InitRequest{}); err != nil {
		t.Fatal(err)
	}
	m.stop()
	good, err := os.ReadFile(identityPath(m.dir))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ text, want string }{
		"cut":    {string(good[:len(good)/2]), "node.json"},
		"empty":  {"", "node.json"},
		"newer":  {strings.Replace(string(good), `"version": 1`, `"version": 2`, 1), "version 2"},
		"no pki": {string(good), "certificate"},
	} {
		if err := os.WriteFile(identityPath(m.dir), []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if name == "no pki" {
			if err := os.Rename(filepath.Join(m.dir, "pki"), filepath.Join(m.dir, "kip")); err != nil {
				t.Fatal(err)
			}
		}
		err := m.open(ctx)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		m.Node = nil
		if name == "no pki" {
			if err := os.Rename(filepath.Join(m.dir, "kip"), filepath.Join(m.dir, "pki")); err != nil {
				t.Fatal(err)
			}
		}
	}
	// The port is another's.
	if err := os.WriteFile(identityPath(m.dir), good, 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", m.port)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.open(ctx); err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("%v", err)
	}
	m.Node = nil
	l.Close()
	m.start(ctx)
	complete(ctx, t, []*machine{m})
}
