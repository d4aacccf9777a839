package timeshare

import "time"

// fifo is the policy FIFO.
type fifo struct {
	s *Scheduler
	deaf
}

func (p *fifo) next(time.Duration) Decision {
	var first *owner
	for _, o := range p.s.owners {
		if o.pending() && (first == nil || o.head().seq < first.head().seq) {
			first = o
		}
	}
	return run(first)
}

// deaf is for policies that do not need to know of every event.
type deaf struct{}

func (deaf) joined(*owner)                {}
func (deaf) left(*owner)                  {}
func (deaf) weighed(*owner, int)          {}
func (deaf) arrived(*owner)               {}
func (deaf) started(*owner)               {}
func (deaf) ended(*owner, time.Duration)  {}
func (deaf) passed(*owner, time.Duration) {}

func (deaf) keeps(*owner, time.Duration) bool { return false }
