package replica

import (
	"context"
	"time"
)

// WhileLeading returns a context for one call to the leader at an address. It ends when
// another host leads, and after half of the remaining time or most at the latest. A
// leader that is frozen does not answer, and its connection fails only late. The rest of
// the time is for the next attempt. Whether the call was executed is then unknown, so
// only calls that can be repeated may use it.
func WhileLeading(ctx context.Context, leader func() (address string), address string, most time.Duration) (context.Context, context.CancelFunc) {
	if end, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(end)/2)
	}
	ctx, cancel := context.WithTimeout(ctx, most)
	go func() {
		const look = 20 * time.Millisecond
		tick := time.NewTicker(look)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if now := leader(); now != "" && now != address {
				cancel()
			}
		}
	}()
	return ctx, cancel
}
