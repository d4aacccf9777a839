package nvc0

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Owner is on whose behalf an access is made, and whose a frame is.
type Owner uint32

// Owners that are no VM.
const (
	Nobody   Owner = 0
	Mediator Owner = 1
)

// Use is what a frame is for.
type Use uint8

// The uses.
const (
	Data  Use = iota // what its owner likes
	Table            // page tables, instance blocks and playlists of the mediator: the hardware reads them
	Userd            // a channel's USERD page: the hardware writes it for its owner
)

// Violation is an access that reached what it must not.
type Violation struct {
	On     Owner // on whose behalf
	At     HostPA
	Owner  Owner // whose it is
	Access string
}

func (v Violation) String() string {
	return fmt.Sprintf("%s at %#x on behalf of %d, which is %d's", v.Access, uint64(v.At), v.On, v.Owner)
}

// Errors of [GPU.Tag].
var (
	ErrTagged = errors.New("memory has an owner")
	ErrRange  = errors.New("no such memory")
)

type tag struct {
	owner Owner
	use   Use
}

// Tag gives whole frames, which belong to nobody or to from, to an owner. Errors
// wrap [ErrTagged] or [ErrRange].
func (g *GPU) Tag(at HostPA, size uint64, from, to Owner, use Use) error {
	if at%PageSize != 0 || size%PageSize != 0 || uint64(at) > uint64(len(g.mem)) || size > uint64(len(g.mem))-uint64(at) {
		return fmt.Errorf("%d bytes at %#x: %w", size, uint64(at), ErrRange)
	}
	frames := g.tags[at/PageSize : (uint64(at)+size)/PageSize]
	for i := range frames {
		if o := frames[i].owner; o != Nobody && o != from {
			return fmt.Errorf("frame %#x is %d's: %w", uint64(at)/PageSize+uint64(i), o, ErrTagged)
		}
	}
	for i := range frames {
		frames[i] = tag{to, use}
	}
	return nil
}

// Size is how much memory there is.
func (g *GPU) Size() uint64 { return uint64(len(g.mem)) }

// Load reads memory on somebody's behalf, as its data.
func (g *GPU) Load(on Owner, at HostPA, p []byte) { g.access(on, at, p, false, "load") }

// Store writes likewise.
func (g *GPU) Store(on Owner, at HostPA, p []byte) { g.access(on, at, p, true, "store") }

// access is of data: on must own the frames. The mediator's own are tables and USERD pages.
func (g *GPU) access(on Owner, at HostPA, p []byte, write bool, what string) bool {
	return g.frames(on, at, p, write, what, func(t tag) bool {
		return t.owner == on && (t.use == Data || on == Mediator) || on == Mediator && t.use == Userd
	})
}

// fetch reads what the hardware goes by: with a mediator its tables, without
// one those of the only owner.
func (g *GPU) fetch(on Owner, at HostPA, p []byte, what string) bool {
	return g.frames(on, at, p, false, what, func(t tag) bool {
		if g.config.Mediated {
			return t.owner == Mediator && t.use == Table
		}
		return t.owner == on
	})
}

func (g *GPU) frames(on Owner, at HostPA, p []byte, write bool, what string, may func(tag) bool) bool {
	if uint64(at) > uint64(len(g.mem)) || uint64(len(p)) > uint64(len(g.mem))-uint64(at) {
		clear(p)
		g.violate(Violation{On: on, At: at, Access: what + " beyond the memory"})
		return false
	}
	if len(p) == 0 {
		return true
	}
	for f := at / PageSize; f <= (at+HostPA(len(p))-1)/PageSize; f++ {
		if !may(g.tags[f]) {
			if !write {
				clear(p)
			}
			g.violate(Violation{On: on, At: at, Owner: g.tags[f].owner, Access: what})
			return false
		}
	}
	if write {
		copy(g.mem[at:], p)
	} else {
		copy(p, g.mem[at:])
	}
	return true
}

func (g *GPU) violate(v Violation) {
	g.violations++
	if g.config.Violated != nil {
		g.config.Violated(v)
	}
}

// Violations is how many there were.
func (g *GPU) Violations() int { return g.violations }

func (g *GPU) fetch32(on Owner, at HostPA, what string) (uint32, bool) {
	var b [4]byte
	ok := g.fetch(on, at, b[:], what)
	return binary.LittleEndian.Uint32(b[:]), ok
}

func (g *GPU) fetch64(on Owner, at HostPA, what string) (uint64, bool) {
	var b [8]byte
	ok := g.fetch(on, at, b[:], what)
	return binary.LittleEndian.Uint64(b[:]), ok
}
