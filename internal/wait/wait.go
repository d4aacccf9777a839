// Package wait waits for time to pass. To wait for a thing is its own package's
// business.
package wait

import (
	"context"
	"time"
)

// For waits for d, or until ctx is done, whose cause it then returns.
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
