package session

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

const (
	gib          = 1 << 30
	arenaMin     = 128 * gib
	arenaMax     = 2048 * gib
	arenaRound   = 2 << 20
	arenaPerByte = 8 // address space for each byte of RAM; pages are allocated when they are used
)

// inode identifies a memfd while anything has it open.
type inode struct {
	Dev  uint64 `json:"dev"`
	Ino  uint64 `json:"ino"`
	Size int64  `json:"size"` // bytes, if the size is sealed; otherwise 0
}

// The seals of each memfd. Without them, the client could shrink memory that others have
// mapped, or keep the state from being written.
const (
	sealsFixed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	sealsState = unix.F_SEAL_SEAL
)

// The index of the state among the memfds of a session; see memfdName.
const stateMemfd = 2

func memfdName(i int) string { return [...]string{"ring", "arena", "state"}[i] }

// memory is a session's shared memory. It outlives every executor.
type memory struct {
	ring, arena, state *os.File

	mu     sync.RWMutex
	region *shm.Region // the ring, mapped through an open file description of its own; nil once closed
	q      *shm.Ring   // the client can write to it, too
}

// createMemory makes the three memfds of a new session, and formats the ring.
func createMemory(id string) (*memory, error) {
	m := &memory{}
	arena, err := arenaSize()
	if err != nil {
		return nil, err
	}
	for i, f := range []struct {
		file **os.File
		size uint64
	}{{&m.ring, wire.RingMem}, {&m.arena, arena}, {&m.state, 0}} {
		if *f.file, err = createMemfd("gpuctl-"+memfdName(i)+"-"+id, f.size, sealsOf(i)); err != nil {
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
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		f.Close()
		return nil, fmt.Errorf("seal memfd %s: %w", name, err)
	}
	return f, nil
}

// findMemory opens the memfds with the given inodes through the descriptors of any of the
// processes. Each process chooses its descriptors, and can change them at any time. So
// nothing is opened unless it is certainly one of the session's memfds. For lack of descriptors
// or memory it may miss them: then scarce is true of the error.
func findMemory(want [3]inode, pids ...int) (*memory, error) {
	m := &memory{}
	files := [3]**os.File{&m.ring, &m.arena, &m.state}
	for _, pid := range pids {
		if pid <= 0 {
			continue
		}
		fds, err := openDescriptors(pid)
		if engine.Scarce(err) {
			m.close()
			return nil, err
		}
		if err != nil {
			continue // the process has ended, or gpuguest may not inspect it
		}
		names, _ := fds.Readdirnames(-1)
		for _, name := range names {
			for i, f := range files {
				if *f == nil {
					if *f, err = openMemfd(fds, name, want[i], i); err != nil {
						fds.Close()
						m.close()
						return nil, err
					}
				}
			}
		}
		fds.Close()
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

// openDescriptors opens the folder with a process's descriptors in /proc.
func openDescriptors(pid int) (*os.File, error) {
	at, err := livePart(pid)
	if err != nil {
		return nil, err
	}
	path := "/proc/" + at + "/fd"
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// openMemfd opens a process's descriptor again, so that locks belong to this process. It
// returns nil unless the descriptor is memfd i of the session, as it was created. First it
// pins the file with O_PATH and does not open it, because an open can block, write, or wake
// a device. Then it opens exactly the file that was checked. Only for lack of descriptors or
// memory it returns an error.
func openMemfd(fds *os.File, name string, want inode, i int) (*os.File, error) {
	pin, err := unix.Openat(int(fds.Fd()), name, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, onlyScarce(err)
	}
	defer unix.Close(pin)
	if id, err := statInode(pin, i); err != nil || id != want {
		return nil, nil
	}
	fd, err := shm.Reopen(pin)
	if err != nil {
		return nil, onlyScarce(err)
	}
	// Other files of the same file system have no seals, or different ones.
	id, err := statInode(fd, i)
	seals, serr := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || serr != nil || id != want || seals != sealsOf(i) {
		_ = unix.Close(fd)
		return nil, nil
	}
	return os.NewFile(uintptr(fd), memfdName(i)), nil
}

func onlyScarce(err error) error {
	if engine.Scarce(err) {
		return err
	}
	return nil
}

func sealsOf(i int) int {
	if i == stateMemfd {
		return sealsState
	}
	return sealsFixed
}

// statInode returns the identity of the file of an open descriptor of memfd i. It asks no file
// server: a file of an application's may be of one that does not answer.
func statInode(fd, i int) (inode, error) {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS, &st); err != nil {
		return inode{}, err
	}
	id := inode{Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino, Size: int64(st.Size)}
	if i == stateMemfd {
		id.Size = 0 // the state's size varies
	}
	if uint32(st.Mode)&unix.S_IFMT != unix.S_IFREG {
		return inode{}, unix.EINVAL
	}
	return id, nil
}

func (m *memory) inodes() (ids [3]inode, err error) {
	for i, f := range m.files() {
		if ids[i], err = statInode(int(f.Fd()), i); err != nil {
			return ids, fmt.Errorf("stat %s: %w", f.Name(), err)
		}
	}
	return ids, nil
}

// mapRing maps the ring through an open file description of its own. The manager's lock
// belongs to that description. The client and the executors share the one of m.ring.
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

// serving returns the generation of the executor that was the last to begin to serve.
func (m *memory) serving() (gen uint32) {
	m.mapped(func() { gen = m.q.Serving() })
	return gen
}

func (m *memory) setOwner(gen uint32) { m.mapped(func() { m.q.SetOwner(gen) }) }

func (m *memory) head() (n uint64) {
	m.mapped(func() { n = m.region.Load64(wire.HdrHead) })
	return n
}

// setState stores the session's state. It wakes all who wait on the state; if the session
// is lost, it wakes all other waiters, too.
func (m *memory) setState(state uint32) {
	m.mapped(func() {
		m.q.SetState(state)
		if state == wire.StateLost {
			m.wakeAll()
		}
	})
}

// wakeAll wakes those who wait for replies, room or callbacks. It is for the case that no
// executor is left to do it.
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

// lockManager takes the lock that shows clients that a gpuguest lives. The kernel releases
// it when the process ends.
func (m *memory) lockManager() error {
	if err := shm.LockByte(m.region.FD(), wire.LockManager); err != nil {
		return fmt.Errorf("lock ring: %w", err)
	}
	return nil
}

// dropState frees what a suspended session has stored in memory.
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
