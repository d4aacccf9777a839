package timeshare

import "time"

const (
	thinkShift = 3                    // of the averages of think times
	maxThink   = 8 * time.Millisecond // a pause, not a think time: it counts as this

	// How long Fair waits: so often what the owner usually needs, and this much more.
	thinkTimes = 8
	thinkMore  = 100 * time.Microsecond
	// It waits for no longer than a part of what the owner is behind.
	lagPart = 2
)

// fair is the policy Fair. Virtual time of an owner is the time charged to it,
// divided by its weight; who has the least runs.
type fair struct {
	s       *Scheduler
	virtual time.Duration // of the owner that started last, when it did; never goes back
	deaf
}

// charge adds to an owner's virtual time, exactly: what the division leaves over
// is kept for the next time.
func (p *fair) charge(o *owner, d time.Duration) {
	o.rest += d
	w := time.Duration(o.weight)
	o.virtual += o.rest / w
	o.rest %= w
}

// joined puts a newcomer behind all who have commands. Were it put at the
// GPU's virtual time, owners that come and go could keep others from running, and
// leaving would clear what an owner has had too much.
func (p *fair) joined(o *owner) {
	o.virtual = p.virtual
	for _, other := range p.s.owners {
		if other.pending() || other == p.s.running {
			o.virtual = max(o.virtual, other.virtual)
		}
	}
}

// arrived takes from an owner what it has saved up beyond the limit. Who has not
// run yet has saved nothing up.
func (p *fair) arrived(o *owner) {
	least := p.virtual
	if o.ended {
		least -= p.s.config.MaxLag / time.Duration(o.weight)
	}
	o.virtual = max(o.virtual, least)
}

func (p *fair) started(o *owner) { p.virtual = max(p.virtual, o.virtual) }

func (p *fair) ended(o *owner, cost time.Duration) { p.charge(o, cost) }

func (p *fair) passed(o *owner, d time.Duration) {
	if o != nil {
		o.debt += d * time.Duration(p.s.config.WaitCharge)
		p.charge(o, o.debt/100)
		o.debt %= 100
	}
}

// first returns the owner with a command that has had the least, nil if nobody has a command, and
// how long that command is expected to be.
func (p *fair) first() (first *owner, length time.Duration) {
	for _, o := range p.s.owners {
		if !o.pending() {
			continue
		}
		if first == nil || o.virtual < first.virtual || o.virtual == first.virtual && o.head().seq < first.head().seq {
			first = o
		}
	}
	if first == nil {
		return nil, 0
	}
	length, known := first.length.predict(first.head().kind)
	if !known {
		length = p.s.config.Wait
	}
	return first, length
}

func (p *fair) keeps(o *owner, cost time.Duration) bool {
	first, length := p.first()
	if first == nil {
		return false
	}
	after := o.virtual + cost/time.Duration(o.weight) + 1 // what the division leaves over
	for _, other := range p.s.owners {
		if other != o && !other.pending() && other.ended && other.virtual < after {
			return false // that one might be waited for instead
		}
	}
	return after < first.virtual && p.patience(o, first.virtual-after, length) > 0
}

func (p *fair) next(now time.Duration) Decision {
	first, length := p.first()
	if p.s.config.Wait == 0 {
		return run(first)
	}
	var behind *owner
	var until time.Duration
	for _, o := range p.s.owners {
		if o.pending() || !o.ended || o.virtual >= first.virtual || behind != nil && o.virtual >= behind.virtual {
			continue
		}
		if t := o.since + p.patience(o, first.virtual-o.virtual, length); t > now {
			behind, until = o, t
		}
	}
	if behind == nil {
		return run(first)
	}
	return Decision{Action: Wait, Owner: behind.id, Until: until}
}

// patience returns for how long after its last command an owner is waited for that is
// so much virtual time behind the one whose command, of that length, would run instead.
func (p *fair) patience(o *owner, behind, length time.Duration) time.Duration {
	most := min(p.s.config.Wait, length)
	if lag := behind / lagPart; lag < most/time.Duration(o.weight) { // or lag times weight is no limit, and might overflow
		most = lag * time.Duration(o.weight)
	}
	if o.think.value > most {
		return 0 // it would come too late
	}
	return min(most, thinkTimes*o.think.value+thinkMore)
}
