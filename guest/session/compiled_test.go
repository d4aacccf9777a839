package session

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// The next session of a program finds what the runtimes of the last one compiled. It does
// not find what was left by executors that did not end normally, nor anything if nothing is
// to be kept.
func TestNextSessionOfAProgramFindsWhatTheLastOneCompiled(t *testing.T) {
	for name, c := range map[string]struct {
		between func(b *bench)
		found   bool
	}{
		"ended":                 {func(*bench) {}, true},
		"executor was killed":   {func(b *bench) { b.l.generation(1).Kill() }, false},
		"gpuguest was replaced": {func(b *bench) { b.restart(func() {}); b.m.list()[0].end() }, true},
		"nothing is to be kept": {func(b *bench) { b.restart(func() {}); b.m.kept = nil; b.m.list()[0].end() }, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			cache := filepath.Join(b.m.sessionDir(b.id), executorsName, ".cache")
			if err := os.Mkdir(cache, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(cache, "kernel.so"), []byte("code"), 0o600); err != nil {
				t.Fatal(err)
			}
			c.between(b)
			b.conn.Close()
			testkit.Until(b.t, "the session is gone", func() error { return testkit.Want(len(b.m.list()) == 0, b.m.list()) })
			apps := filepath.Join(b.dir, "next")
			lis, err := net.ListenUnix("unix", &net.UnixAddr{Name: apps, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { lis.Close() })
			go func() { _ = b.m.ServeApps(lis) }()
			status, id := b.connectTo(apps, "tok")
			if status != 0 {
				t.Fatal(status, id)
			}
			got, err := os.ReadFile(filepath.Join(b.m.sessionDir(id), executorsName, ".cache", "kernel.so"))
			if found := string(got) == "code"; found != c.found {
				t.Errorf("found %q, %v", got, err)
			}
		})
	}
}
