package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// maxLog is the size at which the older half of the log is dropped, in bytes. Run folders
// are mostly in memory, and applications cause lines, although each of them only a few.
const maxLog = 8 << 20

// boundedLog keeps the newest lines of a log file. The file stays the same, so that what
// the Go runtime writes to standard error when it crashes goes there, too.
type boundedLog struct {
	file *os.File
	most int64

	mu   sync.Mutex
	size int64
}

// boundLog bounds the log if w is a file that was opened to be read, too, as hostd does.
// Otherwise somebody else takes care of the log, and boundLog returns w.
func boundLog(w io.Writer, most int64) io.Writer {
	f, ok := w.(*os.File)
	if !ok {
		return w
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	fi, serr := f.Stat()
	if err != nil || serr != nil || !fi.Mode().IsRegular() || flags&(unix.O_ACCMODE|unix.O_APPEND) != unix.O_RDWR|unix.O_APPEND {
		return w
	}
	return &boundedLog{file: f, most: most, size: fi.Size()}
}

// Write implements io.Writer.
func (l *boundedLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, err := l.file.Write(b)
	if l.size += int64(n); l.size > l.most {
		l.halve()
	}
	return n, err
}

// halve drops the older half of the lines. If that fails, it drops all lines.
func (l *boundedLog) halve() {
	kept := make([]byte, l.most/2)
	n, _ := l.file.ReadAt(kept, l.size-int64(len(kept)))
	kept = kept[:n]
	kept = kept[bytes.IndexByte(kept, '\n')+1:]
	l.size = 0
	if l.file.Truncate(0) != nil {
		return // try again after as many bytes as the log may have
	}
	for _, part := range [][]byte{fmt.Appendf(nil, "older lines were dropped: the log keeps %d MiB at most\n", l.most>>20), kept} {
		n, _ := l.file.Write(part)
		l.size += int64(n)
	}
}
