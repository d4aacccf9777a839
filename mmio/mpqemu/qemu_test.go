package mpqemu_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/mpqemu"
)

// pair returns the two ends of a connection, ours and QEMU's.
func pair(t testing.TB) (*net.UnixConn, *os.File) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "device"), os.NewFile(uintptr(fds[1]), "qemu")
	c, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { theirs.Close() })
	return c.(*net.UnixConn), theirs
}

// machine is a real QEMU whose processor does not run: the test is its processor.
type machine struct {
	t    testing.TB
	conn net.Conn
	in   *bufio.Reader
	kill func()
}

const memory = 64 << 20

func start(t testing.TB, theirs *os.File) *machine {
	t.Helper()
	program, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		t.Fatal("qemu-system-x86_64 is not installed: make setup")
	}
	dir, err := os.MkdirTemp("", "mpqemu") // short, as a socket's path is limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "qtest"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	c := exec.CommandContext(
		ctx, program, "-nodefaults", "-no-user-config", "-display", "none", "-S", "-accel", "tcg", "-m", strconv.Itoa(memory>>20),
		"-object", fmt.Sprintf("memory-backend-memfd,id=ram,size=%d,share=on", memory), "-machine", "pc,memory-backend=ram",
		"-device", "x-pci-proxy-dev,id=gpu,addr=4,fd=3", "-qtest", "unix:"+filepath.Join(dir, "qtest"), "-qtest-log", "none",
	)
	c.ExtraFiles = []*os.File{theirs}
	var said strings.Builder
	c.Stdout, c.Stderr = &said, &said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	ended := make(chan error, 1)
	go func() {
		err := c.Wait()
		_ = l.Close() // ends Accept
		ended <- err
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		if t.Failed() {
			t.Logf("QEMU: %s", said.String())
		}
	})
	conn, err := l.Accept()
	if err != nil {
		t.Fatalf("QEMU did not start: %v: %s", err, said.String())
	}
	t.Cleanup(func() { conn.Close() })
	return &machine{t, conn, bufio.NewReader(conn), cancel}
}

func (m *machine) do(format string, args ...any) string {
	m.t.Helper()
	if _, err := fmt.Fprintf(m.conn, format+"\n", args...); err != nil {
		m.t.Fatal(err)
	}
	for {
		line, err := m.in.ReadString('\n')
		if err != nil {
			m.t.Fatalf("%s: %v", fmt.Sprintf(format, args...), err)
		}
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), "OK"); ok {
			return strings.TrimSpace(rest)
		}
		if !strings.HasPrefix(line, "IRQ") {
			m.t.Fatalf("%s: %s", fmt.Sprintf(format, args...), line)
		}
	}
}

func (m *machine) get(format string, args ...any) uint64 {
	m.t.Helper()
	v, err := strconv.ParseUint(m.do(format, args...), 0, 64)
	if err != nil {
		m.t.Fatal(err)
	}
	return v
}

func (m *machine) config(reg uint32) uint32 {
	m.t.Helper()
	m.do("outl 0xcf8 %#x", 0x80000000|4<<11|reg)
	return uint32(m.get("inl 0xcfc"))
}

func (m *machine) setConfig(reg, v uint32) {
	m.t.Helper()
	m.do("outl 0xcf8 %#x", 0x80000000|4<<11|reg)
	m.do("outl 0xcfc %#x", v)
}

// registers is a device that keeps what is written to it.
type registers struct {
	mu     sync.Mutex
	now    map[mmio.Access]uint64
	log    []mmio.Access
	resets int
}

func key(a mmio.Access) mmio.Access { return mmio.Access{BAR: a.BAR, Offset: a.Offset} }

func (r *registers) Read(a mmio.Access) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.log = append(r.log, a)
	return r.now[key(a)]
}

func (r *registers) Write(a mmio.Access) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.log = append(r.log, a)
	if r.now == nil {
		r.now = map[mmio.Access]uint64{}
	}
	r.now[key(a)] = a.Data
}

func (r *registers) Reset(mmio.VM) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.resets++
	r.now = nil
}

func function() mmio.Function {
	return mmio.Function{
		Vendor: 0x10de, Device: 0x06d8, Class: 0x030000, Revision: 0xa3,
		BARs: [6]mmio.Window{0: {Size: 1 << 25}, 1: {Size: 1 << 27, Prefetchable: true, Wide: true}, 3: {Size: 1 << 16}},
	}
}

// serve starts a server, and returns it and its end.
func serve(t testing.TB, conn *net.UnixConn, d mmio.Device) (*mpqemu.Server, <-chan error) {
	t.Helper()
	s, err := mpqemu.New(conn, 5, function())
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		ended <- s.Serve(ctx, d)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return s, ended
}

// up starts a QEMU with a device, and enables its BARs.
func up(t testing.TB, d mmio.Device) (*machine, *mpqemu.Server, <-chan error) {
	ours, theirs := pair(t)
	s, ended := serve(t, ours, d)
	m := start(t, theirs)
	m.setConfig(0x10, 0xe0000000)
	m.setConfig(0x14, 0xd0000000)
	m.setConfig(0x1c, 0xc0000000)
	m.setConfig(4, 2)
	return m, s, ended
}

func TestRealQEMUReadsAndWritesBARs(t *testing.T) {
	d := &registers{}
	m, s, _ := up(t, d)
	if v := m.config(0); v != 0x06d810de {
		t.Errorf("ids %#x", v)
	}
	if v := m.config(8); v != 0x030000a3 {
		t.Errorf("class %#x", v)
	}
	m.do("writel 0xe0001704 0xc0001234")
	m.do("writew 0xd0000010 0xbeef")
	m.do("writeb 0xc000ffff 0x7f")
	m.do("writeq 0xe1fffff8 0x1122334455667788")
	for _, c := range []struct {
		command string
		want    uint64
	}{{"readl 0xe0001704", 0xc0001234}, {"readw 0xd0000010", 0xbeef}, {"readb 0xc000ffff", 0x7f}, {"readl 0xe0000000", 0}} {
		if v := m.get("%s", c.command); v != c.want {
			t.Errorf("%s: %#x, want %#x", c.command, v, c.want)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.log) == 0 || d.log[0] != (mmio.Access{VM: 5, BAR: 0, Size: 4, Write: true, Offset: 0x1704, Data: 0xc0001234}) {
		t.Errorf("first access %v", d.log)
	}
	if s.Refused() != 0 {
		t.Errorf("%d accesses refused", s.Refused())
	}
}

func TestMovedBARIsServedAtItsNewAddress(t *testing.T) {
	d := &registers{}
	m, _, _ := up(t, d)
	m.do("writel 0xe0000100 1")
	m.setConfig(0x10, 0xa0000000)
	if v := m.get("readl 0xa0000100"); v != 1 {
		t.Errorf("at the new address: %#x", v)
	}
	if v := m.get("readl 0xe0000100"); v == 1 {
		t.Error("still at the old address")
	}
}

func TestResetOfTheMachineResetsTheDevice(t *testing.T) {
	d := &registers{}
	m, _, _ := up(t, d)
	d.mu.Lock()
	before := d.resets
	d.mu.Unlock()
	m.do("writel 0xe0000100 1")
	m.do("outb 0xcf9 0x06") // PIIX's reset control
	testkit.Until(t, "the reset", func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.resets == before {
			return errors.New("no reset")
		}
		return nil
	})
	if v := m.config(4); v&2 != 0 {
		t.Errorf("command and status %#x after the reset", v)
	}
}

func TestDeviceReadsAndWritesMemoryOfTheVM(t *testing.T) {
	m, s, _ := up(t, &registers{})
	g := s.Guest()
	m.do("writeq 0x100000 0x8877665544332211")
	p := make([]byte, 8)
	if err := g.ReadMemory(0x100000, p); err != nil || string(p) != "\x11\x22\x33\x44\x55\x66\x77\x88" {
		t.Errorf("% x, %v", p, err)
	}
	if err := g.WriteMemory(0x200003, []byte{1, 2, 3}); err != nil {
		t.Error(err)
	}
	if v := m.get("readl 0x200002"); v != 0x03020100 {
		t.Errorf("%#x", v)
	}
	if g.MemorySize() < memory {
		t.Errorf("memory ends at %#x", g.MemorySize())
	}
	for _, at := range []uint64{memory, 0xe0000000, ^uint64(0) - 3, 1 << 47} {
		if err := g.ReadMemory(at, p); !errors.Is(err, mpqemu.ErrNoMemory) {
			t.Errorf("read at %#x: %v", at, err)
		}
		if err := g.WriteMemory(at, p); !errors.Is(err, mpqemu.ErrNoMemory) {
			t.Errorf("write at %#x: %v", at, err)
		}
	}
}

func TestServeEndsWithQEMU(t *testing.T) {
	m, _, ended := up(t, &registers{})
	m.kill()
	if err := <-ended; err != nil {
		t.Errorf("QEMU was killed: %v", err)
	}
}

// BenchmarkRoundTrip is a read of a BAR from QEMU's tester to the device and back.
func BenchmarkRoundTrip(b *testing.B) {
	m, _, _ := up(b, &registers{})
	for b.Loop() {
		m.do("readl 0xe0000000")
	}
}
