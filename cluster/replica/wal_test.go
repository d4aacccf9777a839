package replica

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/metadb"
	"github.com/hashicorp/raft-wal/types"
	"golang.org/x/sys/unix"
)

var quiet = slog.New(slog.DiscardHandler)

// filled is an entry whose data shows whether it is whole and at its place.
func filled(index, term uint64, size int) *raft.Log {
	data := make([]byte, max(size, 16))
	r := rand.NewChaCha8([32]byte{byte(index), byte(index >> 8), byte(index >> 16), byte(term)})
	_, _ = r.Read(data)
	binary.LittleEndian.PutUint64(data, index)
	binary.LittleEndian.PutUint64(data[8:], term)
	return &raft.Log{Index: index, Term: term, Type: raft.LogCommand, Data: data}
}

func open(t *testing.T, dir string) *journal {
	t.Helper()
	j, err := openJournal(dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	return j
}

// has looks for entries of these indexes and a term, and for nothing else.
func has(t *testing.T, j raft.LogStore, first, last uint64, term func(uint64) uint64) {
	t.Helper()
	f, err1 := j.FirstIndex()
	l, err2 := j.LastIndex()
	if f != first || l != last || err1 != nil || err2 != nil {
		t.Fatalf("entries %d to %d, not %d to %d: %v, %v", f, l, first, last, err1, err2)
	}
	for i := first; i <= last; i++ {
		var x raft.Log
		if err := j.GetLog(i, &x); err != nil {
			t.Fatalf("entry %d: %v", i, err)
		}
		if want := filled(i, term(i), len(x.Data)); x.Index != i || x.Term != want.Term || !bytes.Equal(x.Data, want.Data) {
			t.Fatalf("entry %d: index %d, term %d, %d bytes", i, x.Index, x.Term, len(x.Data))
		}
	}
	if err := j.GetLog(last+1, new(raft.Log)); !errors.Is(err, raft.ErrLogNotFound) {
		t.Fatalf("entry %d: %v", last+1, err)
	}
}

func one(uint64) uint64 { return 1 }

func store(t *testing.T, j raft.LogStore, first, last, term uint64, size int) {
	t.Helper()
	for i := first; i <= last; i++ {
		if err := j.StoreLog(filled(i, term, size)); err != nil {
			t.Fatalf("entry %d: %v", i, err)
		}
	}
}

func TestJournal(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir)
	if !j.IsMonotonic() {
		t.Error("it has gaps")
	}
	store(t, j, 1, 300, 1, 10<<10) // some segments
	has(t, j, 1, 300, one)
	if err := j.DeleteRange(1, 150); err != nil {
		t.Fatal(err)
	}
	if err := j.DeleteRange(280, 300); err != nil { // a new leader knows better
		t.Fatal(err)
	}
	term := func(i uint64) uint64 { return 1 + i/280 }
	store(t, j, 280, 290, 2, 1000)
	has(t, j, 151, 290, term)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = open(t, dir)
	has(t, j, 151, 290, term)
	if err := j.StoreLog(filled(400, 1, 100)); err == nil {
		t.Error("there is a gap")
	}
	has(t, j, 151, 290, term)
	if err := j.DeleteRange(151, 290); err != nil { // as for a snapshot that goes further
		t.Fatal(err)
	}
	store(t, j, 400, 410, 1, 100)
	has(t, j, 400, 410, one)
	if err := j.DeleteRange(400, 410); err != nil {
		t.Fatal(err)
	}
	store(t, j, 700, 710, 1, 100)
	has(t, j, 700, 710, one)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	has(t, open(t, dir), 700, 710, one)
	files, err := filepath.Glob(filepath.Join(dir, "*.wal"))
	if err != nil || len(files) != 1 {
		t.Errorf("%v, %v", files, err)
	}
}

// stuck is a metadata's store that takes nothing any more: what a process
// that ends before the commit leaves behind.
type stuck struct {
	metadb.BoltMetaDB
	fail error
}

func (s *stuck) CommitState(p types.PersistentState) error {
	if s.fail != nil {
		return s.fail
	}
	return s.BoltMetaDB.CommitState(p)
}

// TestCrashAtRotation ends after the append that fills a segment and before
// the next segment is made known.
func TestCrashAtRotation(t *testing.T) {
	for _, drop := range []uint64{0, 7} {
		dir := t.TempDir()
		meta := &stuck{}
		w, err := wal.Open(dir, wal.WithSegmentSize(segmentSize), wal.WithMetaStore(meta), wal.WithLogger(newLogger(quiet)))
		if err != nil {
			t.Fatal(err)
		}
		last := uint64(20)
		store(t, w, 1, last, 1, 10<<10)
		if drop > 0 {
			if err := w.DeleteRange(1, drop); err != nil {
				t.Fatal(err)
			}
		}
		meta.fail = errors.New("the process is gone")
		for err == nil {
			if err = w.StoreLog(filled(last+1, 1, 10<<10)); err == nil {
				last++
			}
		}
		if !errors.Is(err, types.ErrSealed) {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		j := open(t, dir)
		has(t, j, drop+1, last, one)
		store(t, j, last+1, last+300, 1, 10<<10)
		has(t, j, drop+1, last+300, one)
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		has(t, open(t, dir), drop+1, last+300, one)
	}
}

// TestTornTail damages what an append that was not acknowledged may have left.
func TestTornTail(t *testing.T) {
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 1))
		dir := t.TempDir()
		j := open(t, dir)
		acked := 1 + r.Uint64N(80)
		store(t, j, 1, acked, 1, 10<<10)
		tail := func() string {
			files, err := filepath.Glob(filepath.Join(dir, "*.wal"))
			if err != nil || len(files) == 0 {
				t.Fatal(files, err)
			}
			return files[len(files)-1]
		}
		before, err := os.ReadFile(tail())
		if err != nil {
			t.Fatal(err)
		}
		name := tail()
		var batch []*raft.Log
		for i := range 1 + r.Uint64N(4) {
			batch = append(batch, filled(acked+1+i, 1, 10+r.IntN(3000)))
		}
		if err := j.StoreLogs(batch); err != nil {
			t.Fatal(err)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		if tail() != name {
			continue // it was rotated: no torn tail then
		}
		after, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		from := 0
		for from < len(before) && before[from] == after[from] {
			from++
		}
		to := len(after)
		for to > from && after[to-1] == 0 {
			to--
		}
		// The append's blocks reached the disk in part.
		torn := bytes.Clone(after)
		cut := from + r.IntN(to-from)
		switch seed % 3 {
		case 0: // the beginning
			copy(torn[cut:], before[cut:])
		case 1: // the end, but not the beginning
			copy(torn[from:cut+1], before[from:cut+1])
		case 2: // a hole
			for i := cut; i < min(cut+64, to); i++ {
				torn[i] = before[i]
			}
		}
		if bytes.Equal(torn, after) {
			continue
		}
		if err := os.WriteFile(name, torn, 0o600); err != nil {
			t.Fatal(err)
		}
		j = open(t, dir)
		has(t, j, 1, acked, one)
		store(t, j, acked+1, acked+60, 1, 10<<10)
		has(t, j, 1, acked+60, one)
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		has(t, open(t, dir), 1, acked+60, one)
	}
}

// A disk is found full when what was appended is synced. Raft takes that for not written, and has other
// entries in its place later; what is in the file must not be in the way.
func TestAppendWhoseSyncHasFailed(t *testing.T) {
	for _, acked := range []uint64{0, 10} {
		dir, other := t.TempDir(), t.TempDir()
		j := open(t, dir)
		store(t, j, 1, acked, 1, 100)
		if err := os.CopyFS(other, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		k := open(t, other)
		store(t, k, acked+1, acked+3, 1, 100)
		if err := k.Close(); err != nil {
			t.Fatal(err)
		}
		files, err := filepath.Glob(filepath.Join(other, "*.wal"))
		if err != nil || len(files) != 1 {
			t.Fatal(files, err)
		}
		data, err := os.ReadFile(files[0])
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(filepath.Join(dir, filepath.Base(files[0])), os.O_WRONLY, 0)
		if err == nil {
			_, err = f.Write(data)
		}
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		j.dirty = true // as after the error
		store(t, j, acked+1, acked+2, 2, 200)
		term := func(i uint64) uint64 {
			if i > acked {
				return 2
			}
			return 1
		}
		has(t, j, 1, acked+2, term)
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		has(t, open(t, dir), 1, acked+2, term)
	}
}

// TestKilled ends a process that appends, again and again.
func TestKilled(t *testing.T) {
	if dir := os.Getenv("GPUCTL_TEST_APPEND"); dir != "" {
		appendForever(dir)
	}
	if testing.Short() {
		t.Skip("it starts processes")
	}
	dir := t.TempDir()
	total := uint64(0)
	for round := range 40 {
		cmd := exec.Command(os.Args[0], "-test.run", "^TestKilled$")
		cmd.Env = append(os.Environ(), "GPUCTL_TEST_APPEND="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// It is killed in the middle of an append, after so many, however long that takes.
		appends, killed := 1+rand.IntN(20), false
		acked, said := total, ""
		for lines := bufio.NewScanner(out); lines.Scan(); {
			n, err := strconv.ParseUint(lines.Text(), 10, 64)
			if err != nil {
				said += lines.Text() + "\n"
				continue
			}
			acked = n
			if appends--; appends == 0 {
				time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
				killed = cmd.Process.Kill() == nil
			}
		}
		if err := cmd.Wait(); !killed {
			t.Fatalf("round %d: it ended: %v: %s", round, err, said)
		}
		j := open(t, dir)
		last, err := j.LastIndex()
		if err != nil || last < acked || last > acked+3 {
			t.Fatalf("round %d: last entry %d of %d that were acknowledged: %v", round, last, acked, err)
		}
		first, err := j.FirstIndex()
		if err != nil {
			t.Fatal(err)
		}
		has(t, j, first, last, one)
		total = last
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d entries", total)
}

func appendForever(dir string) {
	j, err := openJournal(dir, quiet)
	if err != nil {
		fmt.Fprintln(os.Stdout, err)
		os.Exit(1)
	}
	next, _ := j.LastIndex()
	for next++; ; next += 3 {
		err := j.StoreLogs([]*raft.Log{filled(next, 1, 30<<10), filled(next+1, 1, 30<<10), filled(next+2, 1, 100)})
		if err == nil && next%200 == 0 {
			err = j.DeleteRange(1, next-100)
		}
		if err != nil {
			fmt.Fprintln(os.Stdout, err)
			os.Exit(1)
		}
		fmt.Fprintln(os.Stdout, next+2)
	}
}

// small is a file system that can be filled.
func small(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700,size="+size); err != nil {
		t.Skipf("no small file system (%v): needs root and mount(2)", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// ballast fills a file system, but for some bytes.
func ballast(t *testing.T, dir string, leave int64) (empty func()) {
	t.Helper()
	name := filepath.Join(dir, "ballast")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	size := int64(0)
	for err == nil {
		var n int
		n, err = f.Write(make([]byte, 4096))
		size += int64(n)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(max(0, size-leave)), f.Close()); err != nil {
		t.Fatal(err)
	}
	return func() { _ = os.Remove(name) }
}

// TestNoRoom fills the disk with different amounts of room left, so that it
// ends at each of the steps of a rotation.
func TestNoRoom(t *testing.T) {
	for _, leave := range []int64{0, 4 << 10, 8 << 10, 12 << 10, 16 << 10, 32 << 10, 128 << 10, 1 << 20, 1<<20 + 4<<10, 1<<20 + 16<<10, 3<<20 - 4096} {
		t.Run(strconv.FormatInt(leave, 10), func(t *testing.T) {
			room := small(t, "24m")
			dir := filepath.Join(room, "log")
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			j := open(t, dir)
			term := map[uint64]uint64{}
			of := func(i uint64) uint64 { return term[i] }
			next := uint64(1)
			first := next
			add := func(n int) (err error) {
				for range n {
					if err = j.StoreLog(filled(next, 1, 9<<10)); err != nil {
						return err
					}
					term[next] = 1
					next++
				}
				return nil
			}
			for round := range 6 {
				if err := add(20 + 13*round); err != nil {
					t.Fatal(err)
				}
				empty := ballast(t, room, leave)
				err := add(2000)
				if !errors.Is(err, syscall.ENOSPC) {
					t.Fatalf("round %d: %v", round, err)
				}
				for range 3 { // as the leader does
					if err := j.StoreLog(filled(next, 1, 9<<10)); err == nil {
						t.Fatal("written without room")
					} else if !errors.Is(err, syscall.ENOSPC) {
						t.Fatalf("round %d: %v", round, err)
					}
				}
				has(t, j, first, next-1, of)
				if round%2 == 1 { // hostd is started anew, with the disk full
					if err := j.Close(); err != nil {
						t.Fatal(err)
					}
					j = open(t, dir)
					has(t, j, first, next-1, of)
					if err := j.StoreLog(filled(next, 1, 9<<10)); err == nil {
						term[next], next = 1, next+1
					} else if !errors.Is(err, syscall.ENOSPC) {
						t.Fatalf("round %d: %v", round, err)
					}
				}
				conflict := round%3 == 2 // a new leader knows better, and goes on to say so
				if conflict {
					if err := j.DeleteRange(next-3, next-1); err != nil && !errors.Is(err, syscall.ENOSPC) {
						t.Fatalf("round %d: %v", round, err)
					}
				}
				empty()
				if conflict {
					if err := j.DeleteRange(next-3, next-1); err != nil {
						t.Fatalf("round %d: %v", round, err)
					}
					next -= 3
				}
				has(t, j, first, next-1, of)
				if err := add(300); err != nil {
					t.Fatalf("round %d: with room: %v", round, err)
				}
				has(t, j, first, next-1, of)
				if err := j.DeleteRange(first, next-100); err != nil {
					t.Fatal(err)
				}
				first = next - 99
				has(t, j, first, next-1, of)
			}
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
			has(t, open(t, dir), first, next-1, of)
			files, err := filepath.Glob(filepath.Join(dir, "*.wal"))
			if err != nil || len(files) > 4 {
				t.Errorf("left behind: %v, %v", files, err)
			}
		})
	}
}

// old makes a folder as it was before: one file for all.
func old(t *testing.T, dir string, gap bool) {
	t.Helper()
	b, err := openBolt(filepath.Join(dir, oldFile))
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(b.SetUint64([]byte("CurrentTerm"), 5), b.SetUint64([]byte("LastVoteTerm"), 4), b.Set([]byte("LastVoteCand"), []byte("h")))
	if err != nil {
		t.Fatal(err)
	}
	store(t, b, 3, 200, 1, 20<<10)
	if gap {
		store(t, b, 300, 310, 1, 100)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
}

func converted(t *testing.T, dir string, gap bool) {
	t.Helper()
	s := &Store{cfg: Config{Dir: dir}, log: quiet}
	disk, err := s.disk()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.closeFiles(); err != nil {
			t.Error(err)
		}
	}()
	if gap {
		has(t, disk.Logs, 300, 310, one)
	} else {
		has(t, disk.Logs, 3, 200, one)
	}
	term, err1 := disk.Stable.GetUint64([]byte("CurrentTerm"))
	voted, err2 := disk.Stable.GetUint64([]byte("LastVoteTerm"))
	who, err3 := disk.Stable.Get([]byte("LastVoteCand"))
	if err := errors.Join(err1, err2, err3); err != nil || term != 5 || voted != 4 || string(who) != "h" {
		t.Errorf("term %d, voted in %d for %q: %v", term, voted, who, err)
	}
	for _, gone := range []string{oldFile, newFolder} {
		if _, err := os.Stat(filepath.Join(dir, gone)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", gone, err)
		}
	}
}

func TestConvert(t *testing.T) {
	for _, gap := range []bool{false, true} {
		dir := t.TempDir()
		old(t, dir, gap)
		converted(t, dir, gap)
		converted(t, dir, gap) // started anew
	}
}

// TestConvertCrash ends after each step of a conversion.
func TestConvertCrash(t *testing.T) {
	half := t.TempDir()
	old(t, half, false)
	fresh := filepath.Join(half, newFolder)
	if err := os.Mkdir(fresh, 0o700); err != nil {
		t.Fatal(err)
	}
	store(t, open(t, fresh), 1, 2, 9, 10) // something else
	if err := os.WriteFile(filepath.Join(fresh, stableFile), []byte("half a database"), 0o600); err != nil {
		t.Fatal(err)
	}
	converted(t, half, false)

	both := t.TempDir()
	old(t, both, false)
	data, err := os.ReadFile(filepath.Join(both, oldFile))
	if err != nil {
		t.Fatal(err)
	}
	converted(t, both, false)
	if err := os.WriteFile(filepath.Join(both, oldFile), data, 0o600); err != nil { // not removed yet
		t.Fatal(err)
	}
	converted(t, both, false)
}

func TestConvertRefused(t *testing.T) {
	// In use.
	dir := t.TempDir()
	old(t, dir, false)
	b, err := openBolt(filepath.Join(dir, oldFile))
	if err != nil {
		t.Fatal(err)
	}
	s := &Store{cfg: Config{Dir: dir}, log: quiet}
	if _, err := s.disk(); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("%v", err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	converted(t, dir, false)

	// No room: it is as it was.
	room := small(t, "16m")
	old(t, room, false)
	empty := ballast(t, room, 3<<20)
	s = &Store{cfg: Config{Dir: room}, log: quiet}
	if _, err := s.disk(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("%v", err)
	}
	empty()
	converted(t, room, false)
}

// TestSnapshotBeyondLog: Raft could not remove the log after it had installed a
// snapshot, for want of room or because it ended.
func TestSnapshotBeyondLog(t *testing.T) {
	dir := t.TempDir()
	s := &Store{cfg: Config{Dir: dir}, log: quiet}
	disk, err := s.disk()
	if err != nil {
		t.Fatal(err)
	}
	store(t, disk.Logs, 1, 50, 1, 100)
	_, trans := raft.NewInmemTransport("")
	defer trans.Close()
	for i, index := range []uint64{50, 99} { // the first says nothing that the log does not
		sink, err := disk.Snapshots.Create(1, index, 1, raft.Configuration{}, 1, trans)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(sink.Close(), s.closeFiles()); err != nil {
			t.Fatal(err)
		}
		if disk, err = s.disk(); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			has(t, disk.Logs, 1, 50, one)
		}
	}
	store(t, disk.Logs, 100, 120, 1, 100)
	has(t, disk.Logs, 100, 120, one)
	if err := s.closeFiles(); err != nil {
		t.Fatal(err)
	}
}

// TestRemoveWithoutRoom: what could not be removed is before the next write.
func TestRemoveWithoutRoom(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir)
	store(t, j, 1, 50, 1, 100)
	if err := os.Rename(dir, dir+".away"); err != nil { // the new segment has no place
		t.Fatal(err)
	}
	if err := j.DeleteRange(1, 50); err == nil {
		t.Fatal("removed all without a new segment")
	}
	if err := os.Rename(dir+".away", dir); err != nil {
		t.Fatal(err)
	}
	store(t, j, 100, 120, 1, 100)
	has(t, j, 100, 120, one)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	has(t, open(t, dir), 100, 120, one)
}
