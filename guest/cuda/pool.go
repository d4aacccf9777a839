package cuda

import (
	"sync"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
)

// mostReady is for how many processes helpers are started in advance.
const mostReady = 16

// pool has helpers that were started before the processes stop, and wait to be asked. The
// driver's library takes longer to load and initialize than most calls.
type pool struct {
	mu   sync.Mutex
	have map[poolKey]*ask.Waiting
}

type poolKey struct {
	op  ask.Op
	pid int
}

// ready starts a helper for each call of each process.
func (p *pool) ready(m *Manager, ops []ask.Op, members []*member) error {
	if len(members) > mostReady {
		return nil
	}
	for _, mb := range members {
		for _, o := range ops {
			w, err := m.ask.Start(o, mb.PID)
			if err != nil {
				return err
			}
			p.mu.Lock()
			if p.have == nil {
				p.have = map[poolKey]*ask.Waiting{}
			}
			p.have[poolKey{o, mb.PID}] = w
			p.mu.Unlock()
		}
	}
	return nil
}

// take returns a helper that waits, or starts one.
func (p *pool) take(m *Manager, o ask.Op, pid int) (*ask.Waiting, error) {
	p.mu.Lock()
	w := p.have[poolKey{o, pid}]
	delete(p.have, poolKey{o, pid})
	p.mu.Unlock()
	if w != nil {
		return w, nil
	}
	return m.ask.Start(o, pid)
}

// end ends helpers that were not asked.
func (p *pool) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	var wg sync.WaitGroup
	for k, w := range p.have {
		wg.Go(w.End)
		delete(p.have, k)
	}
	wg.Wait()
}
