package hostile

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// programs use OpenCL, each on a GPU of its own. See test/cl/abuse.c.
func programs() []client {
	var all []client
	for i, how := range []string{"scribble", "objects", "requests", "print"} {
		all = append(all, client{how, 1, func(ctx context.Context, t Target) int {
			cmd := exec.CommandContext(ctx, filepath.Join(t.Root, "bin", "gpuctl"), "run", "--gpu", fmt.Sprintf("id == %q", t.GPUs[i]), "--",
				filepath.Join(t.Root, "test/cl/bin/abuse"), how)
			cmd.Env = append(os.Environ(), "GPUCTL_HOST=unix://"+t.hostd())
			cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
			cmd.WaitDelay = 5 * time.Second
			var said head
			cmd.Stdout, cmd.Stderr = io.Discard, &said
			_ = cmd.Run() // that it is ended is what should be
			if strings.Contains(string(said), "at it") {
				return 1
			}
			return 0
		}})
	}
	return all
}

// head keeps the beginning of what is written.
type head []byte

func (h *head) Write(p []byte) (int, error) {
	*h = append(*h, p[:min(len(p), 1<<12-len(*h))]...)
	return len(p), nil
}
