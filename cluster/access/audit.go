package access

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/gpuctl/gpuctl/cluster/pki/throttle"
	"github.com/gpuctl/gpuctl/internal/excerpt"
)

const (
	auditSync   = 100 * time.Millisecond
	auditRetry  = time.Second
	auditSize   = 16 << 20
	auditKeep   = 8
	auditMemory = 4096 // most lines that wait for the disk
)

// Entry is one line of the audit trail.
type Entry struct {
	Time       time.Time      `json:"time"` // when the call began
	Kind       string         `json:"kind"`
	Caller     string         `json:"caller"`
	Role       string         `json:"role"`
	UID        *uint32        `json:"uid,omitempty"`
	PID        int32          `json:"pid,omitempty"`
	From       string         `json:"from,omitempty"`
	Procedure  string         `json:"procedure"`
	Object     string         `json:"object,omitempty"`
	Args       map[string]any `json:"args,omitempty"`
	Outcome    string         `json:"outcome"` // ok, or Connect's code
	Message    string         `json:"message,omitempty"`
	DurationMs float64        `json:"duration_ms"`
}

func (g *Gate) entry(c Caller, procedure string, m proto.Message, began time.Time, err error) Entry {
	e := Entry{
		Time: began.UTC(), Kind: c.Kind.String(), Caller: c.ID, Role: roleName(c.Role), PID: c.PID, From: c.Address,
		Procedure: procedure, Object: object(m), Args: summary(m), Outcome: "ok",
		DurationMs: float64(g.Now().Sub(began).Microseconds()) / 1000,
	}
	if c.Kind == Local {
		e.UID = &c.UID
	}
	if err != nil {
		e.Outcome = connect.CodeOf(err).String()
		var coded *connect.Error
		if errors.As(err, &coded) {
			e.Message = excerpt.Of(coded.Message(), maxText)
		} else {
			e.Message = excerpt.Of(err.Error(), maxText)
		}
	}
	return e
}

// AuditConfig has the settings of an AuditLog.
type AuditConfig struct {
	Path  string
	Log   *slog.Logger
	Size  int64         // largest size of a file in bytes, before a new one is begun; 0: 16 MiB
	Keep  int           // number of full files that are kept, as Path.1 (the latest) to Path.N; 0: 8
	Sync  time.Duration // how long a line may wait until it is synced to disk; 0: 100 ms
	Retry time.Duration // pause after a failure; 0: 1 s
}

// AuditLog is a file with one line of JSON for each entry. A nil one is valid and
// discards entries.
type AuditLog struct {
	AuditConfig

	quiet *throttle.Throttle
	bell  chan struct{}
	stop  chan struct{}
	done  chan struct{}

	mu     sync.Mutex
	lines  [][]byte // lines that wait for the disk
	lost   uint64   // lines that were dropped since the last one was written
	counts AuditCounts

	writing sync.Mutex // held while the file is used
	file    *os.File
	size    int64 // size of the file up to its last complete line
}

// AuditCounts are counters for metrics.
type AuditCounts struct {
	Lines  uint64 // lines written
	Lost   uint64 // lines dropped
	Errors uint64 // failures of writing, syncing and rotating
}

// OpenAudit opens the file, or makes it. It returns an error if it cannot. Later failures
// are logged and counted.
func OpenAudit(c AuditConfig) (*AuditLog, error) {
	set(&c.Size, auditSize)
	set(&c.Keep, auditKeep)
	set(&c.Sync, auditSync)
	set(&c.Retry, auditRetry)
	a := &AuditLog{AuditConfig: c, quiet: throttle.New(quietFor, time.Now), bell: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
	if err := a.open(); err != nil {
		return nil, err
	}
	go a.run()
	return a, nil
}

func set[T comparable](v *T, value T) {
	var zero T
	if *v == zero {
		*v = value
	}
}

// Append adds an entry. It never waits for the disk.
func (a *AuditLog) Append(e Entry) {
	if a == nil {
		return
	}
	line, err := json.Marshal(e)
	if err != nil { // an argument cannot be written as JSON; keep the other fields
		e.Args = map[string]any{"unprintable": err.Error()}
		if line, err = json.Marshal(e); err != nil {
			a.problem("audit entry cannot be written", err)
			return
		}
	}
	a.mu.Lock()
	if len(a.lines) >= auditMemory {
		a.lines[0] = nil
		a.lines = a.lines[1:]
		a.lost++
		a.counts.Lost++
	}
	a.lines = append(a.lines, append(line, '\n'))
	a.mu.Unlock()
	select {
	case a.bell <- struct{}{}:
	default:
	}
}

// Counts returns the counters.
func (a *AuditLog) Counts() AuditCounts {
	if a == nil {
		return AuditCounts{}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.counts
}

// Flush writes the waiting lines to the disk.
func (a *AuditLog) Flush() error {
	if a == nil {
		return nil
	}
	a.writing.Lock()
	defer a.writing.Unlock()
	return a.flush()
}

// Close writes the waiting lines and closes the file.
func (a *AuditLog) Close() error {
	if a == nil {
		return nil
	}
	close(a.stop)
	<-a.done
	a.writing.Lock()
	defer a.writing.Unlock()
	err := a.flush()
	if a.file != nil {
		err = errors.Join(err, a.file.Close())
	}
	return err
}

func (a *AuditLog) run() {
	defer close(a.done)
	for {
		select {
		case <-a.stop:
			return
		case <-a.bell:
		}
		wait := a.Sync // more lines may come soon; one sync is enough for all of them
		for {
			timer := time.NewTimer(wait)
			select {
			case <-a.stop:
				timer.Stop()
				return
			case <-timer.C:
			}
			if a.Flush() == nil {
				break
			}
			wait = a.Retry
		}
	}
}

func (a *AuditLog) problem(message string, err error) {
	a.mu.Lock()
	a.counts.Errors++
	a.mu.Unlock()
	if skipped, ok := a.quiet.Allow(message); ok {
		a.Log.Error(message, "file", a.Path, "err", err, "skipped", skipped)
	}
}

func (a *AuditLog) open() error {
	f, err := os.OpenFile(a.Path, os.O_RDWR|os.O_CREATE|os.O_APPEND|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("audit trail: %w", err)
	}
	size, err := prepare(f)
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("audit trail %s: %w", a.Path, err)
	}
	a.file, a.size = f, size
	return nil
}

// prepare makes sure that a file is private and ends with a complete line. It returns the
// file's size.
func prepare(f *os.File) (int64, error) {
	info, err := f.Stat()
	switch {
	case err != nil:
		return 0, err
	case !info.Mode().IsRegular():
		return 0, errors.New("not a regular file")
	case info.Mode().Perm() != 0o600:
		if err := f.Chmod(0o600); err != nil {
			return 0, err
		}
	}
	size := info.Size()
	if size == 0 {
		return 0, nil
	}
	last := make([]byte, 1)
	if _, err := f.ReadAt(last, size-1); err != nil {
		return 0, err
	}
	if last[0] == '\n' {
		return size, nil
	}
	// A crash has interrupted the last line. It stays incomplete.
	if _, err := f.Write([]byte{'\n'}); err != nil {
		return 0, err
	}
	return size + 1, nil
}

// flush writes all waiting lines. If that fails, no incomplete line stays in the file.
func (a *AuditLog) flush() error {
	a.mu.Lock()
	lines, lost := a.lines, a.lost
	a.lines, a.lost = nil, 0
	a.mu.Unlock()
	if lost > 0 {
		note := fmt.Sprintf("{\"time\":%q,\"procedure\":\"\",\"outcome\":\"lost\",\"message\":\"%d entries were lost: the disk could not take them\"}\n",
			time.Now().UTC().Format(time.RFC3339Nano), lost)
		lines = append([][]byte{[]byte(note)}, lines...)
	}
	if len(lines) == 0 {
		return nil
	}
	err := a.write(lines)
	a.mu.Lock()
	if err == nil {
		a.counts.Lines += uint64(len(lines))
	} else {
		if lost > 0 {
			lines = lines[1:]
		}
		a.lines, a.lost = append(lines, a.lines...), a.lost+lost
		if over := len(a.lines) - auditMemory; over > 0 {
			a.lines = a.lines[over:]
			a.lost += uint64(over)
			a.counts.Lost += uint64(over)
		}
	}
	a.mu.Unlock()
	if err != nil {
		a.problem("audit trail cannot be written; entries wait in memory", err)
	}
	return err
}

func (a *AuditLog) write(lines [][]byte) error {
	if a.file == nil {
		if err := a.open(); err != nil {
			return err
		}
	}
	var all []byte
	for _, line := range lines {
		all = append(all, line...)
	}
	if a.size > 0 && a.size+int64(len(all)) > a.Size {
		a.rotate()
		if a.file == nil {
			if err := a.open(); err != nil {
				return err
			}
		}
	}
	_, err := a.file.Write(all)
	if err == nil {
		err = a.file.Sync()
	}
	if err != nil {
		// Remove incomplete lines, and lines that will be written again.
		if cut := a.file.Truncate(a.size); cut != nil {
			_ = a.file.Close()
			a.file = nil // the next flush opens the file again and reads its size
		}
		return err
	}
	a.size += int64(len(all))
	return nil
}

// rotate renames the full file and begins a new one. If that fails, the file goes on
// growing.
func (a *AuditLog) rotate() {
	name := func(n int) string { return fmt.Sprintf("%s.%d", a.Path, n) }
	for n := a.Keep - 1; n >= 1; n-- {
		if err := os.Rename(name(n), name(n+1)); err != nil && !errors.Is(err, os.ErrNotExist) {
			a.problem("audit trail cannot be rotated", err)
			return
		}
	}
	if err := os.Rename(a.Path, name(1)); err != nil {
		a.problem("audit trail cannot be rotated", err)
		return
	}
	if err := a.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		a.problem("audit trail cannot be closed", err)
	}
	a.file = nil
}
