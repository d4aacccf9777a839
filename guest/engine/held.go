package engine

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// HeldText returns the message of a held session.
func HeldText(kind string, why error) string {
	return fmt.Sprintf("a %s failed and is not taken back yet, which is tried again: %v", kind, why)
}

// How soon a failed undo or repair is tried again.
const (
	firstRetry = 50 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// Retry repeats try until it returns nil or ctx ends.
func Retry(ctx context.Context, log *slog.Logger, try func(context.Context) error) error {
	said := ""
	for pause := firstRetry; ; pause = min(2*pause, lastRetry) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		err := try(ctx)
		switch {
		case err == nil:
			return nil
		case ctx.Err() == nil && err.Error() != said:
			said = err.Error()
			log.Warn("still held", "err", err)
		}
	}
}
