package nvc0

import (
	"encoding/binary"
	"fmt"
	"time"
)

// Config is how a [GPU] is.
type Config struct {
	VRAM uint64 // bytes, a multiple of 1 MiB

	// Mediated says that the hardware's tables have to be the mediator's: fetching one
	// from any other frame is a violation.
	Mediated bool

	// Violated is told of each violation.
	Violated func(Violation)

	// Bus reads or writes system memory at an address of the GPU's bus, on behalf of an
	// owner, and reports whether there is any. nil: there is none.
	Bus func(on Owner, addr uint64, p []byte, write bool) bool
}

// EventKind is what happened to a channel.
type EventKind uint8

// The kinds.
const (
	Notified EventKind = iota // by its own method
	Faulted                   // the channel is stopped
	Illegal                   // a method, class, header or ring that can't be: the channel is stopped
)

// Event is what an interrupt of the hardware is about.
type Event struct {
	Kind    EventKind
	Channel int
	Fault   Fault  // of Faulted
	Why     string // of Illegal
}

// GPU is the hardware. It is not safe for use by several goroutines. Time is
// told to it, and goes on in Advance only.
type GPU struct {
	config     Config
	mem        []byte
	tags       []tag
	violations int
	tlb        map[tlbKey]PTE
	tlbOrder   []tlbKey

	channels  [Channels]channel
	playlist  uint32
	tlbSpace  uint32
	kicked    uint32
	listed    []int // channels of the playlist, in its order
	current   *channel
	last      int // index in listed of who ran last
	now       time.Duration
	busyUntil time.Duration
	effort    int // of the step at work beyond that of a step, in steps
	events    []Event
}

// maxEvents is how many events are kept for who does not take them.
const maxEvents = 1024

// New returns a GPU whose memory belongs to nobody.
func New(c Config) (*GPU, error) {
	if c.VRAM == 0 || c.VRAM%(1<<20) != 0 || c.VRAM > 1<<34 {
		return nil, fmt.Errorf("%d bytes of memory: take a multiple of 1 MiB, up to 16 GiB: %w", c.VRAM, ErrRange)
	}
	g := &GPU{config: c, mem: make([]byte, c.VRAM), tags: make([]tag, c.VRAM/PageSize), tlb: map[tlbKey]PTE{}}
	for i := range g.channels {
		g.channels[i].id = i
	}
	return g, nil
}

// SetOwner says on whose behalf a channel works.
func (g *GPU) SetOwner(channel int, o Owner) { g.channels[channel].owner = o }

// ReadRegister reads one of the registers that a mediator uses; others are 0.
func (g *GPU) ReadRegister(at uint32) uint32 {
	switch {
	case at == RegPlaylistAddress:
		return g.playlist
	case at == RegKick:
		return g.kicked
	case at == RegTLBSpace:
		return g.tlbSpace
	case at == RegGraphStatus:
		if g.Busy() {
			return 1
		}
	case at >= RegChannel && at < RegChannel+8*Channels:
		c := &g.channels[(at-RegChannel)/8]
		if at%8 == 0 {
			return c.instance
		}
		state := uint32(0)
		if c.listed {
			state |= 1
		}
		if g.current == c {
			state |= 1 << 12
		}
		if c.pending() {
			state |= 1 << 28
		}
		return state
	}
	return 0
}

// WriteRegister writes one.
func (g *GPU) WriteRegister(at, v uint32) {
	switch {
	case at == RegPlaylistAddress:
		g.playlist = v
	case at == RegPlaylistLength:
		g.readPlaylist(int(v & PlaylistLimit))
	case at == RegKick:
		g.kick(int(v % Channels))
		g.kicked = v
	case at == RegTLBSpace:
		g.tlbSpace = v
	case at == RegTLBTrigger && v&TLBFlush != 0:
		g.flushTLB(HostPA(g.tlbSpace>>4)<<12, v&TLBAllSpaces != 0)
	case at >= RegChannel && at < RegChannel+8*Channels && at%8 == 0:
		c := &g.channels[(at-RegChannel)/8]
		if c.instance != v {
			g.kick(c.id)
			*c = channel{id: c.id, owner: c.owner, listed: c.listed, instance: v}
		}
	}
}

// readPlaylist takes n entries {channel, 4} from the list.
func (g *GPU) readPlaylist(n int) {
	at := HostPA(g.playlist&0x0fffffff) << 12
	on := Mediator
	if !g.config.Mediated {
		on = g.channels[0].owner
	}
	for i := range g.channels {
		g.channels[i].listed = false
	}
	g.listed = g.listed[:0]
	for i := range n {
		e, ok := g.fetch32(on, at+HostPA(8*i), "fetch of a playlist")
		if !ok || e >= Channels || g.channels[e].listed {
			continue
		}
		g.channels[e].listed = true
		g.listed = append(g.listed, int(e))
	}
	if c := g.current; c != nil && !c.listed {
		g.current = nil
	}
	g.last = -1
}

// Doorbell tells a channel how far its ring is filled.
func (g *GPU) Doorbell(id int, put uint32) {
	c := &g.channels[id]
	if c.instance&ChannelValid == 0 || c.stopped || !g.load(c) {
		return
	}
	c.put, c.held = put&(1<<c.order-1), false
}

// Busy reports whether the engines are at work or a channel has commands that it can run.
func (g *GPU) Busy() bool { return g.current != nil || g.busyUntil > g.now || g.next() != nil }

// Now is the GPU's time.
func (g *GPU) Now() time.Duration { return g.now }

// Take returns what happened since it was called last.
func (g *GPU) Take() []Event {
	e := g.events
	g.events = nil
	return e
}

func (g *GPU) tell(e Event) {
	if len(g.events) < maxEvents {
		g.events = append(g.events, e)
	}
}

// kick takes a channel off the engines, once they have done what they are at. What
// it had to do waits.
func (g *GPU) kick(id int) {
	if g.current != nil && g.current.id == id {
		g.current = nil
	}
	g.channels[id].loaded = false
}

// Hold takes a channel off the engines, and lets what it had to do wait for another
// doorbell.
func (g *GPU) Hold(id int) {
	g.kick(id)
	g.channels[id].held = true
}

// Stop ends what a channel had to do, until it gets another instance block.
func (g *GPU) Stop(id int) {
	g.kick(id)
	c := &g.channels[id]
	c.stopped, c.put = true, c.get
}

// load reads the channel's instance block, and reports whether it can be.
func (g *GPU) load(c *channel) bool {
	if c.loaded {
		return true
	}
	inst := HostPA(c.instance&0x0fffffff) << 12
	var b [0x210]byte
	if c.instance>>28&3 != TargetVRAM || !g.fetch(c.owner, inst, b[:], "fetch of an instance block") {
		return false
	}
	at := func(off int) uint64 { return uint64(binary.LittleEndian.Uint32(b[off:])) }
	c.userd = HostPA(at(InstUserd)&^0xfff | at(InstUserdHigh)<<32)
	c.ring = at(InstRing) | at(InstRingHigh)&0xff<<32
	c.order = uint8(min(at(InstRingHigh)>>16&0x1f, MaxRingOrder))
	c.directory = HostPA(at(InstDirectory)&^0xfff | at(InstDirHigh)<<32)
	c.limit = at(InstLimit) | at(InstLimitHigh)<<32
	c.loaded = true
	return true
}

// publish writes how far a channel is to its USERD page.
func (g *GPU) publish(c *channel) {
	var b [4]byte
	may := func(t tag) bool {
		return t.owner == c.owner && (t.use == Userd || t.use == Data && !g.config.Mediated)
	}
	binary.LittleEndian.PutUint32(b[:], c.get)
	g.frames(c.owner, c.userd+UserdIBGet, b[:], true, "store to a USERD page", may)
	binary.LittleEndian.PutUint32(b[:], c.State.Ref)
	g.frames(c.owner, c.userd+UserdRef, b[:], true, "store to a USERD page", may)
}
