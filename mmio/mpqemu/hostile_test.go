package mpqemu

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/mmio"
)

// nothing is a device that checks what it is asked.
type nothing struct{ t *testing.T }

func (n nothing) Read(a mmio.Access) uint64 { n.check(a); return ^uint64(0) }
func (n nothing) Write(a mmio.Access)       { n.check(a) }

func (n nothing) check(a mmio.Access) {
	if a.BAR != 0 || a.Offset+uint64(a.Size) > 4096 || a.Data&^mmio.Ones(a.Size) != 0 {
		n.t.Errorf("access %v", a)
	}
}

func ends(t *testing.T) (ours, theirs *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "end")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		out[i] = c.(*net.UnixConn)
		t.Cleanup(func() { c.Close() })
	}
	return out[0], out[1]
}

// run serves what was sent, and returns how Serve ended.
func run(t *testing.T, sent []byte, files ...int) (*Server, error) {
	t.Helper()
	ours, theirs := ends(t)
	s, err := New(ours, 1, mmio.Function{Vendor: 1, BARs: [6]mmio.Window{0: {Size: 4096}}})
	if err != nil {
		t.Fatal(err)
	}
	var oob []byte
	if len(files) > 0 {
		oob = unix.UnixRights(files...)
	}
	if len(sent) > 0 {
		if _, _, err := theirs.WriteMsgUnix(sent, oob, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := theirs.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	return s, s.Serve(t.Context(), nothing{t})
}

func sent(cmd command, body []byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(cmd))
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(body)))
	return append(b, body...)
}

func ram(t *testing.T, size int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("ram", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	return fd
}

func layout(start, size uint64, offset int64) []byte {
	b := make([]byte, memorySize)
	binary.LittleEndian.PutUint64(b, start)
	binary.LittleEndian.PutUint64(b[64:], size)
	binary.LittleEndian.PutUint64(b[128:], uint64(offset))
	return b
}

func TestMemoryThatIsNotInItsFileIsRefused(t *testing.T) {
	fd := ram(t, 8192)
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer closeAll(pipe[:])
	for name, c := range map[string]struct {
		body  []byte
		files []int
	}{
		"longer than its file":     {layout(0, 8193, 0), []int{fd}},
		"after the end":            {layout(0, 4096, 8192), []int{fd}},
		"before the beginning":     {layout(0, 4096, -4096), []int{fd}},
		"empty":                    {layout(0, 0, 0), []int{fd}},
		"huge":                     {layout(0, 1<<63, 0), []int{fd}},
		"a pipe":                   {layout(0, 4096, 0), []int{pipe[0]}},
		"without files":            {layout(0, 4096, 0), nil},
		"with more files than may": {layout(0, 4096, 0), []int{fd, fd, fd, fd, fd, fd, fd, fd, fd}},
	} {
		t.Run(name, func(t *testing.T) {
			before := open(t)
			s, err := run(t, sent(cmdMemory, c.body), c.files...)
			if !errors.Is(err, ErrProtocol) || s.Guest().MemorySize() != 0 {
				t.Errorf("%v, memory %#x", err, s.Guest().MemorySize())
			}
			if now := open(t); now > before+2 { // the test's own two ends are open until it ends
				t.Errorf("%d files were open, now %d", before, now)
			}
		})
	}
}

func open(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

func TestMemoryThatShrinksIsNoMemory(t *testing.T) {
	fd := ram(t, 8192)
	dup, err := unix.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	g := &guest{}
	defer g.close()
	if err := g.memory([]area{{0, 8192, 0}}, []int{dup}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	if err := g.ReadMemory(4094, make([]byte, 4)); !errors.Is(err, ErrNoMemory) {
		t.Error(err)
	}
	if err := g.WriteMemory(4094, make([]byte, 4)); !errors.Is(err, ErrNoMemory) {
		t.Error(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Size != 4096 {
		t.Errorf("a write made the file %d bytes long", st.Size)
	}
}

func TestInterruptThatBlocksIsRefused(t *testing.T) {
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer closeAll(pipe[:])
	if _, err := run(t, sent(cmdInterrupts, nil), pipe[1], pipe[0]); !errors.Is(err, ErrProtocol) {
		t.Error(err)
	}
}

func TestInterruptReachesKVM(t *testing.T) {
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(event)
	g := &guest{}
	defer g.close()
	g.Interrupt(true) // nobody to tell
	a, _ := unix.Dup(event)
	b, _ := unix.Dup(event)
	if err := g.interrupts([]int{a, b}); err != nil {
		t.Fatal(err)
	}
	g.Interrupt(false)
	g.Interrupt(true)
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(event), Events: unix.POLLIN}}, 10_000); n != 1 {
		t.Fatalf("no interrupt came: %v", err)
	}
	var p [8]byte
	if n, err := unix.Read(event, p[:]); n != 8 || err != nil || p[0] != 1 {
		t.Errorf("%d bytes, %v, %v", n, err, p)
	}
}

func FuzzMessages(f *testing.F) {
	config := make([]byte, configSize)
	config[0], config[8] = 0x10, 4
	access := make([]byte, accessSize)
	access[16], access[20] = 8, 1
	for _, b := range [][]byte{
		sent(cmdConfigRead, config), sent(cmdConfigWrite, config), sent(cmdBARRead, access), sent(cmdBARWrite, access),
		sent(cmdReset, nil), sent(cmdMemory, layout(0, 4096, 0)), sent(cmdInterrupts, nil), sent(cmdReturn, make([]byte, 8)),
		append(sent(cmdConfigWrite, []byte{4, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0}), sent(cmdBARRead, access)...),
	} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 2<<10 { // the answers fit into the socket, as nobody reads them
			return
		}
		if _, err := run(t, b); err != nil && !errors.Is(err, ErrProtocol) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatal(err)
		}
	})
}

// TestInterruptThatBlocksLaterHoldsNobodyUp: QEMU makes its file block after it was checked, and
// fills it. Then the interrupt waits, and not who sends it.
func TestInterruptThatBlocksLaterHoldsNobodyUp(t *testing.T) {
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(event)
	g := &guest{}
	a, _ := unix.Dup(event)
	b, _ := unix.Dup(event)
	if err := g.interrupts([]int{a, b}); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(event), unix.F_SETFL, 0); err != nil {
		t.Fatal(err)
	}
	full := []byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	if _, err := unix.Write(event, full); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		g.Interrupt(true)
	}
	g.close()
	var p [8]byte
	for range 2 { // what was written before, and then the interrupt
		if n, err := unix.Read(event, p[:]); n != 8 || err != nil {
			t.Fatalf("%d bytes, %v", n, err)
		}
	}
	if p[0] == 0 || p[7] != 0 {
		t.Errorf("the interrupt came as %v", p)
	}
}

// TestMemoryInAnotherFileSystemIsRefused: a read of it might never end.
func TestMemoryInAnotherFileSystemIsRefused(t *testing.T) {
	f, err := os.Open("/proc/self/status") // a regular file, as one of FUSE is
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := inMemory(int(f.Fd())); !errors.Is(err, ErrProtocol) {
		t.Error(err)
	}
	if err := inMemory(ram(t, 4096)); err != nil {
		t.Error(err)
	}
}
