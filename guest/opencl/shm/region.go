package shm

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Errors of the package. All of them mean a broken or hostile peer.
var (
	// ErrRange is returned for an offset or length outside a region.
	ErrRange = errors.New("outside the shared memory")
	// ErrUnsealed is returned for a memfd that a peer could shrink.
	ErrUnsealed = errors.New("memfd not sealed against shrinking")
)

// Region is a mapped memfd.
type Region struct {
	fd  int
	mem []byte
}

// Create creates a sparse memfd of size bytes, and maps it. It uses memory only where it is
// written. It can neither grow nor shrink. A memfd of size 0 is different: it can change
// its size, is not mapped, and is for file I/O on FD.
func Create(name string, size int64) (*Region, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create memfd %s: %w", name, err)
	}
	if size == 0 {
		return &Region{fd: fd}, nil
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("size memfd %s to %d bytes: %w", name, size, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("seal memfd %s: %w", name, err)
	}
	r, err := Open(fd, size)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("memfd %s: %w", name, err)
	}
	return r, nil
}

// Open maps the first size bytes of a memfd that Create made. The region then owns the
// descriptor, unless Open returns an error.
func Open(fd int, size int64) (*Region, error) {
	if size < 0 {
		return nil, fmt.Errorf("map %d bytes: %w", size, ErrRange)
	}
	if size == 0 {
		return &Region{fd: fd}, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("stat memfd: %w", err)
	}
	if st.Size < size {
		return nil, fmt.Errorf("map %d bytes of a memfd of %d: %w", size, st.Size, ErrRange)
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		return nil, ErrUnsealed
	}
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", size, err)
	}
	return &Region{fd: fd, mem: mem}, nil
}

// Close unmaps the region and closes its descriptor. Nothing may use its memory after that.
func (r *Region) Close() error {
	var err error
	if r.mem != nil {
		err = unix.Munmap(r.mem)
		r.mem = nil
	}
	if r.fd >= 0 {
		err = errors.Join(err, unix.Close(r.fd))
		r.fd = -1
	}
	return err
}

// FD returns the memfd, which still belongs to the region.
func (r *Region) FD() int { return r.fd }

// Size returns the number of bytes mapped.
func (r *Region) Size() uint64 { return uint64(len(r.mem)) }

// Bytes returns the whole mapping.
func (r *Region) Bytes() []byte { return r.mem }

// Range returns n bytes from off on, or ErrRange. It is for offsets that a peer chose.
func (r *Region) Range(off, n uint64) ([]byte, error) {
	if off > r.Size() || n > r.Size()-off {
		return nil, fmt.Errorf("%d bytes at %d: %w", n, off, ErrRange)
	}
	return r.mem[off : off+n : off+n], nil
}

// Pointer returns the address of a byte. It panics outside the region.
func (r *Region) Pointer(off uint64) unsafe.Pointer { return unsafe.Pointer(&r.mem[off]) }

// PunchHole frees the memory of n bytes from off on. They then read as 0. Pages that are
// only partly in the range are zeroed there and not freed.
func (r *Region) PunchHole(off, n uint64) error {
	if _, err := r.Range(off, n); err != nil {
		return fmt.Errorf("punch hole: %w", err)
	}
	if n == 0 {
		return nil
	}
	if err := unix.Fallocate(r.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off), int64(n)); err != nil {
		return fmt.Errorf("punch hole of %d bytes at %d: %w", n, off, err)
	}
	return nil
}

// Word32 returns the address of an aligned word. It panics for any other offset.
func (r *Region) Word32(off uint64) *uint32 {
	if off%4 != 0 {
		panic("shm: misaligned word")
	}
	return (*uint32)(unsafe.Pointer(&r.mem[off : off+4][0]))
}

// Word64 returns the address of an aligned double word. It panics for any other offset.
func (r *Region) Word64(off uint64) *uint64 {
	if off%8 != 0 {
		panic("shm: misaligned word")
	}
	return (*uint64)(unsafe.Pointer(&r.mem[off : off+8][0]))
}

// The accessors below are sequentially consistent. They panic in the same cases as Word32
// and Word64.

// Load32 reads a word.
func (r *Region) Load32(off uint64) uint32 { return atomic.LoadUint32(r.Word32(off)) }

// Store32 writes a word.
func (r *Region) Store32(off uint64, v uint32) { atomic.StoreUint32(r.Word32(off), v) }

// Swap32 writes a word and returns its former value.
func (r *Region) Swap32(off uint64, v uint32) uint32 { return atomic.SwapUint32(r.Word32(off), v) }

// CAS32 writes a word if it has the expected value.
func (r *Region) CAS32(off uint64, old, v uint32) bool {
	return atomic.CompareAndSwapUint32(r.Word32(off), old, v)
}

// Load64 reads a double word.
func (r *Region) Load64(off uint64) uint64 { return atomic.LoadUint64(r.Word64(off)) }

// Store64 writes a double word.
func (r *Region) Store64(off, v uint64) { atomic.StoreUint64(r.Word64(off), v) }
