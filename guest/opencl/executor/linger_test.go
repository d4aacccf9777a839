package executor

import (
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/guest/turn"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// change changes how the session takes turns on its device.
func change(a *session, to func(t *deviceTurns)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	to(a.turns[0])
}

// patient has turns wait for the application's next command, whatever the machine does beside it.
func patient(t *deviceTurns) {
	t.think, t.soon, t.length, t.usual = time.Hour, 2*time.Hour, 8*time.Hour, 0 // 0: it may have many commands
}

// turnThatWaits returns a session whose turn waits for the next command: a kernel has added 1 to the ones of buffer b.
func turnThatWaits(t *testing.T) (c *client, a *session, h *chair, q, k, b uint32) {
	t.Helper()
	c, a, q, k, b = newDesk(t).ones()
	h = newChair(t, a)
	change(a, patient)
	c.launch(q, k, b, 1, 1024, 0)
	h.grants(1)
	c.call(&wire.Finish{Queue: q})
	return c, a, h, q, k, b
}

// An application that waits for each of its commands has several of them in one turn, if it comes with the next
// one at once. A freeze does not wait for more of them.
func TestTurnWaitsForAnApplicationThatComesAtOnce(t *testing.T) {
	c, a, h, q, k, b := turnThatWaits(t)
	for range 20 {
		c.launch(q, k, b, 1, 1024, 0)
		c.call(&wire.Finish{Queue: q})
	}
	if _, err := a.freeze(t.Context(), time.Minute); err != nil {
		t.Fatal(err)
	}
	h.hears(turn.End, 1)
	a.thaw()
	equal(t, c.read(q, b, 4096), 22)
}

// A turn waits for nobody who does not come soon, and for nobody when it is over.
func TestTurnThatIsNotWaitedWithEnds(t *testing.T) {
	// set changes a turn that waits, and has it decide anew.
	set := func(to func(*deviceTurns)) func(*chair, *session) {
		return func(_ *chair, a *session) {
			change(a, to)
			a.turns[0].waited()
		}
	}
	for name, then := range map[string]func(*chair, *session){
		"nobody comes":         set(func(t *deviceTurns) { t.think = time.Millisecond }),
		"it thinks for long":   set(func(t *deviceTurns) { t.soon = time.Minute }),
		"nothing is known":     set(func(t *deviceTurns) { t.think = -1 }),
		"it has lasted long":   set(func(t *deviceTurns) { t.began = t.began.Add(-8 * time.Hour) }),
		"few commands fit":     set(func(t *deviceTurns) { t.length = 3 * time.Hour }),
		"it has its commands":  set(func(t *deviceTurns) { t.left = 0 }),
		"the arbiter takes it": func(h *chair, _ *session) { h.say(turn.Frame{Kind: turn.Lapse, Number: 1}) },
		"the session is frozen": func(h *chair, a *session) {
			if _, err := a.freeze(h.t.Context(), time.Minute); err != nil {
				h.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, a, h, _, _, _ := turnThatWaits(t)
			then(h, a)
			h.hears(turn.End, 1)
		})
	}
}

// A session that gets the GPU for itself while its turn waits goes on without turns.
func TestTurnThatWaitsIsNotNeededAnyMore(t *testing.T) {
	c, a, h, q, k, b := turnThatWaits(t)
	h.say(turn.Frame{Kind: turn.Free})
	testkit.Until(t, "it is free", func() error { return testkit.Want(!a.sharing.Load(), "shared") })
	c.launch(q, k, b, 1, 1024, 0)
	c.call(&wire.Finish{Queue: q})
	equal(t, c.read(q, b, 4096), 3)
}

// How long the application thinks is learned from its commands, whether they find a turn or ask for one.
func TestThinkTimeIsLearned(t *testing.T) {
	c, a, q, k, b := newDesk(t).ones()
	h := newChair(t, a)
	think := func() (d time.Duration) {
		change(a, func(t *deviceTurns) { d = t.think })
		return d
	}
	for n := uint64(1); n < 4; n++ {
		if d := think(); n < 3 && d >= 0 || n == 3 && d != longThink { // the second turn is the first that it comes to
			t.Errorf("it thinks for %v before turn %d", d, n)
		}
		c.launch(q, k, b, 1, 1024, 0)
		h.grants(n)
		c.call(&wire.Finish{Queue: q})
		h.hears(turn.End, n)
		change(a, func(t *deviceTurns) { t.idle = t.idle.Add(-2 * longThink) }) // so long ago
	}
	change(a, patient)
	before := think()
	c.launch(q, k, b, 1, 1024, 0)
	h.grants(4)
	c.call(&wire.Finish{Queue: q})
	c.launch(q, k, b, 1, 1024, 0)
	c.call(&wire.Finish{Queue: q})
	if d := think(); d >= before {
		t.Errorf("it thinks for %v as before", d)
	}
}
