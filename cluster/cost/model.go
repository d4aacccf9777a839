package cost

import (
	"math"
	"time"
)

// Linear is a cost that grows with calls and bytes.
type Linear struct {
	Fixed   float64 // seconds
	PerCall float64 // seconds
	PerByte float64 // seconds
}

// Of returns the cost of so many calls and bytes.
func (l Linear) Of(calls, bytes uint64) time.Duration {
	return seconds(l.Fixed + l.PerCall*float64(calls) + l.PerByte*float64(bytes))
}

// Copy is the cost of copying memory region by region. A region takes
// size·PerByte + max(size/Rate, PerRegion).
type Copy struct {
	PerByte   float64 // seconds, in addition to the transfer
	Rate      float64 // highest rate, bytes per second
	PerRegion float64 // least time of a transfer, seconds
}

// Of returns the cost of copying so many regions of one size in bytes.
func (c Copy) Of(regions, size uint64) time.Duration {
	if regions == 0 {
		return 0
	}
	one := float64(size)*c.PerByte + max(div(float64(size), c.Rate), c.PerRegion)
	return seconds(float64(regions) * one)
}

// Model has the costs of a remoting system.
type Model struct {
	Record Linear // of the calls that are kept, so that they can be repeated elsewhere
	Replay Linear // of repeating them
	Sync   Copy   // of the memory that goes along
	Helper Linear // of calls through a helper process
	Remote Linear // of calls over the network, without the network's own latency
	// Factor is how many bytes cross the network for each byte that is transferred.
	Factor float64
}

// Published returns the constants of mrCUDA's model (its repository, overhead.py).
func Published() Model {
	return Model{
		Record: Linear{Fixed: 0.344e-3, PerCall: 0.2825e-6},
		Replay: Linear{Fixed: 1.2437, PerCall: 1.031e-6},
		Sync:   Copy{PerByte: 5.686e-11, Rate: 4778.5e6, PerRegion: 1 / 47210.0},
		Helper: Linear{Fixed: 2.93e-3, PerCall: 9.983e-6, PerByte: 0.6871e-9},
		Remote: Linear{PerCall: 50.62e-6},
		Factor: 1.03,
	}
}

// Network is the network that a run crosses.
type Network struct {
	RTT  time.Duration // of one small message and its answer
	Rate float64       // bytes per second; 0: not limited
}

// Run is a whole run of an application.
type Run struct {
	Compute time.Duration // on a local GPU
	Calls   uint64        // that wait for their answer
	Bytes   uint64        // transferred to and from the GPU
	Regions uint64        // live memory objects when it moves
	Size    uint64        // bytes of each of them
}

// Away returns how long the run takes on a GPU of another host.
func (m Model) Away(r Run, n Network) time.Duration {
	return r.Compute + m.Remote.Of(r.Calls, 0) + mul(n.RTT, float64(r.Calls)) + seconds(div(m.Factor*float64(r.Bytes), n.Rate))
}

// Switch returns how long the run is stopped when it moves home after a share of its
// calls.
func (m Model) Switch(r Run, share float64) time.Duration {
	return m.Replay.Of(part(r.Calls, share), 0) + m.Sync.Of(r.Regions, r.Size)
}

// Moved returns how long the run takes if it begins on a GPU of another host and moves to
// a local one after a share of its work, from 0 to 1.
func (m Model) Moved(r Run, n Network, share float64) time.Duration {
	share = min(max(share, 0), 1)
	away := mul(m.Away(r, n), share) + m.Record.Of(part(r.Calls, share), 0)
	return away + m.Switch(r, share) + mul(r.Compute, 1-share)
}

func part(n uint64, share float64) uint64 { return uint64(float64(n) * min(max(share, 0), 1)) }

func mul(d time.Duration, f float64) time.Duration { return seconds(d.Seconds() * f) }

// seconds converts without overflow.
func seconds(s float64) time.Duration {
	const most = float64(math.MaxInt64 / 32)
	switch ns := s * float64(time.Second); {
	case math.IsNaN(ns), ns <= 0:
		return 0
	case ns > most:
		return time.Duration(most)
	default:
		return time.Duration(ns)
	}
}

// div returns 0 if the rate is not known.
func div(bytes, rate float64) float64 {
	if rate <= 0 {
		return 0
	}
	return bytes / rate
}
