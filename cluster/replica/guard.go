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

// guard wraps Raft's storage, and handles disks that fail.
//
// The Raft library panics when it cannot write its term or read its log. With a full
// disk, that would be a crash loop. The guard repeats such a write until it succeeds.
// Meanwhile Raft's main thread is blocked: the node does not vote, lead or acknowledge
// entries, as it must be without the disk. An error of writing entries is returned to
// Raft: a leader steps down, and a follower answers its leader with an error.
//
// A full disk is tried again. After any other error, the disk may have lost data that was
// written before (after a failed fsync, the kernel drops the pages), so nothing more is
// written until the node is started again and reads what is on the disk.
//
// While a write of the main thread is blocked or repeated, the library would continue to
// send heartbeats for a leader that does nothing else, so the other hosts would not elect
// another leader. So transport stops sending after some time; see stalled.
type guard struct {
	log     *slog.Logger
	start   time.Time
	since   atomic.Int64 // when the main thread's write began, since start; 0: no write is in progress
	closing chan struct{}
	once    sync.Once

	mu     sync.Mutex
	sick   map[string]error // errors of the last attempts to write
	broken bool             // one of them was not ENOSPC
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

// health returns why the disk does not work, or nil.
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

// write executes a write, unless the disk is broken.
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

// main executes a write of Raft's main thread.
func (g *guard) main(f func()) {
	g.since.Store(max(int64(time.Since(g.start)), 1))
	defer g.since.Store(0)
	f()
}

// stalled reports whether Raft's main thread has been writing for longer than limit.
func (g *guard) stalled(limit time.Duration) bool {
	since := g.since.Load()
	return since != 0 && time.Since(g.start)-time.Duration(since) > limit
}

// insist repeats f until it succeeds. If the node is closed before, the goroutine ends
// here with its deferred calls: no return value would be true, and Raft panics at an
// error.
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
