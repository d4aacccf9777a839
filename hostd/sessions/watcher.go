package sessions

import (
	"slices"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// watcher holds, for one reader, the newest state of every session that
// changed. A slow reader misses intermediate states, never the last one, and
// costs no more memory than there are sessions.
type watcher struct {
	pending map[string]*gpuctlv1.Session
	bell    chan struct{}
}

// watch returns a watcher that starts with the sessions as they are.
func (h *Host) watch() *watcher {
	w := &watcher{map[string]*gpuctlv1.Session{}, make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, s := range h.sessions {
		w.pending[id] = s.Session
	}
	h.watchers[w] = true
	w.ring()
	return w
}

func (h *Host) unwatch(w *watcher) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.watchers, w)
}

// publish gives a state to all watchers. h.mu is held.
func (h *Host) publish(s *gpuctlv1.Session) {
	for w := range h.watchers {
		w.pending[s.GetId()] = s
		w.ring()
	}
}

func (w *watcher) ring() {
	select {
	case w.bell <- struct{}{}:
	default:
	}
}

// take empties a watcher, ordered by session.
func (h *Host) take(w *watcher) []*gpuctlv1.Session {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []*gpuctlv1.Session
	for _, s := range w.pending {
		out = append(out, s)
	}
	clear(w.pending)
	slices.SortFunc(out, func(a, b *gpuctlv1.Session) int {
		if a.GetId() < b.GetId() {
			return -1
		}
		return 1
	})
	return out
}
