package replica

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/raft"
)

// guard stands between Raft and its disk.
//
// Raft ends the process when it cannot write its term or read its log, which
// on a full disk would be a crash loop. Here such a write is tried again until
// it succeeds. Meanwhile Raft's main thread stands still: the node neither
// votes nor leads nor acknowledges entries, which is what must not happen
// without the disk. A failed write of entries goes back to Raft, which steps
// down as a leader and answers its leader with an error as a follower.
//
// A disk without room is asked again. One that failed in any other way may
// have lost what it said it wrote (after a failed fsync the kernel forgets the
// pages), so nothing more is written until the node is started anew and reads
// what is really there.
//
// While a write of the main thread hangs or is tried again, the library would
// go on sending heartbeats for a leader that does nothing else, and so keep the
// others from electing one. After a while transport sends nothing more: see
// stalled.
type guard struct {
	log     *slog.Logger
	start   time.Time
	since   atomic.Int64 // when the main thread's write began, from start; 0: none
	closing chan struct{}
	once    sync.Once

	mu     sync.Mutex
	sick   map[string]error // what could not be written the last time
	broken bool             // and not for want of room
}

var errBroken = errors.New("the disk failed: nothing is written to it until this host's daemon is started anew")

func newGuard(log *slog.Logger) *guard {
	return &guard{log: log, start: time.Now(), closing: make(chan struct{}), sick: map[string]error{}}
}

func (g *guard) close() { g.once.Do(func() { close(g.closing) }) }

func (g *guard) wrap(s Storage) Storage {
	return Storage{
		Logs:      &guardedLogs{s.Logs, g},
		Stable:    &guardedStable{s.Stable, g},
		Snapshots: &guardedSnapshots{s.Snapshots, g},
	}
}

// health is nil, or why the disk does not do its work.
func (g *guard) health() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	errs := make([]error, 0, 2)
	for _, what := range slices.Sorted(maps.Keys(g.sick)) {
		errs = append(errs, fmt.Errorf("%s: %w", what, g.sick[what]))
	}
	if g.broken {
		errs = append(errs, errBroken)
	}
	return errors.Join(errs...)
}

// write does a write, unless the disk is broken.
func (g *guard) write(what string, f func() error) error {
	g.mu.Lock()
	broken := g.broken
	g.mu.Unlock()
	if broken {
		return errBroken
	}
	err := f()
	g.mu.Lock()
	defer g.mu.Unlock()
	if err == nil {
		if g.sick[what] != nil && !g.broken {
			delete(g.sick, what)
			g.log.Info("the disk takes writes again", "what", what)
		}
		return nil
	}
	if g.sick[what] == nil {
		g.log.Error("the disk refused a write", "what", what, "err", err)
	}
	g.sick[what] = err
	if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		g.broken = true
	}
	return err
}

// main does a write of Raft's main thread.
func (g *guard) main(f func()) {
	g.since.Store(max(int64(time.Since(g.start)), 1))
	defer g.since.Store(0)
	f()
}

// stalled reports whether Raft's main thread has been writing for longer than a
// limit.
func (g *guard) stalled(limit time.Duration) bool {
	since := g.since.Load()
	return since != 0 && time.Since(g.start)-time.Duration(since) > limit
}

// insist does something until it succeeds. When the node closes first, the
// goroutine ends here with its deferred calls: there is no answer that would
// not be a lie, and Raft panics at an error.
func (g *guard) insist(f func() error) {
	for wait := 10 * time.Millisecond; f() != nil; wait = min(2*wait, time.Second) {
		select {
		case <-g.closing:
			runtime.Goexit()
		case <-time.After(wait):
		}
	}
}

type guardedLogs struct {
	raft.LogStore
	g *guard
}

// IsMonotonic implements raft.MonotonicLogStore.
func (l *guardedLogs) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

func (l *guardedLogs) GetLog(index uint64, log *raft.Log) error {
	missing := false
	l.g.insist(func() error {
		err := l.LogStore.GetLog(index, log)
		if errors.Is(err, raft.ErrLogNotFound) {
			missing = true
			return nil
		}
		if err != nil {
			l.g.log.Error("an entry cannot be read", "index", index, "err", err)
		}
		return err
	})
	if missing {
		return raft.ErrLogNotFound
	}
	return nil
}

func (l *guardedLogs) StoreLog(log *raft.Log) error { return l.StoreLogs([]*raft.Log{log}) }

func (l *guardedLogs) StoreLogs(logs []*raft.Log) (err error) {
	l.g.main(func() { err = l.g.write("entries", func() error { return l.LogStore.StoreLogs(logs) }) })
	return err
}

func (l *guardedLogs) DeleteRange(from, to uint64) error {
	return l.g.write("entries", func() error { return l.LogStore.DeleteRange(from, to) })
}

type guardedStable struct {
	raft.StableStore
	g *guard
}

func (s *guardedStable) Set(key, value []byte) error {
	s.g.main(func() {
		s.g.insist(func() error {
			return s.g.write(string(key), func() error { return s.StableStore.Set(key, value) })
		})
	})
	return nil
}

func (s *guardedStable) SetUint64(key []byte, value uint64) error {
	s.g.main(func() {
		s.g.insist(func() error {
			return s.g.write(string(key), func() error { return s.StableStore.SetUint64(key, value) })
		})
	})
	return nil
}

type guardedSnapshots struct {
	raft.SnapshotStore
	g *guard
}

func (s *guardedSnapshots) Create(v raft.SnapshotVersion, index, term uint64, c raft.Configuration, at uint64, t raft.Transport) (raft.SnapshotSink, error) {
	var sink raft.SnapshotSink
	err := s.g.write("snapshot", func() (err error) {
		sink, err = s.SnapshotStore.Create(v, index, term, c, at, t)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &guardedSink{sink, s.g}, nil
}

type guardedSink struct {
	raft.SnapshotSink
	g *guard
}

var _ io.Writer = (*guardedSink)(nil)

func (s *guardedSink) Write(p []byte) (n int, err error) {
	err = s.g.write("snapshot", func() error {
		n, err = s.SnapshotSink.Write(p)
		return err
	})
	return n, err
}

func (s *guardedSink) Close() error {
	return s.g.write("snapshot", s.SnapshotSink.Close)
}
