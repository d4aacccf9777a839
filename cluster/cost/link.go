package cost

import (
	"math"
	"time"
)

// Trips is how many messages a move waits for one after the other while the application
// is stopped: freeze, final graph, contents, hand-over, and their answers.
const Trips = 8

// How far off a prediction may be: a factor if nothing was measured on the way, if only
// the link was, and if a move over it was.
const (
	guessLow, guessHigh = 4, 16
	linkOff             = 3
	movedOff            = 2
)

// Guesses for a link that was not measured: 1 Gbit/s, half a millisecond.
const (
	guessRate = 1e9 / 8
	guessRTT  = 500 * time.Microsecond
	// guessFrozen is the share of a session's memory that is sent while it is stopped.
	guessFrozen = 0.05
	// guessWaits is the share of the calls that wait for an answer. The others have no
	// result, or one that is known before.
	guessWaits = 0.1
)

// Link is what is known of the network between two hosts, in one direction.
type Link struct {
	RTT     time.Duration
	Rate    float64 // bytes per second
	Samples uint32  // calibrations and moves; 0: RTT and Rate are guessed

	Moves  uint32  // moves of sessions that went over it
	Fixed  float64 // seconds of downtime beyond what the bytes and the hosts account for
	Frozen float64 // share of the memory that was sent while frozen
}

// Range is a predicted time.
type Range struct {
	Likely, Low, High time.Duration
	Measured          bool // it is based on measurements of this link
}

// Here is what a session's own host predicts for a swap from GPU to GPU.
type Here struct {
	Total, Stop time.Duration
	Measured    bool
}

// Calibrated returns the link after a calibration. The newest one counts half.
func (l Link) Calibrated(rtt time.Duration, rate float64) Link {
	if rtt <= 0 || rate <= 0 || math.IsNaN(rate) || math.IsInf(rate, 0) {
		return l
	}
	if l.Samples == 0 {
		l.RTT, l.Rate = rtt, rate
	} else {
		l.RTT += (rtt - l.RTT) / 2
		l.Rate += (rate - l.Rate) / 2
	}
	l.Samples = min(l.Samples+1, math.MaxUint32-1)
	return l
}

func (l Link) known() (rtt time.Duration, rate, frozen float64) {
	rtt, rate, frozen = guessRTT, guessRate, guessFrozen
	if l.Samples > 0 {
		rtt, rate = l.RTT, l.Rate
	}
	if l.Moves > 0 {
		frozen = l.Frozen
	}
	return rtt, rate, frozen
}

// Move predicts a move of a session with so many bytes of memory over the link: how long
// it takes, and how long the application is stopped.
func (l Link) Move(memory uint64, here Here) (total, stop Range) {
	rtt, rate, frozen := l.known()
	s := here.Stop + mul(rtt, Trips) + seconds(l.Fixed+frozen*float64(memory)/rate)
	t := here.Total + mul(rtt, 2*Trips) + seconds(float64(memory)/rate) + s - here.Stop
	return l.spread(t, here.Measured), l.spread(s, here.Measured)
}

func (l Link) spread(d time.Duration, measured bool) Range {
	r := Range{Likely: d, Measured: l.Samples > 0}
	switch {
	case l.Moves > 0:
		r.Low, r.High = d/movedOff, mul(d, movedOff)
	case l.Samples > 0 && measured:
		r.Low, r.High = d/linkOff, mul(d, linkOff)
	default:
		r.Low, r.High, r.Measured = d/guessLow, mul(d, guessHigh), false
	}
	return r
}

// Learn returns the link after a move over it: of a session with so many bytes of memory,
// of which frozen bytes were sent while it was stopped for so long. here is what its
// host had predicted for a local swap.
func (l Link) Learn(memory, frozen uint64, here Here, stopped time.Duration) Link {
	rtt, rate, _ := l.known()
	fixed := max(stopped-here.Stop-mul(rtt, Trips)-seconds(float64(frozen)/rate), 0).Seconds()
	share := 0.0
	if memory > 0 {
		share = min(float64(frozen)/float64(memory), 1)
	}
	if l.Moves == 0 {
		l.Fixed, l.Frozen = fixed, share
	} else {
		l.Fixed += (fixed - l.Fixed) / 2
		l.Frozen += (share - l.Frozen) / 2
	}
	l.Moves = min(l.Moves+1, math.MaxUint32-1)
	return l
}

// Activity is what an application does in a second.
type Activity struct {
	Calls float64 // requests
	Waits float64 // of them, those that wait for an answer; below 0: not known
	Bytes float64 // transferred
}

// PerSecond predicts how much longer each second of the application's work becomes on a
// GPU behind the link.
func (l Link) PerSecond(a Activity) Range {
	rtt, rate, _ := l.known()
	bytes := seconds(max(a.Bytes, 0) / rate)
	if a.Waits >= 0 {
		r := l.spread(bytes+mul(rtt, a.Waits), true)
		return r
	}
	r := l.spread(bytes+mul(rtt, guessWaits*max(a.Calls, 0)), false)
	r.Low, r.High = bytes, bytes+mul(rtt, max(a.Calls, 0)) // none waits, or all of them do
	return r
}
