package lab

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// Progress tells somebody what takes long. Its zero value says nothing.
type Progress struct {
	mu  sync.Mutex
	out io.Writer
}

// NewProgress returns a Progress that writes lines to out.
func NewProgress(out io.Writer) *Progress { return &Progress{out: out} }

// Printf writes one line.
func (p *Progress) Printf(format string, args ...any) {
	if p == nil || p.out == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.out, format+"\n", args...)
}

// Start says that something begins, after a second and then every ten while it
// lasts, and with the returned function how it ended.
func (p *Progress) Start(what string) (done func(error)) {
	if p == nil || p.out == nil {
		return func(error) {}
	}
	began := time.Now()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		wait := time.Second
		for {
			select {
			case <-stop:
				return
			case <-time.After(wait):
				p.Printf("  %s … %.0f s", what, time.Since(began).Seconds())
			}
			wait = 10 * time.Second
		}
	}()
	return func(err error) {
		close(stop)
		<-stopped
		if err != nil {
			p.Printf("  %s failed after %.1f s", what, time.Since(began).Seconds())
			return
		}
		p.Printf("  %s: %.1f s", what, time.Since(began).Seconds())
	}
}
