package testkit

import (
	"bytes"
	"io"
	"sync"
)

// Log keeps what several goroutines or processes write. Its zero value is ready.
type Log struct {
	Tee io.Writer // gets everything, too; nil: nobody. Set before the first Write

	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.Tee != nil {
		_, _ = l.Tee.Write(p)
	}
	return l.b.Write(p)
}

// String returns what was written and not taken.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Take returns what was written since it was called last.
func (l *Log) Take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.b.Reset()
	return l.b.String()
}
