package stash

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/statestream"
	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/internal/size"
)

var (
	// ErrFull means that the host has no room for a state.
	ErrFull = errors.New("no room for GPU states")
	// ErrNotFound means that this host does not have the state.
	ErrNotFound = errors.New("it is not kept here")

	errForgotten = errors.New("its migration has ended")
	errReplaced  = errors.New("a newer one takes its place")
	errName      = errors.New("not a name")
)

const (
	metaFile  = "state.json"
	bodyEnd   = ".state"
	partEnd   = ".part"
	growBy    = 4 << 20          // bytes that are reserved at a time if a state is larger than announced
	forgotten = 24 * time.Hour   // age at which a state is removed whose migration nobody knows
	tmpfs     = unix.TMPFS_MAGIC // f_type of statfs(2)
)

// State describes a state that is kept.
type State struct {
	Machine   string // UUID
	Session   string
	Migration string
	Mark      statestream.Mark
	Kept      time.Time
}

// Config has what a Stash depends on, and its settings.
type Config struct {
	Dir string // made if it does not exist
	// Limit returns how many bytes may be kept in total; 0: none. used is how many are
	// kept now.
	Limit func(used uint64) (uint64, error)
	Log   *slog.Logger
	Now   func() time.Time // nil: time.Now
}

// Stash is safe for concurrent use. A folder must be open in only one process.
type Stash struct {
	Config

	mu      sync.Mutex
	states  map[key]State
	writing map[key]*Writer
}

type key struct{ machine, session string }

// meta is a State in the form of its file.
type meta struct {
	Machine   string `json:"machine"`
	Session   string `json:"session"`
	Migration string `json:"migration"`
	ID        string `json:"id"`
	Size      uint64 `json:"size"`
	Digest    []byte `json:"digest"`
	KeptMS    int64  `json:"kept_ms"`
}

// Open opens a folder and removes incomplete states from it.
func Open(c Config) (*Stash, error) {
	if c.Now == nil {
		c.Now = time.Now
	}
	s := &Stash{Config: c, states: map[key]State{}, writing: map[key]*Writer{}}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("stash: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(c.Dir, &st); err == nil && st.Type != tmpfs {
		c.Log.Warn("the folder for GPU states is not in memory: what applications have on a GPU would be written to a disk", "folder", c.Dir)
	}
	dirs, err := filepath.Glob(filepath.Join(c.Dir, "*", "*"))
	if err != nil {
		return nil, fmt.Errorf("stash: %w", err)
	}
	for _, dir := range dirs {
		state, err := read(dir)
		if err != nil {
			c.Log.Warn("a GPU state that is not whole is dropped", "folder", dir, "err", err)
			if err := os.RemoveAll(dir); err != nil {
				return nil, fmt.Errorf("stash: %w", err)
			}
			_ = os.Remove(filepath.Dir(dir)) // fails if the VM has more states
			continue
		}
		s.states[key{state.Machine, state.Session}] = state
		s.tidy(dir, state.Mark.ID+bodyEnd)
	}
	return s, nil
}

// read returns the state in a session's folder.
func read(dir string) (State, error) {
	data, err := os.ReadFile(filepath.Join(dir, metaFile))
	if err != nil {
		return State{}, err
	}
	var m meta
	if err := json.Unmarshal(data, &m); err != nil {
		return State{}, err
	}
	mark, err := statestream.MarkOf(&gpuctlv1.StateMark{Id: m.ID, Size: m.Size, Digest: m.Digest})
	if err != nil {
		return State{}, err
	}
	if m.Machine != filepath.Base(filepath.Dir(dir)) || m.Session != filepath.Base(dir) || !named(m.ID) {
		return State{}, fmt.Errorf("%s of VM %s: %w", m.Session, m.Machine, errName)
	}
	info, err := os.Lstat(filepath.Join(dir, m.ID+bodyEnd))
	if err != nil {
		return State{}, err
	}
	if !info.Mode().IsRegular() || uint64(info.Size()) != mark.Size {
		return State{}, fmt.Errorf("%d bytes of %d: %w", info.Size(), mark.Size, statestream.ErrTruncated)
	}
	return State{Machine: m.Machine, Session: m.Session, Migration: m.Migration, Mark: mark, Kept: time.UnixMilli(m.KeptMS)}, nil
}

// tidy removes everything except the state from a session's folder.
func (s *Stash) tidy(dir, body string) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if name := e.Name(); name != body && name != metaFile {
			err = errors.Join(err, os.Remove(filepath.Join(dir, name)))
		}
	}
	if err != nil {
		s.Log.Warn("what is left of GPU states stays", "folder", dir, "err", err)
	}
}

// named reports whether a name that others have chosen is safe as an element of a path.
func named(s string) bool { return namePattern().MatchString(s) }

func namePattern() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$`) }

func (s *Stash) dir(k key) string { return filepath.Join(s.Dir, k.machine, k.session) }

// used returns how many bytes states take, including what is reserved for states that are
// being written; unwritten is the part of it that is not written yet.
func (s *Stash) used() (n, unwritten uint64) {
	for _, state := range s.states {
		n += state.Mark.Size
	}
	for _, w := range s.writing {
		n += w.aside
		unwritten += w.aside - w.size
	}
	return n, unwritten
}

// Room returns how many more bytes can be kept.
func (s *Stash) Room() (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.room(key{})
}

// Keeps reports whether this host keeps states at all.
func (s *Stash) Keeps() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	used, _ := s.used()
	limit, err := s.Limit(used)
	return err == nil && limit > 0
}

// room does the same for another state of a session. The one that is kept, which it replaces, does
// not count: a session that has come back and is to leave again must not be refused for what it has
// left behind. The file system must have room for both.
func (s *Stash) room(k key) (uint64, error) {
	used, unwritten := s.used()
	limit, err := s.Limit(used)
	if err != nil {
		return 0, fmt.Errorf("stash: %w", err)
	}
	used -= s.states[k].Mark.Size
	var st unix.Statfs_t
	if err := unix.Statfs(s.Dir, &st); err != nil {
		return 0, fmt.Errorf("stash: %w", err)
	}
	free := st.Bavail * uint64(st.Bsize)
	return min(limit-min(limit, used), free-min(free, unwritten)), nil
}

// Writer stores a state.
type Writer struct {
	s     *Stash
	state State
	f     *os.File
	check *statestream.Check
	size  uint64 // bytes written, including those being written
	aside uint64 // bytes reserved
	err   error
}

// Begin begins to store a state with this id, and reserves expect bytes for it. A Writer
// of the same session that is not finished fails. A state of the session that is kept
// stays until the new one is complete. Errors may wrap ErrFull. The caller must call
// Abort at the end, in any case.
func (s *Stash) Begin(machine, session, migration, id string, expect uint64) (*Writer, error) {
	if !named(machine) || !named(session) || !named(id) {
		return nil, fmt.Errorf("state %.80q of session %.80q of VM %.80q: %w", id, session, machine, errName)
	}
	w := &Writer{s: s, state: State{Machine: machine, Session: session, Migration: migration}, check: statestream.NewCheck()}
	w.state.Mark.ID = id
	k := key{machine, session}
	s.mu.Lock()
	defer s.mu.Unlock()
	if before := s.writing[k]; before != nil {
		before.fail(errReplaced)
	}
	if err := s.setAside(w, expect); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.dir(k), 0o700); err != nil {
		return nil, fmt.Errorf("stash: %w", err)
	}
	var err error
	if w.f, err = os.OpenFile(w.path(partEnd), os.O_CREATE|os.O_EXCL|os.O_WRONLY|unix.O_NOFOLLOW, 0o600); err != nil {
		return nil, fmt.Errorf("stash: %w", err)
	}
	s.writing[k] = w
	return w, nil
}

func (w *Writer) path(end string) string {
	return filepath.Join(w.s.dir(key{w.state.Machine, w.state.Session}), w.state.Mark.ID+end)
}

// setAside reserves more bytes for a state. The caller holds s.mu. Errors may wrap
// ErrFull.
func (s *Stash) setAside(w *Writer, more uint64) error {
	room, err := s.room(key{w.state.Machine, w.state.Session})
	if err != nil {
		return err
	}
	if more > room {
		return fmt.Errorf("session %s of VM %s needs %s more, and %s is left: %w", w.state.Session, w.state.Machine, size.Format(more), size.Format(room), ErrFull)
	}
	w.aside += more
	return nil
}

// fail ends a Writer and removes its file. The caller holds s.mu.
func (w *Writer) fail(err error) {
	if w.err != nil {
		return
	}
	w.err = err
	k := key{w.state.Machine, w.state.Session}
	if w.s.writing[k] == w {
		delete(w.s.writing, k)
	}
	if err := errors.Join(w.f.Close(), os.Remove(w.path(partEnd))); err != nil {
		w.s.Log.Warn("what is left of a GPU state stays", "file", w.path(partEnd), "err", err)
	}
	w.s.prune(k)
}

// prune removes empty folders. The caller holds s.mu.
func (s *Stash) prune(k key) {
	if os.Remove(s.dir(k)) == nil {
		_ = os.Remove(filepath.Dir(s.dir(k))) // fails if another session has a state in it
	}
}

// Take stores the next chunk. kept reports that it was the last one, and that the
// complete state is kept and has replaced an older one. After an error the Writer has
// ended.
func (w *Writer) Take(chunk *gpuctlv1.StateChunk) (kept bool, err error) {
	end, err := w.check.Take(chunk)
	if err == nil {
		err = w.grow(uint64(len(chunk.GetData())))
	}
	// Written without the lock. If fail closes the file meanwhile, the write fails.
	if err == nil && !end {
		if _, err = w.f.Write(chunk.GetData()); errors.Is(err, unix.ENOSPC) {
			err = fmt.Errorf("%w: %w", ErrFull, err)
		}
	}
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	if err == nil && w.err == nil && end {
		err = w.keep()
		kept = err == nil
	}
	if w.err != nil && !kept {
		return false, w.err
	}
	if err != nil {
		w.fail(err)
	}
	return kept, err
}

// grow counts n more bytes, and reserves room for them.
func (w *Writer) grow(n uint64) error {
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	if need := w.size + n; need > w.aside {
		if w.s.setAside(w, max(need-w.aside, growBy)) != nil { // if there is not so much room, reserve only what is needed
			if err := w.s.setAside(w, need-w.aside); err != nil {
				return err
			}
		}
	}
	w.size += n
	return nil
}

// keep makes the state the session's. The caller holds s.mu.
func (w *Writer) keep() error {
	mark := w.check.Mark()
	if mark.ID != w.state.Mark.ID {
		return fmt.Errorf("%v came as %s: %w", mark, w.state.Mark.ID, statestream.ErrStale)
	}
	w.state.Mark, w.state.Kept = mark, w.s.Now()
	data, err := json.Marshal(meta{
		Machine: w.state.Machine, Session: w.state.Session, Migration: w.state.Migration,
		ID: mark.ID, Size: mark.Size, Digest: mark.Digest[:], KeptMS: w.state.Kept.UnixMilli(),
	})
	if err != nil {
		return err
	}
	k := key{w.state.Machine, w.state.Session}
	// Until the file with the mark is replaced, the older state is the session's.
	if err := os.Rename(w.path(partEnd), w.path(bodyEnd)); err != nil {
		return err
	}
	if err := durable.Replace(filepath.Join(w.s.dir(k), metaFile), data, 0o600); err != nil {
		return errors.Join(err, os.Rename(w.path(bodyEnd), w.path(partEnd)))
	}
	w.err = fs.ErrClosed
	delete(w.s.writing, k)
	w.s.states[k] = w.state
	w.s.tidy(w.s.dir(k), mark.ID+bodyEnd)
	return w.f.Close()
}

// Abort drops a state that is not complete. After Take has returned kept, it does
// nothing.
func (w *Writer) Abort() {
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	w.fail(fs.ErrClosed)
}

// Find returns the state of a session. Errors wrap ErrNotFound if there is none.
func (s *Stash) Find(machine, session string) (State, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	state, ok := s.states[key{machine, session}]
	if !ok {
		return State{}, fmt.Errorf("state of session %.80q of VM %.80q: %w", session, machine, ErrNotFound)
	}
	return state, nil
}

// Send sends a state in chunks. The last one has the mark. If the file differs from what
// was stored, the mark is not sent, and the error wraps statestream.ErrCorrupt. If the
// file does not exist, the error wraps ErrNotFound.
func (s *Stash) Send(state State, send func(*gpuctlv1.StateChunk) error) error {
	k := key{state.Machine, state.Session}
	f, err := os.Open(filepath.Join(s.dir(k), state.Mark.ID+bodyEnd))
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("state of session %s of VM %s: %w", state.Session, state.Machine, err)
	}
	defer f.Close()
	w := statestream.NewWriter(func(chunk *gpuctlv1.StateChunk) error {
		if chunk.GetMark() == nil {
			return send(chunk)
		}
		if mark, err := statestream.MarkOf(chunk.GetMark()); err != nil || mark != state.Mark {
			return fmt.Errorf("what is kept of session %s of VM %s: %w", state.Session, state.Machine, statestream.ErrCorrupt)
		}
		return send(chunk)
	})
	if _, err := io.Copy(w, f); err != nil {
		return err
	}
	_, err = w.End(state.Mark.ID)
	return err
}

// Forget removes a VM's states that are kept for a migration, including those being
// written.
func (s *Stash) Forget(machine, migration string) error {
	return s.drop("forgotten", func(state State) bool { return state.Machine == machine && state.Migration == migration })
}

// Sweep removes the states of migrations that have ended. A state whose migration nobody
// knows is kept for a day.
func (s *Stash) Sweep(ended func(migration string) (ended, known bool)) error {
	return s.drop("its migration has ended", func(state State) bool {
		over, known := ended(state.Migration)
		return over || !known && s.Now().Sub(state.Kept) > forgotten
	})
}

func (s *Stash) drop(why string, which func(State) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.writing {
		w.state.Kept = s.Now() // a state that is being written is not old
		if which(w.state) {
			w.fail(errForgotten)
		}
	}
	var errs []error
	for k, state := range s.states {
		if !which(state) {
			continue
		}
		// The folder stays, because a newer state may be being written into it.
		for _, name := range []string{metaFile, state.Mark.ID + bodyEnd} {
			if err := os.Remove(filepath.Join(s.dir(k), name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, fmt.Errorf("state of session %s of VM %s: %w", state.Session, state.Machine, err))
			}
		}
		delete(s.states, k)
		s.prune(k)
		s.Log.Info("a GPU state is dropped", "machine", state.Machine, "session", state.Session, "migration", state.Migration, "why", why)
	}
	return errors.Join(errs...)
}
