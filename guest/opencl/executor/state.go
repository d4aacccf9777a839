package executor

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/internal/wide"
)

// A state file has the contents of a suspended session: the objects one after the other,
// then an index, then the position of the index. It is a file on disk or the state memfd.
// The space is reserved first, so that a full disk is noticed while the session still runs.
// Only the memfd is mapped: where a mapped file has no page to give, because its disk is
// full or broken or somebody has cut the file, the process dies, and the session with it.

const stateMagic = 0x5453585550474c43

var errState = errors.New("not a complete session state")

// stateEntry describes one object in a state file. An entry of the index has entrySize
// bytes: id, serial number, position and size.
type stateEntry struct {
	ID     uint32
	Serial uint64
	At, N  uint64 // in bytes
}

const entrySize = 32

func (e *stateEntry) appendTo(b []byte) []byte {
	for _, v := range []uint64{uint64(e.ID), e.Serial, e.At, e.N} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// readIndex reads the index of a state file of size bytes. It refuses an object that occurs
// twice, so that no index makes more work than the session has contents.
func (s *session) readIndex(f io.ReaderAt, size uint64) (map[*mem]stateEntry, error) {
	var tail [24]byte
	if size < uint64(len(tail)) {
		return nil, errState
	}
	if _, err := f.ReadAt(tail[:], int64(size)-int64(len(tail))); err != nil {
		return nil, err
	}
	end, n := le64(tail[:]), le64(tail[8:])
	if le64(tail[16:]) != stateMagic || end > size || n > size || end+n+uint64(len(tail)) != size || n%entrySize != 0 {
		return nil, errState
	}
	in := bufio.NewReader(io.NewSectionReader(f, int64(end), int64(n)))
	out := map[*mem]stateEntry{}
	for range n / entrySize {
		var b [entrySize]byte
		if _, err := io.ReadFull(in, b[:]); err != nil {
			return nil, fmt.Errorf("index: %w", err)
		}
		e := stateEntry{ID: uint32(le64(b[:])), Serial: le64(b[8:]), At: le64(b[16:]), N: le64(b[24:])}
		m := lookup[mem](s, e.ID)
		if _, twice := out[m]; m == nil || twice || m.parent != nil || m.size != e.N || e.At > end || e.N > end-e.At {
			return nil, fmt.Errorf("object %d: %w", e.ID, errState)
		}
		out[m] = e
	}
	return out, nil
}

// stateFile is a sink that writes a state file.
type stateFile struct {
	s       *session
	f       *os.File
	memory  bool
	entries map[uint64]*stateRoom // by serial number
	end     uint64
	maps    [][]byte
	next    uint64 // the next chunk of the window
	whole   bool   // everything of the frozen session is in the file
}

type stateRoom struct {
	stateEntry
	mem []byte // of the state memfd
}

func newStateFile(s *session, f *os.File, memory bool) *stateFile {
	return &stateFile{s: s, f: f, memory: memory, entries: map[uint64]*stateRoom{}}
}

func (w *stateFile) knows(_ uint32, serial uint64, m *mem) bool {
	return w.entries[serial] != nil || m.unified && w.memory
}

func (w *stateFile) takes(bool) bool { return true }

func (w *stateFile) shares() bool      { return w.memory }
func (w *stateFile) inPlace(*mem) bool { return true }
func (w *stateFile) chunk() uint64     { return windowChunk }
func (w *stateFile) close() error      { return nil }

// reserve reserves space for each object that has none yet.
func (w *stateFile) reserve() error {
	s := w.s
	var fresh []*stateRoom
	begin := w.end
	s.mu.Lock()
	s.each(func(id uint32, serial uint64, o any) {
		m, ok := o.(*mem)
		if !ok || m.parent != nil || m.unified && w.memory || w.entries[serial] != nil {
			return
		}
		r := &stateRoom{stateEntry: stateEntry{ID: id, Serial: serial, At: w.end, N: m.size}}
		w.entries[serial] = r
		fresh = append(fresh, r)
		w.end += (m.size + 4095) &^ 4095
	})
	s.mu.Unlock()
	if w.end == begin {
		return nil
	}
	// A file system that can't reserve space says so when it is written.
	if err := unix.Fallocate(int(w.f.Fd()), 0, int64(begin), int64(w.end-begin)); err != nil && (w.memory || !errors.Is(err, unix.EOPNOTSUPP)) {
		return fmt.Errorf("room for %d bytes of state in %s: %w", w.end-begin, w.f.Name(), err)
	}
	if !w.memory {
		return nil
	}
	b, err := unix.Mmap(int(w.f.Fd()), int64(begin), int(w.end-begin), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %s: %w", w.f.Name(), err)
	}
	w.maps = append(w.maps, b)
	populate(b)
	for _, r := range fresh {
		r.mem = b[r.At-begin : r.At-begin+r.N : r.At-begin+r.N]
	}
	return nil
}

// place makes the device write into the window, which is pinned; accept takes the bytes from
// there, with all processors. Pinning the state itself would cost as much time as moving it,
// and the same again when the executor ends.
func (w *stateFile) place(ps []piece) error {
	if err := w.s.openWindow(windowChunk * windowDepth); err != nil {
		return err
	}
	at := w.s.window + w.next%windowDepth*windowChunk
	w.next++
	for i := range ps {
		x := &ps[i]
		x.At, x.ptr = at, w.s.arena.Pointer(at)
		at += x.padded()
	}
	return nil
}

// accept writes pieces, which are in the arena, to where they belong in the file.
func (w *stateFile) accept(ps []piece) error {
	for i := range ps {
		x := &ps[i]
		r, off := w.entries[x.serial], x.Off
		if x.m.kind == memImage {
			off *= x.m.rowBytes()
		}
		n := x.bytes()
		if r == nil || off > r.N || n > r.N-off {
			return fmt.Errorf("no room for object %d in %s", x.ID, w.f.Name())
		}
		b, err := w.s.arena.Range(x.At, n)
		if err != nil {
			return fmt.Errorf("object %d: %w", x.ID, err)
		}
		if w.memory {
			copyWide(r.mem[off:off+n], b)
		} else if err := writeWide(w.f, b, int64(r.At+off)); err != nil {
			return fmt.Errorf("write %s: %w", w.f.Name(), err)
		}
	}
	return nil
}

// finish writes the index and syncs the file.
func (w *stateFile) finish() error {
	var index []byte
	w.s.each(func(_ uint32, serial uint64, o any) {
		if r := w.entries[serial]; r != nil {
			index = r.appendTo(index)
		}
	})
	if _, err := w.f.Seek(int64(w.end), io.SeekStart); err != nil {
		return fmt.Errorf("write %s: %w", w.f.Name(), err)
	}
	n := len(index)
	for _, v := range []uint64{w.end, uint64(n), stateMagic} {
		index = binary.LittleEndian.AppendUint64(index, v)
	}
	if _, err := w.f.Write(index); err != nil {
		return fmt.Errorf("write index of %s: %w", w.f.Name(), err)
	}
	if w.memory {
		return nil
	}
	if err := w.f.Sync(); err != nil {
		return fmt.Errorf("write %s: %w", w.f.Name(), err)
	}
	return nil
}

// letGo removes the memfd's pages from this process; they stay in the memfd. That takes about
// 50 ns for each page. Otherwise the end of the process, for which the resume waits, would
// do it with one processor.
func (w *stateFile) letGo() {
	for _, b := range w.maps {
		wide.Do(len(b), 64<<20, func(off, end int) { _ = unix.Madvise(b[off:end], unix.MADV_DONTNEED) })
	}
}

// release unmaps the memfd. After that, nothing may be read into it.
func (w *stateFile) release() {
	for _, b := range w.maps {
		_ = unix.Munmap(b)
	}
	w.maps = nil
}

// load writes the contents of a state file into the prepared objects. If this device has
// memory of its own, it also writes those that have stayed in the arena.
func (s *session) load(f *os.File, report progress) error {
	st, err := f.Stat()
	if err != nil {
		return fmt.Errorf("state: %w", err)
	}
	if err := s.openWindow(windowChunk * windowDepth); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.closeWindow()
	filed, err := s.readIndex(f, uint64(st.Size())) // a file also has what was in the arena
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	var ps []piece
	for m, e := range filed {
		m.markAll()
		for _, p := range m.cut(windowChunk, m.dirty) {
			off := p.Off
			if m.kind == memImage {
				off *= m.rowBytes()
			}
			p.ID, p.At = e.ID, e.At+off
			ps = append(ps, p)
		}
	}
	s.each(func(id uint32, _ uint64, o any) {
		if m, ok := o.(*mem); ok && m.inArena && !m.unified && m.parent == nil && filed[m].ID == 0 {
			m.markAll()
			for _, p := range m.cut(windowChunk, m.dirty) {
				p.ID, p.ptr = id, s.arena.Pointer(m.arena+p.Off)
				ps = append(ps, p)
			}
		}
	})
	return s.fill(f, ps, report)
}

// fill reads those pieces from a state file that have no address yet, and writes them into
// their objects. There is a worker for each chunk of the window: some read while the device
// takes what others have read.
func (s *session) fill(f *os.File, ps []piece, report progress) error {
	var total, done uint64
	for i := range ps {
		total += ps[i].bytes()
		if _, st := s.xfer.queue(ps[i].m.ctx); st != cl.Success { // workers only look queues up
			return fmt.Errorf("object %d: %w", ps[i].ID, st)
		}
	}
	var (
		mu     sync.Mutex
		errs   []error
		wg     sync.WaitGroup
		todo   = make(chan []piece)
		failed = func() bool { mu.Lock(); defer mu.Unlock(); return len(errs) > 0 }
	)
	for chunk := range uint64(windowDepth) {
		wg.Go(func() {
			for b := range todo {
				n, err := s.fillBatch(f, b, s.window+chunk*windowChunk)
				mu.Lock()
				if done += n; err != nil {
					errs = append(errs, fmt.Errorf("load %s: %w", f.Name(), err))
				} else {
					report("load", done, total)
				}
				mu.Unlock()
			}
		})
	}
	for len(ps) > 0 && !failed() {
		n, size := 0, uint64(0)
		for n < len(ps) && (n == 0 || size+ps[n].padded() <= windowChunk) {
			size += ps[n].padded()
			n++
		}
		todo <- ps[:n]
		ps = ps[n:]
	}
	close(todo)
	wg.Wait()
	return errors.Join(errs...)
}

// fillBatch moves a batch through a chunk of the window, and waits until the device has it.
func (s *session) fillBatch(f *os.File, ps []piece, at uint64) (n uint64, err error) {
	var evs []cl.Event
	for i := range ps {
		x := &ps[i]
		if x.ptr == nil {
			if err := readWide(f, s.arenaBytes(at, x.bytes()), int64(x.At)); err != nil {
				await(evs)
				return n, err
			}
			x.ptr = s.arena.Pointer(at)
			at += x.padded()
		}
		ev, err := s.take(x)
		if err != nil {
			await(evs)
			return n, err
		}
		if ev != 0 {
			evs = append(evs, ev)
		}
		n += x.bytes()
	}
	if st := await(evs); st != cl.Success {
		return n, st
	}
	return n, nil
}

// take begins to write a piece of content into its object. The event is 0 if that is done
// already.
func (s *session) take(p *piece) (cl.Event, error) {
	m := p.m
	if m.unified {
		s.takeUnified(p)
		return 0, nil
	}
	q, st := s.xfer.queue(m.ctx)
	if st != cl.Success {
		return 0, fmt.Errorf("object %d: %w", p.ID, st)
	}
	var ev cl.Event
	if st := p.write(q, p.ptr, &ev); st != cl.Success {
		return 0, fmt.Errorf("object %d: %w", p.ID, st)
	}
	cl.Flush(q)
	return ev, nil
}

// takeUnified copies into a buffer in the arena, except where the application has mapped
// it: the bytes there are newer. What is still to be mapped is not.
func (s *session) takeUnified(p *piece) {
	m := p.m
	dst := s.arenaBytes(m.arena+p.Off, p.N)
	src := unsafe.Slice((*byte)(p.ptr), p.N)
	if p.ptr == unsafe.Pointer(&dst[0]) {
		return
	}
	var later map[*mapping]bool
	if m.isMapped() {
		later = s.toBeMapped()
	}
	spans := m.mapped(func(mp *mapping, base uint64) bool { return mp.At == m.arena+base+mp.Offset && !later[mp] })
	for at := p.Off; at < p.Off+p.N; {
		end := p.Off + p.N
		skip := false
		for _, sp := range spans {
			if at >= sp[0] && at < sp[1] {
				at, skip = min(sp[1], end), true
				break
			}
			if sp[0] > at {
				end = min(end, sp[0])
			}
		}
		if skip {
			continue
		}
		copy(dst[at-p.Off:end-p.Off], src[at-p.Off:end-p.Off])
		at = end
	}
}

// isMapped reports whether the application has mapped the object or a part of it.
func (m *mem) isMapped() bool {
	return len(m.maps) > 0 || slices.ContainsFunc(m.subs, func(x *mem) bool { return len(x.maps) > 0 })
}

// mapped lists the byte ranges of a buffer that are mapped now, directly or through a
// sub-buffer that begins at base, by mappings for which want returns true.
func (m *mem) mapped(want func(mp *mapping, base uint64) bool) [][2]uint64 {
	var out [][2]uint64
	for _, x := range append([]*mem{m}, m.subs...) {
		for _, mp := range x.maps {
			base := uint64(0)
			if x != m {
				base = x.origin
			}
			if !want(mp, base) {
				continue
			}
			out = append(out, [2]uint64{base + mp.Offset, base + mp.Offset + mp.Size})
		}
	}
	return out
}
