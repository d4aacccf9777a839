package replica

import (
	"context"
	"time"
)

// WhileLeading bounds one attempt to have a leader at an address do something:
// it ends when another host leads, and after part of the time that is left at
// the latest. A leader that stands still answers nothing, and its connection says
// so late; what remains of the time is for the next attempt. Whether the attempt
// was taken is not known then: what is repeated must bear that.
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
