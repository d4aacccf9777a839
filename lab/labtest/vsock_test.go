package labtest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/lab"
)

// TestVsock runs the two ends of vsock, gpuguest's and hostd's, on the kernel of a host: by its
// loopback, as few machines have any.
func TestVsock(t *testing.T) {
	l := Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	h := l.Hosts()[0]
	if out, err := h.Run(ctx, "modprobe vsock_loopback"); err != nil {
		t.Skipf("the host's kernel has no vsock_loopback: %v %s", err, out)
	}
	root, err := lab.Root()
	must(t, err)
	for _, pkg := range []string{"./cmd/gpuguest", "./hostd/cards/platform"} {
		program := filepath.Join(t.TempDir(), "vsock.test")
		build := exec.CommandContext(ctx, "go", "test", "-c", "-o", program, pkg)
		build.Dir, build.Env = root, append(os.Environ(), "CGO_CFLAGS=-O2 -g -w")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", pkg, err, out)
		}
		must(t, h.Put(ctx, program, "/root/vsock.test"))
		out, err := h.Run(ctx, "cd /root && ./vsock.test -test.v -test.run OfThisMachine")
		if err != nil || !strings.Contains(out, "--- PASS") || strings.Contains(out, "--- SKIP") {
			t.Errorf("%s: %v\n%s", pkg, err, out)
		}
	}
}
