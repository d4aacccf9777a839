package replica

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/fs"
	"github.com/hashicorp/raft-wal/metadb"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
	"go.etcd.io/bbolt"
)

// segmentSize is the size of a segment of the log in bytes. Each file is allocated in
// full when it is made, so the disk must have so much free space for the log to continue.
const segmentSize = 1 << 20

// copyBatch is how many bytes are written at once while a log is converted.
const copyBatch = 256 << 10

// journal is the log of Raft, in segments of raft-wal. An append needs one sync, where a
// B+ tree needs two.
//
// What the library has in memory after a failed write is not used. It rotates after the
// append that fills a segment. If there is no room for that, it does not try again: each
// later append fails because the segment is sealed. So after a failed write, the log is
// opened again from disk before the next write.
//
// There is the same problem on disk: if the process ends between the sync of the append
// that fills a segment and the commit of the rotation, the tail takes no entries. The
// library opens it and refuses to append. Such a tail is first copied to a new file; see
// renew.
type journal struct {
	dir  string
	log  *slog.Logger
	meta *metadb.BoltMetaDB

	write sync.Mutex // held during writes
	dirty bool       // a write has failed, or a tail could not be renewed: open must not be written to
	drop  uint64     // entries up to this index should have been removed, but that has failed

	mu   sync.RWMutex // guards open; held by readers during reads
	open *wal.WAL
}

var (
	_ raft.LogStore          = (*journal)(nil)
	_ raft.MonotonicLogStore = (*journal)(nil)
)

// openJournal opens the log in a folder that exists.
func openJournal(dir string, log *slog.Logger) (*journal, error) {
	j := &journal{dir: dir, log: log, meta: &metadb.BoltMetaDB{}}
	err := j.reopen(false)
	if noRoom(err) {
		// The log can be read. A write tries again to renew it.
		j.dirty = true
		err = j.load()
	}
	if err != nil {
		return nil, errors.Join(err, j.meta.Close())
	}
	return j, nil
}

// reopen opens the log from disk, and makes sure that its tail takes entries. After a
// failed write, the tail is copied in any case, because a part of the write may be beyond
// its end; or all of it, if the sync has failed. Raft writes other entries in its place.
func (j *journal) reopen(failed bool) error {
	last := uint64(math.MaxUint64)
	if failed && j.open != nil {
		var err error
		if last, err = j.open.LastIndex(); err != nil {
			return fmt.Errorf("log %s: %w", j.dir, err)
		}
	}
	if err := j.renew(failed, last); err != nil {
		return err
	}
	return j.load()
}

func (j *journal) load() error {
	// The directory entry of a segment that an interrupted process has made may not be
	// durable. The library syncs the folder only for segments that it makes itself.
	if err := syncDir(j.dir); err != nil {
		return err
	}
	w, err := wal.Open(j.dir, wal.WithSegmentSize(segmentSize), wal.WithMetaStore(lasting{j.meta}), wal.WithLogger(newLogger(j.log)))
	if err != nil {
		return fmt.Errorf("log %s: %w", j.dir, err)
	}
	j.mu.Lock()
	last := j.open
	j.open = w
	j.mu.Unlock()
	if last != nil {
		if err := last.Close(); err != nil {
			j.log.Warn("log not closed", "dir", j.dir, "err", err)
		}
	}
	return nil
}

// lasting is the metadata store. It stays open when a log is closed.
type lasting struct{ *metadb.BoltMetaDB }

// Close implements types.MetaStore. It does nothing: journal closes the store.
func (lasting) Close() error { return nil }

// renew copies the tail up to the entry last to a new segment if it takes no entries, or if force is set. The
// metadata names the new file only when it is complete; until then, the old one is valid.
// When the log is opened, files that the metadata does not name are removed.
func (j *journal) renew(force bool, last uint64) error {
	state, err := j.meta.Load(j.dir)
	if err != nil {
		return fmt.Errorf("log %s: %w", j.dir, err)
	}
	n := len(state.Segments)
	if n == 0 || !state.Segments[n-1].SealTime.IsZero() {
		return nil // the library makes a new one
	}
	filer := segment.NewFiler(j.dir, fs.New())
	old := state.Segments[n-1]
	from, err := filer.RecoverTail(old)
	if errors.Is(err, os.ErrNotExist) {
		return nil // the library has not made it yet, and will do so
	}
	if err != nil {
		return fmt.Errorf("log %s: tail at entry %d: %w", j.dir, old.BaseIndex, err)
	}
	defer from.Close()
	sealed, _, err := from.Sealed()
	if err != nil || !sealed && !force {
		return err
	}
	entries, size, err := contents(from, old.MinIndex, last)
	if err != nil {
		return fmt.Errorf("log %s: %w", j.dir, err)
	}
	next := types.SegmentInfo{
		ID: state.NextSegmentID, BaseIndex: old.MinIndex, MinIndex: old.MinIndex, Codec: old.Codec, CreateTime: time.Now(),
		SizeLimit: max(segmentSize, 2*size), // the copy must not be full at once
	}
	if err := filer.Delete(next.BaseIndex, next.ID); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("log %s: %w", j.dir, err)
	}
	if err := write(filer, next, entries); err != nil {
		_ = filer.Delete(next.BaseIndex, next.ID) // free the space, which others may need
		return fmt.Errorf("log %s: renew the tail at entry %d: %w", j.dir, next.BaseIndex, err)
	}
	state.NextSegmentID++
	state.Segments[n-1] = next
	if err := j.meta.CommitState(state); err != nil {
		return fmt.Errorf("log %s: %w", j.dir, err)
	}
	j.log.Info("the log's tail was renewed", "from", next.BaseIndex, "entries", len(entries), "sealed", sealed)
	return nil
}

// contents returns the entries of a segment up to the entry last, and the size of a segment that can
// contain them.
func contents(from types.SegmentReader, first, last uint64) (entries []types.LogEntry, size uint32, err error) {
	const overhead = 32 // bytes of an entry's index and header; of the segment's header
	size = overhead * 4
	for i := first; i <= last; i++ {
		buf, err := from.GetLog(i)
		if errors.Is(err, types.ErrNotFound) {
			return entries, size, nil
		}
		if err != nil {
			return nil, 0, fmt.Errorf("entry %d: %w", i, err)
		}
		entries = append(entries, types.LogEntry{Index: i, Data: bytes.Clone(buf.Bs)})
		if uint64(size)+uint64(len(buf.Bs))+overhead > math.MaxInt32/2 { // the library's limit is twice that
			return nil, 0, fmt.Errorf("entry %d: the segment is too large to be copied", i)
		}
		size += uint32(len(buf.Bs)) + overhead
		if err := buf.Close(); err != nil {
			return nil, 0, fmt.Errorf("entry %d: %w", i, err)
		}
	}
	return entries, size, nil
}

// write makes a segment with entries.
func write(filer *segment.Filer, info types.SegmentInfo, entries []types.LogEntry) error {
	to, err := filer.Create(info)
	if err != nil {
		return err
	}
	defer to.Close()
	if err := to.Append(entries); err != nil {
		return err
	}
	if sealed, _, err := to.Sealed(); err != nil || sealed {
		return errors.Join(err, errors.New("the entries fill the new segment"))
	}
	return nil
}

// read calls f with the log, which is not replaced during the call.
func (j *journal) read(f func(*wal.WAL) error) error {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return f(j.open)
}

// change calls f for a write. If a write has failed before, it first opens the log again.
func (j *journal) change(f func(*wal.WAL) error) error {
	j.write.Lock()
	defer j.write.Unlock()
	if j.dirty {
		if err := j.reopen(true); err != nil {
			return err
		}
		j.dirty = false
	}
	if j.drop > 0 {
		if err := j.open.DeleteRange(0, j.drop); err != nil {
			j.dirty = true
			return err
		}
		j.drop = 0
	}
	err := f(j.open) // only change and Close replace open
	if !errors.Is(err, types.ErrSealed) {
		j.dirty = err != nil
		return err
	}
	// The rotation after the last append has failed. Nothing was written now. The next
	// write tries again.
	j.dirty = true
	if err := j.reopen(false); err != nil {
		return err
	}
	err = f(j.open)
	j.dirty = err != nil
	return err
}

// IsMonotonic implements raft.MonotonicLogStore: the log has no gaps.
func (j *journal) IsMonotonic() bool { return true }

// FirstIndex implements raft.LogStore, as do the following methods.
func (j *journal) FirstIndex() (index uint64, err error) {
	err = j.read(func(w *wal.WAL) error {
		index, err = w.FirstIndex()
		return err
	})
	return index, err
}

// LastIndex returns 0 if there are no entries.
func (j *journal) LastIndex() (index uint64, err error) {
	err = j.read(func(w *wal.WAL) error {
		index, err = w.LastIndex()
		return err
	})
	return index, err
}

// GetLog returns raft.ErrLogNotFound if there is no such entry.
func (j *journal) GetLog(index uint64, log *raft.Log) error {
	return j.read(func(w *wal.WAL) error { return w.GetLog(index, log) })
}

// StoreLog appends an entry.
func (j *journal) StoreLog(log *raft.Log) error { return j.StoreLogs([]*raft.Log{log}) }

// StoreLogs appends entries. They are durable when it has returned nil.
func (j *journal) StoreLogs(logs []*raft.Log) error {
	if len(logs) == 0 {
		return nil
	}
	return j.change(func(w *wal.WAL) error { return w.StoreLogs(logs) })
}

// DeleteRange removes entries from the beginning or from the end of the log. If it fails,
// they may be removed or not. At the end, Raft tries again when it must; what it appends
// before is refused if that would leave a gap. At the beginning, Raft does not try again,
// even if a snapshot with later entries than the log was received and entries after that
// follow. So the journal does it before the next write.
func (j *journal) DeleteRange(from, to uint64) error {
	return j.change(func(w *wal.WAL) error {
		first, err := w.FirstIndex()
		if err != nil {
			return err
		}
		if err := w.DeleteRange(from, to); err != nil {
			if from <= first {
				j.drop = max(j.drop, to)
			}
			return err
		}
		return nil
	})
}

// cover removes all entries if a snapshot contains later ones. A node that ended before
// it could do that then continues after the snapshot, and the log has no gaps.
func (j *journal) cover(snaps raft.SnapshotStore) error {
	list, err := snaps.List()
	if err != nil || len(list) == 0 {
		return err
	}
	last, err := j.LastIndex()
	if err != nil || last == 0 || last >= list[0].Index {
		return err
	}
	j.log.Info("a snapshot has replaced the log", "snapshot", list[0].Index, "last", last)
	if err := j.DeleteRange(0, last); err != nil && !noRoom(err) {
		return err
	}
	return nil
}

// Close closes the log.
func (j *journal) Close() error {
	j.write.Lock()
	defer j.write.Unlock()
	return errors.Join(j.open.Close(), j.meta.Close())
}

func noRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// openBolt opens a database of Raft. Only one process may have it open.
func openBolt(path string) (*raftboltdb.BoltStore, error) {
	bolt, err := raftboltdb.New(raftboltdb.Options{
		Path: path,
		BoltOptions: &bbolt.Options{
			Timeout: time.Second, // another process has it open
			// The list of free pages is computed at start, so that a commit writes less.
			NoFreelistSync: true, FreelistType: bbolt.FreelistMapType,
		},
		MsgpackUseNewTimeFormat: true,
	})
	if errors.Is(err, bbolt.ErrTimeout) {
		return nil, fmt.Errorf("%s: another process uses it", path)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return bolt, nil
}

// The folder of a node has its term, its vote and its log in logFolder, and its snapshots
// beside it. Older folders have oldFile instead.
const (
	logFolder  = "log"
	newFolder  = "log.new" // renamed to logFolder when it is complete
	stableFile = "stable.db"
	oldFile    = "raft.db"
)

// prepare makes the folder of the log if there is none, from the old file if there is
// one. The file is removed when the folder is complete and synced. After a crash at any
// point, one of the two is valid.
func prepare(dir string, log *slog.Logger) error {
	folder, old := filepath.Join(dir, logFolder), filepath.Join(dir, oldFile)
	if _, err := os.Stat(folder); err == nil {
		return discard(dir, old)
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	fresh := filepath.Join(dir, newFolder)
	if err := os.RemoveAll(fresh); err != nil {
		return err
	}
	if err := os.Mkdir(fresh, 0o700); err != nil {
		return err
	}
	if err := fill(fresh, old, log); err != nil {
		// Free the space of the incomplete copy, which others may need.
		return errors.Join(err, os.RemoveAll(fresh))
	}
	if err := syncDir(fresh); err != nil {
		return err
	}
	if err := os.Rename(fresh, folder); err != nil {
		return err
	}
	return discard(dir, old)
}

// discard removes the old file from a folder that has the log. The removal is durable.
func discard(dir, old string) error {
	// First sync the log's folder: it must exist when the file does not.
	if err := syncDir(dir); err != nil {
		return err
	}
	if err := os.Remove(old); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}
	return syncDir(dir)
}

// fill fills a new folder.
func fill(fresh, old string, log *slog.Logger) (err error) {
	stable, err := openBolt(filepath.Join(fresh, stableFile))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stable.Close()) }()
	j, err := openJournal(fresh, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.Close()) }()
	if _, err := os.Stat(old); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	from, err := openBolt(old)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	if err := convert(stable, j, from); err != nil {
		return fmt.Errorf("convert %s: %w; it is as it was", old, err)
	}
	first, _ := j.FirstIndex()
	last, _ := j.LastIndex()
	log.Info("the log was converted", "from", old, "first", first, "last", last)
	return nil
}

// convert copies the content of the old file.
func convert(stable raft.StableStore, to raft.LogStore, from *raftboltdb.BoltStore) error {
	for _, key := range []string{"CurrentTerm", "LastVoteTerm", "LastVoteCand"} { // all keys that Raft uses
		v, err := from.Get([]byte(key))
		if errors.Is(err, raftboltdb.ErrKeyNotFound) {
			continue
		}
		if err == nil {
			err = stable.Set([]byte(key), v)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	first, err := from.FirstIndex()
	if err != nil {
		return err
	}
	last, err := from.LastIndex()
	if err != nil || last == 0 {
		return err
	}
	// Entries before the last gap are contained in a snapshot.
	first = afterGaps(from, first, last)
	var batch []*raft.Log
	size := 0
	for i := first; i <= last; i++ {
		x := new(raft.Log)
		if err := from.GetLog(i, x); err != nil {
			return fmt.Errorf("entry %d: %w", i, err)
		}
		batch = append(batch, x)
		if size += len(x.Data); size < copyBatch && i < last {
			continue
		}
		if err := to.StoreLogs(batch); err != nil {
			return fmt.Errorf("entry %d: %w", i, err)
		}
		batch, size = nil, 0
	}
	return nil
}

// afterGaps returns the index of the first entry after the last gap.
func afterGaps(from raft.LogStore, first, last uint64) uint64 {
	for i := last; i > first; i-- {
		if err := from.GetLog(i-1, new(raft.Log)); errors.Is(err, raft.ErrLogNotFound) {
			return i
		}
	}
	return first
}
