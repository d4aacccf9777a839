package cli_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/gpuctl/gpuctl/hostd/cards/libvirthook"
)

// TestHookScripts installs the real hook into the files of another machine,
// $ROOT, whose hostd is a hook server alone.
func TestHookScripts(t *testing.T) {
	built := t.TempDir()
	for name, flags := range map[string]string{"gpuctl-hook": "-s -w", "old-hook": "-s -w -buildid=old"} {
		build := exec.Command("go", "build", "-trimpath", "-ldflags="+flags, "-o", filepath.Join(built, name), "github.com/gpuctl/gpuctl/cmd/gpuctl-hook")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/hook", UpdateScripts: os.Getenv("UPDATE") != "", ContinueOnError: true,
		Setup: func(e *testscript.Env) error {
			root, err := os.MkdirTemp("", "gx") // a socket's path must be short
			if err != nil {
				return err
			}
			e.Defer(func() { _ = os.RemoveAll(root) })
			e.Setenv("ROOT", root)
			e.Setenv("HOOK", filepath.Join(built, "gpuctl-hook"))
			e.Setenv("OLD", filepath.Join(built, "old-hook"))
			e.Setenv("NO_COLOR", "1")
			e.Setenv("GORACE", "atexit_sleep_ms=0") // else a second for every command
			return os.MkdirAll(filepath.Join(root, "run/gpuctl"), 0o700)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"hookserver": hookServer},
	})
}

// hookServer has a hostd answer hooks until the script ends.
func hookServer(ts *testscript.TestScript, _ bool, _ []string) {
	l, err := libvirthook.Listen(filepath.Join(ts.Getenv("ROOT"), "run/gpuctl"))
	ts.Check(err)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- libvirthook.New(nil, libvirthook.WithUser(os.Getuid())).Serve(ctx, l) }()
	ts.Defer(func() { stop(); <-ended })
}
