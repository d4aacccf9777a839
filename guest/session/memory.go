package session

import (
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/shm"
	"github.com/gpuctl/gpuctl/guest/wire"
)

const (
	gib          = 1 << 30
	arenaMin     = 128 * gib
	arenaMax     = 2048 * gib
	arenaRound   = 2 << 20
	arenaPerByte = 8 // address space for each byte of RAM; pages come with use
)

// inode identifies a memfd for as long as anything holds it open.
type inode struct {
	Dev uint64 `json:"dev"`
	Ino uint64 `json:"ino"`
}

// memory is a session's shared memory: what survives every executor.
type memory struct {
	ring, arena, state *os.File

	mu     sync.RWMutex
	region *shm.Region // the ring, through a description of our own; nil once closed
	q      *shm.Ring   // the client writes here too
}

// createMemory makes the three memfds of a new session, the ring formatted.
func createMemory(id string) (*memory, error) {
	m := &memory{}
	arena, err := arenaSize()
	if err != nil {
		return nil, err
	}
	// The client could otherwise shrink what others have mapped.
	const fixed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	for _, f := range []struct {
		file  **os.File
		name  string
		size  uint64
		seals int
	}{
		{&m.ring, "ring", wire.RingMem, fixed | unix.F_SEAL_SEAL},
		{&m.arena, "arena", arena, fixed | unix.F_SEAL_SEAL},
		{&m.state, "state", 0, 0},
	} {
		if *f.file, err = createMemfd("gpuctl-"+f.name+"-"+id, f.size, f.seals); err != nil {
			m.close()
			return nil, err
		}
	}
	if err := m.mapRing(); err != nil {
		m.close()
		return nil, err
	}
	m.q.Init(arena, arena/2)
	return m, nil
}

func arenaSize() (uint64, error) {
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return 0, fmt.Errorf("sysinfo: %w", err)
	}
	n := si.Totalram * uint64(si.Unit) * arenaPerByte
	n = min(max(n, arenaMin), arenaMax)
	return n &^ (arenaRound - 1), nil
}

func createMemfd(name string, size uint64, seals int) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Truncate(int64(size)); err != nil {
		f.Close()
		return nil, fmt.Errorf("memfd %s of %s: %w", name, formatBytes(size), err)
	}
	if seals != 0 {
		if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
			f.Close()
			return nil, fmt.Errorf("seal memfd %s: %w", name, err)
		}
	}
	return f, nil
}

// findMemory opens the memfds with the given inodes through the descriptors of
// any of the processes.
func findMemory(want [3]inode, pids ...int) (*memory, error) {
	m := &memory{}
	files := [3]**os.File{&m.ring, &m.arena, &m.state}
	for _, pid := range pids {
		if pid <= 0 {
			continue
		}
		dir := "/proc/" + strconv.Itoa(pid) + "/fd/"
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue // gone, or not ours to look at
		}
		for _, e := range entries {
			id, err := statInode(dir + e.Name())
			if err != nil {
				continue
			}
			for i, f := range files {
				if *f == nil && want[i] == id {
					// A descriptor of its own, so that locks are its own too.
					*f, _ = os.OpenFile(dir+e.Name(), os.O_RDWR, 0)
				}
			}
		}
	}
	if m.ring == nil || m.arena == nil || m.state == nil {
		m.close()
		return nil, fmt.Errorf("no live process %v holds the session's memory", pids)
	}
	if err := m.mapRing(); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

func statInode(path string) (inode, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return inode{}, err
	}
	return inode{Dev: st.Dev, Ino: st.Ino}, nil
}

func (m *memory) inodes() (ids [3]inode, err error) {
	for i, f := range m.files() {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			return ids, fmt.Errorf("stat %s: %w", f.Name(), err)
		}
		ids[i] = inode{Dev: st.Dev, Ino: st.Ino}
	}
	return ids, nil
}

// mapRing maps the ring through a description of its own, which the manager's
// lock belongs to: the client and the executors share m.ring's.
func (m *memory) mapRing() error {
	fd, err := shm.Reopen(int(m.ring.Fd()))
	if err != nil {
		return fmt.Errorf("ring: %w", err)
	}
	if m.region, err = shm.Open(fd, wire.RingMem); err != nil {
		_ = unix.Close(fd)
		return fmt.Errorf("ring: %w", err)
	}
	if m.q, err = shm.NewRing(m.region); err != nil {
		return fmt.Errorf("ring: %w", err)
	}
	return nil
}

func (m *memory) files() [3]*os.File { return [3]*os.File{m.ring, m.arena, m.state} }

// mapped calls f unless the memory is closed.
func (m *memory) mapped(f func()) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.region != nil {
		f()
	}
}

func (m *memory) owner() (gen uint32) {
	m.mapped(func() { gen = m.q.Owner() })
	return gen
}

// serving is the generation of the executor that last began to serve.
func (m *memory) serving() (gen uint32) {
	m.mapped(func() { gen = m.q.Serving() })
	return gen
}

func (m *memory) setOwner(gen uint32) { m.mapped(func() { m.q.SetOwner(gen) }) }

func (m *memory) head() (n uint64) {
	m.mapped(func() { n = m.region.Load64(wire.HdrHead) })
	return n
}

// setState stores the session's state and wakes everything that waits on it.
func (m *memory) setState(state uint32) {
	m.mapped(func() {
		m.q.SetState(state)
		if state == wire.StateLost {
			m.wakeAll()
		}
	})
}

// wakeAll wakes those who wait for replies, room or callbacks, when there is
// nobody else left to do it.
func (m *memory) wakeAll() {
	wake := func(off int) { shm.FutexWake(m.region.Word32(uint64(off)), shm.All) }
	wake(wire.HdrSpace)
	wake(wire.HdrCbTail)
	wake(wire.HdrBell)
	for i := range wire.SlotCount {
		for _, off := range []int{wire.SlotState, wire.SlotBell} {
			wake(wire.SlotOff + i*wire.SlotSize + off)
		}
	}
}

// lockManager tells clients that a gpuguest is alive. The lock ends with the
// process.
func (m *memory) lockManager() error {
	if err := shm.LockByte(m.region.FD(), wire.LockManager); err != nil {
		return fmt.Errorf("lock ring: %w", err)
	}
	return nil
}

// dropState frees what a suspended session kept in memory.
func (m *memory) dropState() error {
	if err := m.state.Truncate(0); err != nil {
		return fmt.Errorf("empty the state memory: %w", err)
	}
	return nil
}

func (m *memory) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.region != nil {
		_ = m.region.Close()
		m.region = nil
	}
	for _, f := range m.files() {
		if f != nil {
			f.Close()
		}
	}
}
