package nvc0

import (
	"encoding/binary"
	"fmt"
	"time"
)

// What commands take.
const (
	costFetch   = 200 * time.Nanosecond // of a ring's entry
	costMethod  = 5 * time.Nanosecond
	costPoll    = time.Microsecond // of a semaphore that is not there yet
	costLaunch  = 5 * time.Microsecond
	bytesPerUS  = 8192 // of a copy
	threadsInUS = 1000 // of a kernel
)

type channel struct {
	id        int
	owner     Owner
	instance  uint32
	listed    bool
	stopped   bool
	held      bool // until the next doorbell
	loaded    bool
	userd     HostPA
	ring      uint64
	order     uint8
	directory HostPA
	limit     uint64
	get, put  uint32

	State Context
}

// Context is the state of a channel's methods: what goes with it when its VM moves.
type Context struct {
	Segment                uint64 // address of what is left of a push buffer
	Left                   uint32 // dwords of it
	Ref                    uint32
	Method                 uint32 // of a header whose data are not all there yet
	Subchannel             uint32
	Count                  uint32 // data words that are missing
	Increments             uint8  // 0: no, 1: yes, 2: once
	Class                  [8]uint32
	SemHigh, SemLow        uint32
	SemSeq                 uint32
	Out, In, Query         uint64
	PitchIn, PitchOut      uint32
	Length, Lines          uint32
	Push                   uint32 // bytes that a push of M2MF still takes
	Copied                 uint64 // bytes that are done of the copy under way
	GridYX, GridZ          uint32
	BlockYX, BlockZ        uint32
	Code, Params, ComQuery uint64
	ComSeq                 uint32
}

// Position is where a channel is in its ring, and its context.
type Position struct {
	Get     uint32
	Context Context
}

// Position returns a channel's, which has to be at rest.
func (g *GPU) Position(id int) Position {
	c := &g.channels[id]
	return Position{c.get, c.State}
}

// SetPosition sets it. Fields are as wide as the hardware's, whatever is in p.
func (g *GPU) SetPosition(id int, p Position) {
	c := &g.channels[id]
	s := &p.Context
	s.Segment &= 1<<AddressBits - 4
	s.Left &= 0x1fffff
	s.Method &= 0x3ffc
	s.Subchannel &= 7
	s.Count &= 0x1fff
	s.Increments %= 3
	s.Push = min(s.Push, MaxCopy)
	s.Copied = min(s.Copied, uint64(s.Length)*uint64(s.Lines), MaxCopy)
	if g.load(c) {
		c.get = p.Get & (1<<c.order - 1)
		c.put, c.held = c.get, true
		c.State = p.Context
		g.publish(c)
	}
}

// pending reports whether a channel has something to do and may.
func (c *channel) pending() bool {
	return !c.stopped && !c.held && c.instance&ChannelValid != 0 && (c.get != c.put || c.State.Left > 0)
}

// next is the channel that runs next: in turns, of those that are listed and have commands.
func (g *GPU) next() *channel {
	for i := range g.listed {
		c := &g.channels[g.listed[(g.last+1+i)%len(g.listed)]]
		if c.pending() {
			return c
		}
	}
	return nil
}

// Advance lets time pass until to. It returns before if a channel comes to rest, or
// after so many steps. A step that is much work counts as many.
func (g *GPU) Advance(to time.Duration, most int) {
	for g.now < to {
		if g.busyUntil > g.now {
			g.now = min(g.busyUntil, to)
			if g.now < g.busyUntil {
				return
			}
			continue
		}
		if g.current == nil {
			c := g.next()
			if c == nil {
				g.now = to
				return
			}
			g.current = c
			for i, id := range g.listed {
				if id == c.id {
					g.last = i
				}
			}
		}
		if most--; most < 0 {
			return
		}
		if g.step(g.current); g.current == nil {
			g.effort = 0
			return
		}
		most, g.effort = most-g.effort, 0
	}
}

// NextEvent is when the GPU will have done what it does now, at the earliest;
// ok is false if it does nothing.
func (g *GPU) NextEvent() (at time.Duration, ok bool) {
	if g.busyUntil > g.now {
		return g.busyUntil, true
	}
	return g.now + costMethod, g.Busy()
}

func (g *GPU) spend(d time.Duration) { g.busyUntil = g.now + d }

// step does the next dword of a channel, or fetches the next entry of its ring.
func (g *GPU) step(c *channel) {
	if !g.load(c) {
		g.illegal(c, "its instance block can't be read")
		return
	}
	if c.State.Left == 0 {
		if c.get == c.put {
			g.current = nil
			g.publish(c)
			return
		}
		var b [8]byte
		if f := g.virtual(c, c.ring+uint64(c.get)*8, b[:], false, UnitSubfifo); f != nil {
			g.fault(c, f)
			return
		}
		e := binary.LittleEndian.Uint64(b[:])
		c.get = (c.get + 1) & (1<<c.order - 1)
		c.State.Segment, c.State.Left = e&0xff_fffffffc, uint32(e>>42&0x1fffff)
		g.publish(c)
		g.spend(costFetch)
		return
	}
	var b [4]byte
	if f := g.virtual(c, c.State.Segment, b[:], false, UnitSubfifo); f != nil {
		g.fault(c, f)
		return
	}
	w := binary.LittleEndian.Uint32(b[:])
	if !g.word(c, w) {
		return // again later, or stopped
	}
	c.State.Segment, c.State.Left = c.State.Segment+4, c.State.Left-1
}

// word does a dword of a push buffer: a header, or data of the last one. It reports
// whether the channel goes on behind it.
func (g *GPU) word(c *channel, w uint32) bool {
	s := &c.State
	g.spend(costMethod)
	if s.Count > 0 {
		if !g.method(c, s.Subchannel, s.Method, w) {
			return false
		}
		s.Count--
		if s.Increments > 0 {
			s.Method += 4
		}
		if s.Increments == 2 {
			s.Increments = 0
		}
		return true
	}
	s.Subchannel, s.Method = w>>13&7, w&0xfff<<2
	switch w >> 29 {
	case 0: // a no-op, if it is 0
		if w != 0 {
			g.illegal(c, fmt.Sprintf("header %#x", w))
			return false
		}
	case 1:
		s.Count, s.Increments = w>>16&0x1fff, 1
	case 3:
		s.Count, s.Increments = w>>16&0x1fff, 0
	case 4:
		return g.method(c, s.Subchannel, s.Method, w>>16&0x1fff)
	case 5:
		s.Count, s.Increments = w>>16&0x1fff, 2
	default:
		g.illegal(c, fmt.Sprintf("header %#x", w))
		return false
	}
	return true
}

// method does one method. It reports whether it is done.
func (g *GPU) method(c *channel, sub, m, v uint32) bool {
	s := &c.State
	switch m {
	case MethodObject:
		if v != ClassM2MF && v != ClassCompute {
			g.illegal(c, fmt.Sprintf("class %#x", v))
			return false
		}
		s.Class[sub] = v
		return true
	case MethodSemaphoreHigh:
		s.SemHigh = v & 0xff
	case MethodSemaphoreLow:
		s.SemLow = v &^ 3
	case MethodSemaphoreSeq:
		s.SemSeq = v
	case MethodSemaphore:
		return g.semaphore(c, v)
	case MethodNotify:
		g.tell(Event{Kind: Notified, Channel: c.id})
	case MethodRef:
		s.Ref = v
		g.publish(c)
	default:
		switch {
		case s.Class[sub] == ClassM2MF && m >= 0x100:
			return g.m2mf(c, m, v)
		case s.Class[sub] == ClassCompute && m >= 0x100:
			return g.compute(c, m, v)
		}
		g.illegal(c, fmt.Sprintf("method %#x of class %#x", m, s.Class[sub]))
		return false
	}
	return true
}

func (g *GPU) semaphore(c *channel, v uint32) bool {
	s := &c.State
	va := uint64(s.SemHigh)<<32 | uint64(s.SemLow)
	if v&7 == SemaphoreRelease {
		return g.put32(c, va, s.SemSeq)
	}
	var b [4]byte
	if f := g.virtual(c, va, b[:], false, UnitSubfifo); f != nil {
		g.fault(c, f)
		return false
	}
	have := binary.LittleEndian.Uint32(b[:])
	switch v & 7 {
	case SemaphoreAcquire:
		if have == s.SemSeq {
			return true
		}
	case SemaphoreAcquireMore:
		if int32(have-s.SemSeq) >= 0 {
			return true
		}
	default:
		g.illegal(c, fmt.Sprintf("semaphore operation %#x", v))
		return false
	}
	g.spend(costPoll)
	if g.otherWork(c) { // another channel may release it
		g.current = nil
	}
	return false
}

// otherWork reports whether a channel beside c has commands.
func (g *GPU) otherWork(c *channel) bool {
	for _, id := range g.listed {
		if o := &g.channels[id]; o != c && o.pending() {
			return true
		}
	}
	return false
}

func (g *GPU) put32(c *channel, va uint64, v uint32) bool {
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], v)
	if f := g.virtual(c, va, b[:], true, UnitGraph); f != nil {
		g.fault(c, f)
		return false
	}
	return true
}

func (g *GPU) fault(c *channel, f *Fault) {
	g.halt(c)
	g.tell(Event{Kind: Faulted, Channel: c.id, Fault: *f})
}

func (g *GPU) illegal(c *channel, why string) {
	g.halt(c)
	g.tell(Event{Kind: Illegal, Channel: c.id, Why: why})
}

// halt stops a channel that did what can't be.
func (g *GPU) halt(c *channel) {
	c.stopped, c.State.Left, c.put = true, 0, c.get
	c.State.Count, c.State.Copied = 0, 0
	if g.current == c {
		g.current = nil
	}
	g.publish(c)
	g.spend(costPoll)
}
