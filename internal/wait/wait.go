// Package wait waits for time to pass.
package wait

import (
	"context"
	"time"
)

// For waits for d, or until ctx is done. Then it returns the cause of ctx.
func For(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
