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
	t.think, t.soon, t.length, t.usual = time.Hour, 2*time.Hour, 4*time.Hour, 0 // 0: it may have many commands
}

// An application that waits for each of its commands has several of them in one turn, if it comes with the next
// one at once. A freeze does not wait for more of them.
func TestTurnWaitsForAnApplicationThatComesAtOnce(t *testing.T) {
	c, a, q, k, b := newDesk(t).ones()
	h := newChair(t, a)
	change(a, patient)
	c.launch(q, k, b, 1, 1024, 0)
	h.hears(turn.Ask, 1)
	h.say(turn.Frame{Kind: turn.Grant, Number: 1})
	for range 20 {
		c.call(&wire.Finish{Queue: q})
		c.launch(q, k, b, 1, 1024, 0)
	}
	c.call(&wire.Finish{Queue: q})
	if _, err := a.freeze(t.Context(), time.Minute); err != nil {
		t.Fatal(err)
	}
	h.hears(turn.End, 1)
	a.thaw()
	equal(t, c.read(q, b, 4096), 22)
}

// A turn waits for nobody who does not come soon, and for nobody when it is over.
func TestTurnThatIsNotWaitedWithEnds(t *testing.T) {
	for name, to := range map[string]func(*deviceTurns){
		"nobody comes":          func(t *deviceTurns) { t.think = time.Millisecond },
		"it thinks for long":    func(t *deviceTurns) { t.soon = time.Minute },
		"nothing is known":      func(t *deviceTurns) { t.think = -1 },
		"it has lasted long":    func(t *deviceTurns) { t.length = 1 },
		"it has its commands":   func(t *deviceTurns) { t.usual = time.Second },
		"the arbiter takes it":  nil,
		"the other has gone":    nil,
		"the session is frozen": nil,
	} {
		t.Run(name, func(t *testing.T) {
			c, a, q, k, b := newDesk(t).ones()
			h := newChair(t, a)
			change(a, patient)
			if to != nil {
				change(a, to)
			}
			c.launch(q, k, b, 1, 1024, 0)
			h.hears(turn.Ask, 1)
			h.say(turn.Frame{Kind: turn.Grant, Number: 1})
			c.call(&wire.Finish{Queue: q})
			switch name {
			case "the arbiter takes it":
				h.say(turn.Frame{Kind: turn.Lapse, Number: 1})
			case "the other has gone":
				h.say(turn.Frame{Kind: turn.Free})
				testkit.Until(t, "it is free", func() error { return testkit.Want(!a.sharing.Load(), "shared") })
				c.launch(q, k, b, 1, 1024, 0)
				c.call(&wire.Finish{Queue: q})
				equal(t, c.read(q, b, 4096), 3)
				return
			case "the session is frozen":
				if _, err := a.freeze(t.Context(), time.Minute); err != nil {
					t.Fatal(err)
				}
			}
			h.hears(turn.End, 1)
		})
	}
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
		h.hears(turn.Ask, n)
		h.say(turn.Frame{Kind: turn.Grant, Number: n})
		c.call(&wire.Finish{Queue: q})
		h.hears(turn.End, n)
		time.Sleep(2 * longThink)
	}
	change(a, patient)
	before := think()
	c.launch(q, k, b, 1, 1024, 0)
	h.hears(turn.Ask, 4)
	h.say(turn.Frame{Kind: turn.Grant, Number: 4})
	c.call(&wire.Finish{Queue: q})
	c.launch(q, k, b, 1, 1024, 0)
	c.call(&wire.Finish{Queue: q})
	if d := think(); d >= before {
		t.Errorf("it thinks for %v as before", d)
	}
}
