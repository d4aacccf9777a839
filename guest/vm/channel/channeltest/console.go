package channeltest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const maxKept = 64 << 10 // most bytes that wait for a client

// Faults are what happens to bytes in transit, in either direction.
type Faults struct {
	Lose   float64       // share of chunks that are lost
	Garble float64       // share of chunks with one bit changed
	Repeat float64       // share of chunks that arrive twice
	Delay  time.Duration // delay of each chunk
	Rate   int           // bytes per second to the guest; 0: not limited
}

// Console is the channel of one VM.
type Console struct {
	tb     testing.TB
	socket string
	device string // symbolic link to the terminal

	mu       sync.Mutex
	faults   Faults
	master   *os.File
	slave    *os.File // kept open, so that the terminal exists while the guest does not read it
	client   net.Conn
	kept     []byte // what the guest has written while there was no client
	listener net.Listener
	wg       sync.WaitGroup
	toGuest  int64
	closed   bool
}

// New makes a channel, with its socket and its device in a new folder.
func New(tb testing.TB) *Console {
	tb.Helper()
	dir, err := os.MkdirTemp("", "console")
	if err != nil {
		tb.Fatal(err)
	}
	c := &Console{tb: tb, socket: filepath.Join(dir, "sock"), device: filepath.Join(dir, "hvc1")}
	c.plug()
	tb.Cleanup(func() {
		c.unplug()
		c.wg.Wait()
		os.RemoveAll(dir)
	})
	return c
}

// Socket returns the path of the host's end.
func (c *Console) Socket() string { return c.socket }

// Device returns the path of the guest's device file.
func (c *Console) Device() string { return c.device }

// Root adds files to the folder root, so that the channel looks like a virtio-serial port
// with this name.
func (c *Console) Root(root, name string) {
	c.tb.Helper()
	port := filepath.Join(root, "sys/class/virtio-ports/vport1p1")
	for _, dir := range []string{port, filepath.Join(root, "dev")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			c.tb.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(port, "name"), []byte(name+"\n"), 0o644); err != nil {
		c.tb.Fatal(err)
	}
	if err := os.Symlink(c.device, filepath.Join(root, "dev/vport1p1")); err != nil {
		c.tb.Fatal(err)
	}
}

// Set replaces the faults.
func (c *Console) Set(f Faults) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.faults = f
}

// ToGuest returns how many bytes the guest has got.
func (c *Console) ToGuest() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.toGuest
}

// Migrate does to the channel what a live migration does: the guest's terminal hangs up
// and is replaced by one that echoes. The host's socket is replaced, and its client is
// disconnected.
func (c *Console) Migrate() {
	c.tb.Helper()
	c.unplug()
	c.mu.Lock()
	c.closed = false
	c.mu.Unlock()
	c.plug()
}

// Drop disconnects the client, as a restart of the host's daemon does.
func (c *Console) Drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.client != nil {
		_ = c.client.Close()
		c.client = nil
	}
}

// Inject sends bytes to the guest, as if a client had written them.
func (c *Console) Inject(b []byte) {
	c.tb.Helper()
	c.mu.Lock()
	m := c.master
	c.mu.Unlock()
	if _, err := m.Write(b); err != nil {
		c.tb.Error(err)
	}
}

func (c *Console) plug() {
	c.tb.Helper()
	master, slave, name, err := terminal()
	if err != nil {
		c.tb.Fatal(err)
	}
	_ = os.Remove(c.device)
	if err := os.Symlink(name, c.device); err != nil {
		c.tb.Fatal(err)
	}
	_ = os.Remove(c.socket)
	l, err := net.Listen("unix", c.socket)
	if err != nil {
		c.tb.Fatal(err)
	}
	c.mu.Lock()
	c.master, c.slave, c.listener, c.kept = master, slave, l, nil
	c.mu.Unlock()
	c.wg.Go(func() { c.fromGuest(master) })
	c.wg.Go(func() { c.accept(l, master) })
}

func (c *Console) unplug() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.closed = true
	_ = c.listener.Close()
	_ = c.slave.Close()
	_ = c.master.Close()
	if c.client != nil {
		_ = c.client.Close()
		c.client = nil
	}
}

// fromGuest sends what the guest writes to the present client.
func (c *Console) fromGuest(master *os.File) {
	buf := make([]byte, 4095)
	for {
		n, err := master.Read(buf)
		if err != nil {
			return
		}
		for _, chunk := range c.spoil(buf[:n]) {
			c.mu.Lock()
			client := c.client
			if client == nil && len(c.kept) < maxKept {
				c.kept = append(c.kept, chunk...)
			}
			c.mu.Unlock()
			if client != nil {
				_, _ = client.Write(chunk)
			}
		}
	}
}

func (c *Console) accept(l net.Listener, master *os.File) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			_ = conn.Close()
			return
		}
		c.client = conn
		kept := c.kept
		c.kept = nil
		c.mu.Unlock()
		_, _ = conn.Write(kept)
		c.toTerminal(conn, master) // a second client stays connected and waits here
	}
}

func (c *Console) toTerminal(conn net.Conn, master *os.File) {
	defer func() {
		_ = conn.Close()
		c.mu.Lock()
		if c.client == conn {
			c.client = nil
		}
		c.mu.Unlock()
	}()
	buf := make([]byte, 1024) // as large as the ring of a Xen console
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return
		}
		c.mu.Lock()
		rate := c.faults.Rate
		c.toGuest += int64(n)
		c.mu.Unlock()
		if rate > 0 {
			time.Sleep(time.Duration(n) * time.Second / time.Duration(rate))
		}
		for _, chunk := range c.spoil(buf[:n]) {
			if _, err := master.Write(chunk); err != nil {
				return
			}
		}
	}
}

// spoil applies the faults to a chunk.
func (c *Console) spoil(b []byte) [][]byte {
	c.mu.Lock()
	f := c.faults
	c.mu.Unlock()
	if f.Delay > 0 {
		time.Sleep(f.Delay)
	}
	switch p := rand.Float64(); { //nolint:gosec // faults need no secrecy
	case p < f.Lose:
		return nil
	case p < f.Lose+f.Garble:
		spoilt := append([]byte(nil), b...)
		spoilt[rand.IntN(len(b))] ^= 1 << rand.IntN(8) //nolint:gosec // nor does this
		return [][]byte{spoilt}
	case p < f.Lose+f.Garble+f.Repeat:
		return [][]byte{b, b}
	}
	return [][]byte{b}
}

// terminal opens a new pseudo-terminal.
func terminal() (master, slave *os.File, name string, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, "", fmt.Errorf("pseudo-terminal: %w", err)
	}
	master = os.NewFile(uintptr(fd), "/dev/ptmx")
	if err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, nil, "", fmt.Errorf("unlock terminal: %w", err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return nil, nil, "", fmt.Errorf("number of terminal: %w", err)
	}
	name = "/dev/pts/" + strconv.Itoa(n)
	slave, err = os.OpenFile(name, os.O_RDWR|unix.O_NOCTTY, 0)
	return master, slave, name, err
}
