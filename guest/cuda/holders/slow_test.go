package holders

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/glimpse"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// What a process was started with is in its memory, which may be a file of a server of its user that
// does not answer. Nobody may wait for that with a look at all processes.
func TestProcessThatCannotBeReadKeepsNoLookWaiting(t *testing.T) {
	dev := t.TempDir()
	f, err := os.Create(filepath.Join(dev, "nvidia0"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	pid := testkit.Unreadable(t, f)
	r := Roots{Dev: dev, Reads: &glimpse.Reads{}}
	began := time.Now()
	looked := make(chan *Look, 1)
	go func() {
		l, err := r.Take(false)
		if err != nil {
			t.Error(err)
		}
		looked <- l
	}()
	select {
	case l := <-looked:
		if h := l.Holders[pid]; h == nil || h.Nodes[0] != "nvidia0" || h.Command == "" {
			t.Errorf("%v after %v", h, time.Since(began))
		}
		if v := r.Variable(pid, "GPUCTL_TOKEN"); v != "" || r.Loads(pid, "libcuda.so") {
			t.Errorf("its environment has %q", v)
		}
	case <-time.After(20 * time.Second):
		t.Error("the look waits for a process")
	}
}
