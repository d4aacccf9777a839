package throttle

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Logger returns a log with a limit of its own: up to burst records at once, and one more
// in each interval every. If records were left out, the next record contains their
// number. If no record follows, the number is logged when there is room.
func Logger(log *slog.Logger, burst int, every time.Duration) *slog.Logger {
	b := &bucket{every: every, burst: burst, left: burst, filled: time.Now(), to: log.Handler()}
	return slog.New(&handler{Handler: log.Handler(), b: b})
}

type handler struct {
	slog.Handler
	b *bucket
}

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	missed, ok := h.b.take()
	if !ok {
		return nil
	}
	if missed > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("left_out", missed))
	}
	return h.Handler.Handle(ctx, r)
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &handler{Handler: h.Handler.WithAttrs(attrs), b: h.b}
}

func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{Handler: h.Handler.WithGroup(name), b: h.b}
}

// bucket counts the records that may still be written.
type bucket struct {
	every time.Duration
	burst int
	to    slog.Handler

	mu     sync.Mutex
	left   int
	filled time.Time // when left was updated
	missed int
}

// take is called for each record. It returns how many were left out before it.
func (b *bucket) take() (missed int, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fill()
	if b.left == 0 {
		if b.missed++; b.missed == 1 {
			time.AfterFunc(b.every, b.tell)
		}
		return 0, false
	}
	b.left--
	missed, b.missed = b.missed, 0
	return missed, true
}

func (b *bucket) fill() {
	now := time.Now()
	n := int(now.Sub(b.filled) / b.every)
	b.filled = b.filled.Add(time.Duration(n) * b.every)
	if b.left = min(b.left+n, b.burst); b.left == b.burst {
		b.filled = now
	}
}

// tell logs how many records were left out, unless a later record contains it.
func (b *bucket) tell() {
	b.mu.Lock()
	b.fill()
	missed := b.missed
	if b.left == 0 { // a later record has logged the number; records that were left out after it have a call of their own
		missed = 0
	}
	if missed > 0 {
		b.left--
		b.missed = 0
	}
	b.mu.Unlock()
	if missed > 0 && b.to.Enabled(context.Background(), slog.LevelWarn) {
		r := slog.NewRecord(time.Now(), slog.LevelWarn, "more of the same was left out", 0)
		r.AddAttrs(slog.Int("left_out", missed))
		_ = b.to.Handle(context.Background(), r)
	}
}
