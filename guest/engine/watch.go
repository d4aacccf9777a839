package engine

import (
	"context"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/news"
)

// Watched is an engine's sessions, as Watch needs them.
type Watched[S any] struct {
	Changes  *news.Changes[string, S]
	List     func(context.Context) []S
	Snapshot func(S) *gpuctlv1.Session
	Ended    <-chan struct{} // closed when the engine ends
}

// Watch calls send with each session's current state, and then for each change, until ctx or
// the engine ends or send fails.
func (w Watched[S]) Watch(ctx context.Context, send func(*gpuctlv1.Session) error) error {
	changed := w.Changes.Read() // before the list: no change is missed between them
	defer changed.Close()
	sessions := w.List(ctx)
	for {
		for _, s := range sessions {
			// Take the snapshot now. Of two snapshots that were taken earlier, the older one
			// could arrive later, and show a session as running that has ended.
			if err := send(w.Snapshot(s)); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.Ended:
			return nil
		case <-changed.Bell():
		}
		sessions = changed.Take()
	}
}
