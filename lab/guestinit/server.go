package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/lab/guestinit/wire"
)

// maxOutput bounds what a program's output adds to an answer, in bytes.
const maxOutput = 256 << 10

type server struct {
	pci     string // where sysfs lists PCI devices
	hangUps atomic.Int64

	mu    sync.Mutex
	child int // that run waits for; 0: none
}

func newServer() *server { return &server{pci: "/sys/bus/pci/devices"} }

func (s *server) handle(ctx context.Context, q *wire.Request) *wire.Answer {
	a := new(wire.Answer)
	var err error
	switch q.Op {
	case wire.Ping:
		a.Status, err = s.status()
	case wire.List:
		a.Devices, err = s.devices()
	case wire.Read, wire.Write:
		a.Value, err = s.register(q)
	case wire.Exec:
		err = s.run(ctx, q, a)
	default:
		err = fmt.Errorf("unknown operation %q", q.Op)
	}
	if err != nil {
		a.Error = err.Error()
	}
	return a
}

func (s *server) status() (*wire.Status, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	up, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return nil, err
	}
	var seconds float64
	if f := strings.Fields(string(up)); len(f) > 0 {
		seconds, _ = strconv.ParseFloat(f[0], 64)
	}
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return nil, err
	}
	return &wire.Status{
		BootID: strings.TrimSpace(string(id)), UptimeSeconds: seconds,
		Kernel: strings.TrimSpace(string(release)), HangUps: s.hangUps.Load(),
	}, nil
}

func (s *server) devices() ([]wire.Device, error) {
	list, err := os.ReadDir(s.pci)
	if err != nil {
		return nil, err
	}
	var all []wire.Device
	for _, e := range list {
		dir := filepath.Join(s.pci, e.Name())
		vendor, device, class := attribute(dir, "vendor"), attribute(dir, "device"), attribute(dir, "class")
		if vendor == "" || device == "" { // it is going away
			continue
		}
		d := wire.Device{Address: e.Name(), ID: vendor + ":" + device, Class: class}
		if link, err := os.Readlink(filepath.Join(dir, "driver")); err == nil {
			d.Driver = filepath.Base(link)
		}
		text, err := os.ReadFile(filepath.Join(dir, "resource"))
		if err != nil {
			continue
		}
		for i, line := range strings.Split(string(text), "\n") {
			f := strings.Fields(line)
			if i == 6 || len(f) < 2 {
				break
			}
			first, err1 := strconv.ParseUint(f[0], 0, 64)
			last, err2 := strconv.ParseUint(f[1], 0, 64)
			var size uint64
			if err1 == nil && err2 == nil && last > first {
				size = last - first + 1
			}
			d.BARs = append(d.BARs, size)
		}
		all = append(all, d)
	}
	return all, nil
}

// attribute reads a hexadecimal file without its 0x.
func attribute(dir, name string) string {
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return ""
	}
	return strings.TrimPrefix(strings.TrimSpace(string(b)), "0x")
}

// register reads or writes a register of a device through a mapping of its BAR.
func (s *server) register(q *wire.Request) (uint64, error) {
	if !slices.Contains([]int{1, 2, 4, 8}, q.Width) {
		return 0, fmt.Errorf("a register is 1, 2, 4 or 8 bytes wide, not %d", q.Width)
	}
	if q.BAR < 0 || q.BAR > 5 || q.Offset < 0 || q.Offset%int64(q.Width) != 0 || strings.ContainsRune(q.Device, '/') {
		return 0, errors.New("no such register")
	}
	dir := filepath.Join(s.pci, q.Device)
	// Nothing has switched on the memory of a device without a driver.
	if err := os.WriteFile(filepath.Join(dir, "enable"), []byte("1"), 0); err != nil {
		return 0, err
	}
	f, err := os.OpenFile(filepath.Join(dir, fmt.Sprintf("resource%d", q.BAR)), os.O_RDWR|os.O_SYNC, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if q.Offset+int64(q.Width) > st.Size() {
		return 0, fmt.Errorf("BAR %d of %s has %d bytes", q.BAR, q.Device, st.Size())
	}
	page := q.Offset &^ int64(os.Getpagesize()-1)
	m, err := unix.Mmap(int(f.Fd()), page, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return 0, fmt.Errorf("map BAR %d of %s: %w", q.BAR, q.Device, err)
	}
	defer func() { _ = unix.Munmap(m) }()
	return access(m[q.Offset-page:], q.Width, q.Op == wire.Write, q.Value), nil
}

// access is one load or store of width bytes: to a device it matters how many.
func access(at []byte, width int, write bool, v uint64) uint64 {
	p := unsafe.Pointer(&at[0])
	switch {
	case width == 1 && write:
		*(*uint8)(p) = uint8(v)
	case width == 1:
		v = uint64(*(*uint8)(p))
	case width == 2 && write:
		*(*uint16)(p) = uint16(v)
	case width == 2:
		v = uint64(*(*uint16)(p))
	case width == 4 && write:
		*(*uint32)(p) = uint32(v)
	case width == 4:
		v = uint64(*(*uint32)(p))
	case write:
		*(*uint64)(p) = v
	default:
		v = *(*uint64)(p)
	}
	return v
}

// run starts a program and waits for it, at most TimeoutSeconds.
func (s *server) run(ctx context.Context, q *wire.Request, a *wire.Answer) error {
	if len(q.Argv) == 0 {
		return errors.New("no program")
	}
	seconds := q.TimeoutSeconds
	if seconds <= 0 {
		seconds = 30
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(seconds)*time.Second)
	defer cancel()
	c := exec.CommandContext(ctx, q.Argv[0], q.Argv[1:]...)
	c.Stdin = bytes.NewReader(q.Input)
	var out, errs limited
	c.Stdout, c.Stderr = &out, &errs
	c.WaitDelay = time.Minute // for its output, on a host that is slow; one that leaves children behind ends by it, too
	s.mu.Lock()               // so that the child is known before it can end
	err := c.Start()
	if err == nil {
		s.child = c.Process.Pid
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	err = c.Wait()
	s.mu.Lock()
	s.child = 0
	s.mu.Unlock()
	a.Output, a.Errors = out.kept.Bytes(), errs.kept.Bytes()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		a.Exit = exit.ExitCode()
		return nil
	}
	return err
}

// reap collects orphans, which is the duty of process 1, but not the child that
// run waits for.
func (s *server) reap() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		var info unix.Siginfo
		if err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil); err != nil {
			return
		}
		pid := int(*(*int32)(unsafe.Pointer(uintptr(unsafe.Pointer(&info)) + siginfoPid)))
		if pid == 0 || pid == s.child {
			return
		}
		if _, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); err != nil {
			return
		}
	}
}

// siginfoPid is where siginfo_t has si_pid on amd64, in bytes.
const siginfoPid = 16

// limited keeps the first maxOutput bytes. It does not embed its buffer, whose
// ReadFrom would take everything.
type limited struct{ kept bytes.Buffer }

// Write implements io.Writer; it takes everything.
func (l *limited) Write(p []byte) (int, error) {
	if room := maxOutput - l.kept.Len(); room > 0 {
		l.kept.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}
