package mediate

import (
	"fmt"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

const (
	pumpMost = 2000 // steps of the hardware in a Poll
	pumpExit = 64   // in an exit
)

// command is what a doorbell asks for: a channel's ring is to be worked off until put.
type command struct {
	v       *VGPU
	channel int
	put     uint32
}

// doorbell is a VM's write of IB_PUT.
func (v *VGPU) doorbell(i int, put uint32) {
	c := &v.channels[i]
	if !c.valid || c.dead {
		v.refuse(mmio.BadChannel, "doorbell of channel", uint64(i))
		return
	}
	c.put = put
	v.stats.Doorbell()
	if !c.listed {
		c.unlist = true // it runs when it is
		return
	}
	v.submit(i, put)
}

// submit queues a command. Who has too many waiting gets it joined to the last one of that channel: none
// is lost, and a flood takes no memory.
func (v *VGPU) submit(i int, put uint32) {
	if len(v.waiting)+len(v.ready) >= v.request.Pending { //check:flood
		for _, q := range [][]command{v.waiting, v.ready} {
			for n := len(q) - 1; n >= 0; n-- {
				if q[n].channel == i {
					v.refuse(mmio.OverQuota, "one more command of channel", uint64(i))
					q[n].put = put
					return
				}
			}
		}
	}
	v.g.pump(pumpExit)
	v.waiting = append(v.waiting, command{v, i, put})
	v.promote()
}

// promote tells the scheduler of commands whose tables have been read, in order.
func (v *VGPU) promote() {
	for len(v.waiting) > 0 && !v.paused {
		c := v.waiting[0]
		if s := v.channels[c.channel].space; s != nil {
			if s.reads {
				return
			}
			if s.dirty { //check:scan-before-use
				v.scan(s) // which comes back here when it is done
				continue
			}
		}
		if err := v.g.sched.Submit(v.g.hw.Now(), v.id, timeshare.Kind(c.channel), 1); err != nil {
			v.tell("a command can't be queued: " + err.Error())
			return
		}
		v.waiting = v.waiting[1:]
		v.ready = append(v.ready, c)
	}
	v.g.dispatch()
}

// dispatch starts the next command, if none runs.
func (g *GPU) dispatch() {
	for g.running == nil {
		d := g.sched.Next(g.hw.Now())
		if d.Action != timeshare.Run {
			if d.Action == timeshare.Wait {
				g.rouse()
			}
			return
		}
		v := g.byID[d.Owner]
		if v == nil || len(v.ready) == 0 {
			return // it is being taken away
		}
		if err := g.sched.Start(g.hw.Now(), d.Owner); err != nil {
			v.tell("a command can't be started: " + err.Error())
			return
		}
		c := v.ready[0]
		v.ready = v.ready[1:]
		g.running, g.started = &c, g.hw.Now()
		if ch := &v.channels[c.channel]; !ch.valid || ch.dead || !ch.listed {
			ch.unlist = ch.valid && !ch.dead
			g.finish()
			continue
		}
		g.hw.Doorbell(v.first+c.channel, c.put)
		if !g.hw.Busy() {
			g.finish()
			continue
		}
		g.rouse()
	}
}

// finish accounts for the running command, which has ended or is taken off the GPU.
func (g *GPU) finish() {
	c := g.running
	g.running = nil
	v := c.v
	p := v.first + c.channel
	at := g.hw.Position(p)
	if ch := &v.channels[c.channel]; (at.Get != c.put || at.Context.Left > 0) && ch.valid && !ch.dead {
		ch.unlist = true // the rest of it when it is listed again
	}
	g.hw.Hold(p)
	if err := g.sched.End(g.hw.Now(), v.id, g.hw.Now()-g.started); err != nil {
		v.tell("a command can't be accounted for: " + err.Error())
	}
}

// pump lets the hardware's time pass up to now, by so many steps at most, and does
// what comes of it.
func (g *GPU) pump(most int) {
	now := g.now()
	for most > 0 {
		before := g.hw.Now()
		g.hw.Advance(now, most)
		g.harvest()
		if g.running != nil && !g.hw.Busy() {
			g.finish()
			g.dispatch()
			most -= pumpExit / 4
			continue
		}
		g.overdue()
		if g.hw.Now() >= now || g.hw.Now() == before {
			break
		}
		most -= pumpExit / 4
	}
	if g.running == nil {
		g.dispatch()
	}
}

// overdue stops a command that runs too long, and its channel.
func (g *GPU) overdue() {
	if _, late := g.sched.Overrun(g.hw.Now()); !late || g.running == nil {
		return
	}
	c := g.running
	c.v.refuse(mmio.Overdue, "command of channel", uint64(c.channel))
	c.v.kill(c.channel)
	c.v.intr |= 1 << 8
	c.v.interrupts()
	g.finish()
	g.dispatch()
}

// kill stops a channel until it is bound again.
func (v *VGPU) kill(i int) {
	v.channels[i].dead = true
	v.g.hw.Stop(v.first + i)
}

// forget drops what a channel has queued.
func (v *VGPU) forget(i int) {
	keep := v.waiting[:0]
	for _, c := range v.waiting {
		if c.channel != i {
			keep = append(keep, c)
		}
	}
	v.waiting = keep // those that are ready find their channel without an instance block
}

// rejoin makes the scheduler forget what a VM has ready.
func (v *VGPU) rejoin() {
	now := v.g.hw.Now()
	if _, err := v.g.sched.Leave(now, v.id); err != nil {
		v.tell("its share of the GPU's time: " + err.Error())
	}
	if err := v.g.sched.Join(now, v.id, v.request.Weight); err != nil {
		v.tell("its share of the GPU's time: " + err.Error())
	}
}

// harvest takes the hardware's events and gives each to the VM that it is about.
func (g *GPU) harvest() {
	for _, e := range g.hw.Take() {
		for _, v := range g.vgpus {
			if i := e.Channel - v.first; i >= 0 && i < len(v.channels) {
				v.happened(i, e)
			}
		}
	}
}

// happened is an event of the VM's channel, in the VM's own terms.
func (v *VGPU) happened(i int, e nvc0.Event) {
	switch e.Kind {
	case nvc0.Notified:
		v.intr |= 1 << 31
	case nvc0.Faulted:
		v.channels[i].dead = true
		v.refuse(mmio.BadCommand, fmt.Sprintf("channel %d: reason %d, address", i, e.Fault.Reason), e.Fault.VA)
		info := uint32(e.Fault.Reason)
		if e.Fault.Write {
			info |= 1 << 7
		}
		at := 4 * int(e.Fault.Unit%32)
		v.faults[at] = uint32(v.channels[i].inst >> 12)
		v.faults[at+1], v.faults[at+2], v.faults[at+3] = uint32(e.Fault.VA), uint32(e.Fault.VA>>32), info
		v.source |= 1 << (e.Fault.Unit % 32)
		v.intr |= 1 << 28
	case nvc0.Illegal:
		v.channels[i].dead = true
		v.refuse(mmio.BadCommand, e.Why+" in channel", uint64(i))
		v.graphIntr |= 1 << 4
		v.intr |= 1 << 8
	}
	v.interrupts()
}
