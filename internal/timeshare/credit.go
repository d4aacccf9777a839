package timeshare

import (
	"slices"
	"time"
)

// credit is the policies Credit and Band: they differ in select only.
//
// As in GPUvm's code of 2013, the time that an owner gets in a period is its part
// of the time that has really passed, so long commands need no special care. The
// weights are ours; there all owners are alike.
type credit struct {
	s      *Scheduler
	list   []*owner      // who runs first
	weight int           // of all
	last   *owner        // who ran last
	until  time.Duration // Band: when the wait before the next start ends, 0: none

	refilled time.Duration // when
	busy     time.Duration // since then
	idle     time.Duration // since then
	before   time.Duration // busy and idle of the period before
}

// most keeps products of times and weights below 1<<63.
const most = time.Duration(1) << 42 // ns, 73 minutes

func (p *credit) joined(o *owner) {
	p.list = append(p.list, o)
	p.weight += o.weight
}

func (p *credit) left(o *owner) {
	p.list = slices.DeleteFunc(p.list, func(other *owner) bool { return other == o })
	p.weight -= o.weight
	if p.last == o {
		p.last, p.until = nil, 0
	}
}

func (p *credit) weighed(o *owner, old int) { p.weight += o.weight - old }

func (p *credit) arrived(*owner) {}

func (p *credit) started(o *owner) { p.last, p.until = o, 0 }

func (p *credit) ended(o *owner, cost time.Duration) {
	p.busy = min(p.busy+cost, most)
	o.used = min(o.used+cost, most)
	o.budget = max(o.budget-cost, -most)
	if o.budget < 0 && (p.s.config.Policy == Credit || p.over(o)) {
		i := slices.Index(p.list, o)
		p.list = append(slices.Delete(p.list, i, i+1), o)
	}
}

// passed counts the time in which the GPU was idle, as that is given out as well.
// In GPUvm's code the time of waits is lost. With short commands that is most of the
// time, and an owner that is in debt stays so for long.
func (p *credit) passed(o *owner, d time.Duration) {
	if o == nil {
		p.until = 0
	}
	if o == nil || !p.s.config.AsPublished {
		p.idle = min(p.idle+d, most)
	}
}

// part is what an owner's weight makes of a time.
func (p *credit) part(o *owner, d time.Duration) time.Duration {
	return d * time.Duration(o.weight) / time.Duration(p.weight)
}

// refill gives out the time that has passed, at most once in a period.
func (p *credit) refill(now time.Duration) {
	period := p.s.config.Period
	if now-p.refilled < period {
		return
	}
	p.refilled = now - (now-p.refilled)%period // on a grid: a command that ends late shifts no later period
	p.before = min(p.busy+p.idle, most)
	for _, o := range p.list {
		o.budget += p.part(o, p.before)
		o.used = 0
		switch {
		case p.busy == 0:
			o.budget = min(o.budget, p.part(o, period))
		case o.budget > period, o.budget < -period: // it does not need it; it could not help it
			o.budget = 0
		}
	}
	p.busy, p.idle = 0, 0
}

// over reports whether an owner had more than its share in this period.
func (p *credit) over(o *owner) bool {
	return p.busy == 0 || o.used > p.part(o, p.before) || o.used > p.part(o, p.busy)
}

func (p *credit) next(now time.Duration) Decision {
	p.refill(now)
	if p.s.config.Policy == Credit {
		i := slices.IndexFunc(p.list, (*owner).pending)
		return run(p.list[i])
	}
	return p.band(now)
}

// band is the selection of Band.
func (p *credit) band(now time.Duration) Decision {
	last := p.last
	if p.until > now && p.s.config.AsPublished {
		return Decision{Action: Wait, Owner: last.id, Until: p.until}
	}
	if p.until != 0 && last.pending() {
		return run(last)
	}
	o := p.choose()
	if last == nil || o == last || !p.over(o) || p.over(last) || !ahead(o, last) {
		return run(o)
	}
	if p.until == 0 {
		p.until = now + p.s.config.Wait
	}
	if p.until > now {
		return Decision{Action: Wait, Owner: last.id, Until: p.until}
	}
	return run(o)
}

// ahead reports whether a had more than b in this period, in proportion to their weights.
func ahead(a, b *owner) bool {
	return a.used*time.Duration(b.weight) > b.used*time.Duration(a.weight)
}

// choose prefers owners that have time left and had less than their share, then
// those that have time left.
func (p *credit) choose() *owner {
	var under, over, spent *owner
	for _, o := range p.list {
		if !o.pending() {
			continue
		}
		class := &under
		if o.budget < 0 {
			class = &spent
		} else if p.over(o) {
			class = &over
		}
		if *class == nil {
			*class = o
		}
	}
	if under != nil {
		return under
	}
	if over != nil {
		return over
	}
	return spent
}

func (p *credit) keeps(*owner, time.Duration) bool { return false }
