package session

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/excerpt"
)

// Limits of executors' logs. Run folders are mostly in memory.
const (
	logHalf  = 128 << 10 // bytes of a log file; the file before it is kept, too
	logTail  = 64 << 10  // bytes that are searched for why an executor ended; a crash dump fits
	logRate  = 256 << 10 // bytes per second, after a burst
	logBurst = 1 << 20
	logsKept = 4                      // logs of a session's executors
	logDrain = 200 * time.Millisecond // for what is still in the pipe when an executor ends
)

// execLog reads an executor's standard error from a named pipe, and keeps the last part in
// a file. The pipe remains for the next gpuguest. Both are in a folder that no executor can
// write to. An executor that writes too fast has to wait.
type execLog struct {
	path string
	pipe *os.File
	done chan struct{} // closed when all writers have ended, or pipe is closed

	mu   sync.Mutex
	file *os.File
	size int
}

func pipeOf(path string) string { return path + ".pipe" }

// createLog begins a log at path. What is written to w goes to the log.
func createLog(path string) (l *execLog, w *os.File, err error) {
	pipe := pipeOf(path)
	for _, f := range []string{pipe, path, path + ".1"} {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, nil, fmt.Errorf("executor log: %w", err)
		}
	}
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		return nil, nil, fmt.Errorf("executor log %s: %w", pipe, err)
	}
	if l, err = openLog(path); err != nil {
		return nil, nil, err
	}
	if w, err = openPipe(pipe, os.O_WRONLY); err != nil {
		l.close()
		return nil, nil, fmt.Errorf("executor log: %w", err)
	}
	go l.read()
	return l, w, nil
}

// adoptLog continues the log of an executor that an earlier gpuguest started.
func adoptLog(path string) (*execLog, error) {
	l, err := openLog(path)
	if err == nil {
		go l.read()
	}
	return l, err
}

func openLog(path string) (*execLog, error) {
	// Neither this open waits for a writer, nor the reads block a thread.
	pipe, err := openPipe(pipeOf(path), os.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("executor log: %w", err)
	}
	l := &execLog{path: path, pipe: pipe, done: make(chan struct{})}
	if err := l.open(os.O_CREATE); err != nil {
		pipe.Close()
		return nil, fmt.Errorf("executor log: %w", err)
	}
	return l, nil
}

// openPipe opens a pipe that gpuguest has made in its own folder. To open it for writing
// does not block, because there is a reader by then.
func openPipe(path string, flags int) (*os.File, error) {
	return os.OpenFile(path, flags|unix.O_NOFOLLOW, 0) //nolint:forbidigo // beneath opens no pipes
}

func (l *execLog) open(flags int) error {
	f, err := beneath.OpenFile(filepath.Dir(l.path), filepath.Base(l.path), flags|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	fi, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	l.file, l.size = f, int(fi.Size())
	return nil
}

func (l *execLog) read() {
	defer close(l.done)
	buf := make([]byte, 16<<10)
	left, at := float64(logBurst), time.Now()
	for {
		n, err := l.pipe.Read(buf)
		if n > 0 {
			l.write(buf[:n])
		}
		if err != nil {
			return
		}
		now := time.Now()
		left = min(logBurst, left+now.Sub(at).Seconds()*logRate) - float64(n)
		at = now
		if left < 0 {
			time.Sleep(time.Duration(-left / logRate * float64(time.Second)))
		}
	}
}

func (l *execLog) write(b []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return
	}
	if l.size+len(b) > logHalf {
		old := l.file
		if os.Rename(l.path, l.path+".1") != nil || l.open(os.O_CREATE|os.O_EXCL) != nil {
			return // the file stays as it is; the rest is dropped
		}
		old.Close()
	}
	n, _ := l.file.Write(b) // a full disk must not stop anything
	l.size += n
}

// end closes the log of an executor that has ended, and returns its last output.
func (l *execLog) end() []byte {
	select {
	case <-l.done:
	case <-time.After(logDrain): // a process that it started still runs
	}
	l.mu.Lock()
	b := make([]byte, min(l.size, logTail))
	n, _ := l.file.ReadAt(b, int64(l.size-len(b)))
	l.mu.Unlock()
	l.close()
	return b[:n]
}

func (l *execLog) close() {
	l.pipe.Close()
	_ = os.Remove(pipeOf(l.path))
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		l.file.Close()
		l.file = nil
	}
}

// dropLog deletes a log that is too old.
func dropLog(path string) {
	for _, f := range []string{path, path + ".1", pipeOf(path)} {
		_ = os.Remove(f)
	}
}

// exitReason returns how a process ended, with the cause from its last output.
func exitReason(st *os.ProcessState, last []byte) string {
	how := "ended"
	if st != nil {
		how = st.String()
	}
	for l := range strings.Lines(string(last)) {
		// A crash dump begins with its cause and ends with registers.
		if strings.HasPrefix(l, "panic: ") || strings.HasPrefix(l, "fatal error: ") || strings.HasPrefix(l, "SIG") {
			return how + ": " + reasonLine(l)
		}
	}
	if l := cause(last); l != "" {
		return how + ": " + reasonLine(l)
	}
	return how
}

// cause returns the last line that does not only explain the one before: compilers and
// runtimes begin those with "note:".
func cause(last []byte) string {
	for _, l := range slices.Backward(strings.Split(strings.ToValidUTF8(string(last), "?"), "\n")) {
		if l = strings.TrimSpace(l); l != "" && !strings.HasPrefix(l, "note: ") {
			return l
		}
	}
	return lastLine(last)
}

// reasonLine makes a line fit for messages.
func reasonLine(l string) string { return excerpt.Of(strings.TrimSpace(l), maxSaid) }

func lastLine(b []byte) string {
	s := strings.TrimSpace(strings.ToValidUTF8(string(b), "?"))
	return s[strings.LastIndexByte(s, '\n')+1:]
}
