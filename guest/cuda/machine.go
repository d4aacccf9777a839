package cuda

import (
	"context"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/internal/beneath"
)

// machine is what was found at one time: GPUs by NVML, holders by /proc.
type machine struct {
	*ask.Answer
	look *holders.Look
}

// look asks both. Nothing is changed by that.
func (m *Manager) look(ctx context.Context) (*machine, error) {
	var l *holders.Look
	var lerr error
	var wg sync.WaitGroup
	wg.Go(func() { l, lerr = m.cfg.Roots.Take(false) })
	a, err := m.ask.Call(ctx, ask.Request{Op: ask.Devices}, m.cfg.Deadlines.Look)
	wg.Wait()
	if err != nil {
		return nil, err
	}
	if lerr != nil {
		return nil, lerr
	}
	m.mu.Lock()
	m.seenAt = time.Now()
	m.mu.Unlock()
	return &machine{a, l}, nil
}

// gpu returns a GPU that the driver shows, or nil.
func (c *machine) gpu(u ask.UUID) *ask.GPU {
	for i := range c.GPUs {
		if c.GPUs[i].UUID == u {
			return &c.GPUs[i]
		}
	}
	return nil
}

// uuids returns the GPUs that the driver shows.
func (c *machine) uuids() []ask.UUID {
	var us []ask.UUID
	for _, g := range c.GPUs {
		us = append(us, g.UUID)
	}
	return us
}

// uses returns the GPUs that a process has memory on, and how much.
func (c *machine) uses(pid int) (us []ask.UUID, used []uint64) {
	for _, p := range c.Processes {
		if p.PID != pid {
			continue
		}
		if i := slices.Index(us, p.GPU); i >= 0 {
			used[i] = max(used[i], p.Used)
			continue
		}
		us, used = append(us, p.GPU), append(used, p.Used)
	}
	for i, u := range us {
		// A driver that does not tell how much a process has: at most what is in use.
		if g := c.gpu(u); used[i] == 0 && g != nil && g.Total > g.Free {
			used[i] = g.Total - g.Free
		}
	}
	return us, used
}

// availableMemory returns how much memory this machine can give without swapping.
func (m *Manager) availableMemory() (uint64, error) {
	if m.cfg.memory != nil {
		return m.cfg.memory()
	}
	b, err := beneath.ReadFile(m.procRoot(), "meminfo", 64<<10)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
			if f := strings.Fields(rest); len(f) > 0 {
				kib, err := strconv.ParseUint(f[0], 10, 54)
				return kib << 10, err
			}
		}
	}
	return 0, os.ErrNotExist
}

func (m *Manager) procRoot() string {
	if m.cfg.Roots.Proc != "" {
		return m.cfg.Roots.Proc
	}
	return "/proc"
}

// groupMemory returns how much more memory the control group of a process may use, and
// false if nothing limits it. The state that the driver takes is memory of the process.
func groupMemory(root, path string) (left uint64, limited bool) {
	number := func(dir, name string) (uint64, bool) {
		b, err := beneath.ReadFile(root, strings.TrimPrefix(dir+"/"+name, "/"), 256)
		if err != nil {
			return 0, false
		}
		n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		return n, err == nil
	}
	for path != "" && path != "/" {
		most, ok := number(path, "memory.max")
		if now, has := number(path, "memory.current"); ok && has {
			here := most - min(now, most)
			if !limited || here < left {
				left, limited = here, true
			}
		}
		path = path[:strings.LastIndexByte(path, '/')]
	}
	return left, limited
}
