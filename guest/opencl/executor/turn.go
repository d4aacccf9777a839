package executor

import (
	"bufio"
	"hash/maphash"
	"io"
	"net"
	"slices"
	"time"

	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/guest/turn"
)

// On a GPU that several sessions share, commands are launched in turns (see package turn).
// A command that has no turn is parked, as one that waits for the application is, and a turn is
// asked for. So what holds for parked commands holds here: the order of a queue stays, a freeze
// waits for nothing that was not launched, and parked commands move with the session.
//
// A turn has some commands, as many as usually take turnLength together. It has ended when
// they have, and nothing else is ready. An application that waits for each of its commands, and
// usually comes with the next one at once, is waited for a moment: it takes longer to
// pass a turn on and to get the next one than to run a short command.

const (
	// turnLength is how long a turn of several commands is meant to be: some times as long as it takes to
	// pass a turn on (300 µs on a card). Another session waits as long.
	turnLength = 2 * time.Millisecond
	// mostInTurn is how many commands a turn has at most.
	mostInTurn = 128
	// A turn waits for an application that usually thinks for no longer than soon: for twice that, and
	// grace more.
	soon  = 100 * time.Microsecond
	grace = 50 * time.Microsecond
	// It does so only if as many commands as fewest fit into it. With some that have two commands, and some that have
	// one, turns would have no usual length, by which the arbiter says ahead whom it will wait for.
	fewest = 4
	// A think time counts as this at most.
	longThink = time.Millisecond
)

// deviceTurns is what the session does at the arbiter of one of its devices. It belongs to the
// session's lock.
type deviceTurns struct {
	s      *session
	conn   *net.UnixConn // to the arbiter; nil: there is none
	shared bool          // commands are launched in turns
	epoch  uint32
	number uint64
	offer  uint64 // the turn after this one, if it may begin without being asked for; 0: it may not
	state  turnState
	left   int           // commands that the turn may still have
	began  time.Time     // when it was granted
	length time.Duration // for how long it waits for the application's next command at most, from then on
	soon   time.Duration // how long that may usually take
	since  time.Time     // when its commands that run began to
	count  int           // how many these are; 0: it has had none
	idle   time.Time     // when the last of its commands ended; zero: some run, or the next one has come
	think  time.Duration // from then to the next command, on average; less than 0: unknown
	again  *time.Timer   // ends the turn if no command comes
	names  bool          // the arbiter may be told which command keeps a turn
	waits  bool          // somebody waits for its commands to end
	todo   []launched    // its commands that somebody waits for
	last   []launched    // its commands that nobody waits for yet
	usual  time.Duration // how long one command takes, on average
}

func newTurns(s *session) *deviceTurns {
	t := &deviceTurns{s: s, length: turnLength, soon: soon, think: -1}
	t.again = time.AfterFunc(time.Hour, t.waited)
	t.again.Stop()
	return t
}

type turnState uint8

const (
	turnNone turnState = iota
	turnAsked
	turnHeld
)

// launched is a command of a turn.
type launched struct {
	q    *queue
	seq  uint64
	ev   cl.Event
	name string
}

// inTurns reports whether commands of the kind are launched in turns: those that the device
// works on by itself. Transfers are not: a card has engines of their own for them, and a bulk
// transfer goes at the application's pace.
func inTurns(op wire.Op) bool {
	switch op {
	case wire.OpNdrange, wire.OpCopyBuffer, wire.OpCopyBufferRect, wire.OpFillBuffer,
		wire.OpCopyImage, wire.OpFillImage, wire.OpCopyImageToBuffer, wire.OpCopyBufferToImage:
		return true
	}
	return false
}

// turnsOf returns the turns of a queue's device.
func (s *session) turnsOf(q *queue) *deviceTurns {
	d := q.dev
	for d.parent != nil {
		d = d.parent
	}
	return s.turns[d.id-1]
}

// mayLaunch reports whether the command may be launched now, as far as turns go.
func (s *session) mayLaunch(q *queue, op wire.Op) bool {
	if !s.sharing.Load() || q == nil || !inTurns(op) {
		return true
	}
	t := s.turnsOf(q)
	return !t.shared || (t.state == turnHeld && t.left > 0 || t.state == turnNone && t.offer != 0) && !s.gate.Load()
}

// tracked reports whether a command's end has to be known, as it is part of a turn.
func (s *session) tracked(q *queue, op wire.Op) bool {
	return s.sharing.Load() && inTurns(op) && s.turnsOf(q).shared
}

// launch counts a command that was enqueued as a part of the turn. ev is its event, and k the
// kernel of a launch.
func (s *session) launch(q *queue, op wire.Op, k *kernel, ev cl.Event) {
	if !s.sharing.Load() || !inTurns(op) || ev == 0 {
		return
	}
	t := s.turnsOf(q)
	if !t.shared {
		return
	}
	t.comes()
	if t.state == turnNone && t.offer != 0 {
		name, size := nameOf(op, k), [3]uint64{}
		if k != nil {
			size = s.glob
		}
		t.begin(t.offer, s.kindOf(name, size), name)
	}
	cl.RetainEvent(ev)
	t.left--
	t.count++
	t.last = append(t.last, launched{q: q, seq: q.seq, ev: ev, name: nameOf(op, k)})
	t.await()
}

// begin begins a turn that was offered.
func (t *deviceTurns) begin(number, what uint64, name string) {
	t.hold(number)
	t.tell(turn.Frame{Kind: turn.Begin, Epoch: t.epoch, Number: t.number, What: what, Name: name})
}

// hold has the session have its turn.
func (t *deviceTurns) hold(number uint64) {
	t.state, t.number, t.offer, t.count, t.began = turnHeld, number, 0, 0, time.Now()
	t.since = t.began
	t.left = mostInTurn
	if t.usual > 0 {
		t.left = int(min(max(turnLength/t.usual, 1), mostInTurn))
	}
}

// await has somebody wait for the turn's commands.
func (t *deviceTurns) await() {
	if t.waits || len(t.last) == 0 {
		return
	}
	t.waits = true
	go t.untilOver()
}

// untilOver waits for commands until none is left, and then ends the turn.
func (t *deviceTurns) untilOver() {
	s := t.s
	for {
		s.mu.Lock()
		todo := t.last
		t.todo, t.last = todo, nil
		if len(todo) == 0 {
			t.waits = false
			t.over()
			s.mu.Unlock()
			return
		}
		evs := untilAll(todo)
		s.mu.Unlock()
		// A command that fails makes the wait end early, and commands before it may run after its own.
		st := cl.WaitForEvents(evs)
		if st != cl.Success {
			for i := range evs {
				cl.WaitForEvents(evs[i : i+1])
			}
		}
		s.mu.Lock()
		t.todo = nil
		for _, l := range todo {
			if l.q.inOrder() && st == cl.Success {
				l.q.idle = max(l.q.idle, l.seq)
			}
			cl.ReleaseEvent(l.ev)
		}
		s.mu.Unlock()
	}
}

// untilAll returns the events of commands whose end is that of all, and has their queues
// begin: of an in-order queue, the last one.
func untilAll(todo []launched) (evs []cl.Event) {
	seen := map[*queue]bool{}
	for _, l := range slices.Backward(todo) {
		if seen[l.q] && l.q.inOrder() {
			continue
		}
		evs = append(evs, l.ev)
		if !seen[l.q] && l.q.vendor != 0 { // it is not released
			cl.Flush(l.q.vendor)
		}
		seen[l.q] = true
	}
	return evs
}

// keeper returns the name of the turn's first command that has not ended.
func (t *deviceTurns) keeper() (name string, ok bool) {
	for _, of := range [][]launched{t.todo, t.last} {
		for _, l := range of {
			if now, st := cl.EventStatus(l.ev); st == cl.Success && now > cl.Complete {
				return l.name, true
			}
		}
	}
	return "", false
}

// comes notes that the application has come with its next command.
func (t *deviceTurns) comes() {
	if t.idle.IsZero() {
		return
	}
	now := time.Now()
	d := min(now.Sub(t.idle), longThink)
	if t.think < 0 {
		t.think = d
	}
	t.think += (d - t.think) / 8
	t.idle, t.since, t.count = time.Time{}, now, 0
}

// stays returns for how long the turn, none of whose commands runs, still waits for the next one: 0, not at all.
func (t *deviceTurns) stays(now time.Time) time.Duration {
	next := t.think + t.usual // the time that the next command takes
	if t.count == 0 || t.left <= 0 || t.s.frozen || t.s.gate.Load() || t.think < 0 || t.think > t.soon ||
		next > t.length/fewest || now.Sub(t.began)+next > t.length {
		return 0
	}
	return max(0, 2*t.think+grace-now.Sub(t.idle))
}

// waited ends a turn that has waited for a command long enough.
func (t *deviceTurns) waited() {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	if t.shared && t.state == turnHeld && !t.idle.IsZero() {
		t.over()
	}
}

// over ends the turn, all of whose commands have ended, and asks for the next one; or has the turn wait for
// a command.
func (t *deviceTurns) over() {
	s := t.s
	s.settleAll()
	if t.shared && t.state == turnHeld {
		now := time.Now()
		if t.count > 0 && t.idle.IsZero() {
			each := now.Sub(t.since) / time.Duration(t.count)
			if t.usual == 0 {
				t.usual = each
			}
			t.usual += (each - t.usual) / 4
			t.idle = now
		}
		if d := t.stays(now); d > 0 {
			t.again.Reset(d)
		} else {
			t.end()
		}
	}
	s.gateIfIdle()
	if t.state == turnHeld || t.offer != 0 {
		s.advance() // what is ready is in this turn, or begins the next one
	} else {
		s.askTurns()
	}
}

// endTurns ends the turns all of whose commands have ended, without waiting until their own thread
// knows: what the application launches as soon as it is told need not be parked then.
func (s *session) endTurns() {
	if !s.sharing.Load() {
		return
	}
	for _, t := range s.turns {
		if t.shared && t.state == turnHeld && t.count > 0 && allOver(t.last) && allOver(t.todo) {
			t.over()
		}
	}
}

// allOver reports whether all of the commands have ended.
func allOver(all []launched) bool {
	for _, l := range slices.Backward(all) { // the last one mostly tells
		if now, st := cl.EventStatus(l.ev); st != cl.Success || now > cl.Complete {
			return false
		}
	}
	return true
}

// end reports that the turn has ended.
func (t *deviceTurns) end() {
	t.state, t.left, t.count = turnNone, 0, 0
	t.tell(turn.Frame{Kind: turn.End, Epoch: t.epoch, Number: t.number, What: turn.EndOffers})
}

// tell sends a frame to the arbiter. There are never more than a few under way, so this does
// not wait.
func (t *deviceTurns) tell(f turn.Frame) {
	if t.conn == nil {
		return
	}
	b := f.Encode()
	if _, err := t.conn.Write(b[:]); err != nil {
		t.conn.Close() // its reader lets the session free
	}
}

// askTurns asks for a turn on each device that has a command which could run.
func (s *session) askTurns() {
	if !s.sharing.Load() || s.frozen || s.gate.Load() || !s.active.Load() || s.redo != nil {
		return
	}
	for _, t := range s.turns {
		if !t.shared || t.state != turnNone {
			continue
		}
		if p := s.readyFor(t); p != nil {
			t.comes()
			t.number++
			t.offer = 0
			t.state = turnAsked
			what, name := s.whatIs(p)
			t.tell(turn.Frame{Kind: turn.Ask, Epoch: t.epoch, Number: t.number, What: what, Name: name})
		}
	}
}

// readyFor returns the first parked command that only waits for a turn on that device.
func (s *session) readyFor(t *deviceTurns) *parkedCall {
	blocked, fenced := map[*queue]bool{}, map[*queue]bool{}
	for _, p := range s.parked {
		if p.q == nil {
			continue
		}
		if inTurns(p.op) && s.turnsOf(p.q) == t && s.ready(p, blocked, fenced) {
			return p
		}
		f, _ := isFence(p.op, len(p.wait))
		blocked[p.q] = true
		fenced[p.q] = fenced[p.q] || f
	}
	return nil
}

// whatIs returns the kind and the name of a parked command.
func (s *session) whatIs(p *parkedCall) (what uint64, name string) {
	name = nameOf(p.op, p.kernel)
	var size [3]uint64
	m := &wire.Ndrange{}
	if p.kernel != nil && m.Decode(p.body) == nil {
		size = [3]uint64{m.Glob0, m.Glob1, m.Glob2}
	}
	return s.kindOf(name, size), name
}

// kindOf returns the kind of a command, by which its length is predicted. size is the global size of
// a kernel's launch.
func (s *session) kindOf(name string, size [3]uint64) uint64 {
	var h maphash.Hash
	h.SetSeed(s.seed)
	_, _ = h.WriteString(name)
	for _, n := range size {
		_ = h.WriteByte(byte(n))
		_ = h.WriteByte(byte(n >> 8))
		_ = h.WriteByte(byte(n >> 16))
		_ = h.WriteByte(byte(n >> 24))
	}
	return h.Sum64()
}

// nameOf returns what a command is called: by its kernel, if it is the launch of one.
func nameOf(op wire.Op, k *kernel) string {
	if k == nil {
		return op.String()
	}
	return k.name
}

// withdrawTurns gives up what was asked for, and turns without commands. It is called when
// the gate is closed: a frozen session has no turn, and a freeze does not wait for
// others' commands.
func (s *session) withdrawTurns() {
	for _, t := range s.turns {
		t.offer = 0
		switch {
		case !t.shared:
		case t.state == turnAsked:
			t.state = turnNone
			t.tell(turn.Frame{Kind: turn.Withdraw, Epoch: t.epoch, Number: t.number})
		case t.state == turnHeld && !t.waits:
			t.end()
		}
	}
}

// takeTurns lets arbiters come, until end is called, if the session takes turns at all.
func (s *session) takeTurns() (end func(), err error) {
	if s.cfg.TurnSocket == "" {
		return func() {}, nil
	}
	l, err := handover.Listen(s.cfg.TurnSocket)
	if err != nil {
		return nil, err
	}
	go s.serveTurns(l)
	return func() { l.Close() }, nil
}

// serveTurns accepts the arbiters' connections.
func (s *session) serveTurns(l *net.UnixListener) {
	for {
		conn, err := handover.Accept(l.AcceptUnix)
		if err != nil {
			return
		}
		go s.readTurns(conn)
	}
}

// readTurns does what an arbiter says, until the connection ends. Then the session is free:
// gpuguest has ended, and its applications go on.
func (s *session) readTurns(conn *net.UnixConn) {
	defer conn.Close()
	r := bufio.NewReaderSize(conn, 16*turn.FrameSize)
	var t *deviceTurns
	var b [turn.FrameSize]byte
	for {
		_, err := io.ReadFull(r, b[:])
		var f turn.Frame
		if err == nil {
			f, err = turn.Decode(&b)
		}
		s.mu.Lock()
		switch {
		case err != nil:
			if t != nil && t.conn == conn {
				t.conn = nil
				t.setFree()
			}
		case t == nil && (f.Kind != turn.Hello || f.Number >= uint64(len(s.turns))):
			err = turn.ErrFrame // it is about a device that we don't have
		case f.Kind == turn.Hello && t == nil && f.Number < uint64(len(s.turns)):
			t = s.turns[f.Number]
			if t.conn != nil {
				t.conn.Close() // of a gpuguest before this one
			}
			t.conn, t.epoch, t.names = conn, 0, f.What == turn.HelloKeeps
			t.setFree()
		case t != nil && t.conn == conn:
			t.handle(f)
		}
		s.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (t *deviceTurns) handle(f turn.Frame) {
	s := t.s
	switch f.Kind {
	case turn.Free:
		t.epoch = f.Epoch
		t.setFree()
	case turn.Share:
		t.epoch, t.number, t.offer = f.Epoch, 0, 0
		t.shared, t.state, t.left, t.count, t.began = true, turnHeld, 0, 0, time.Now()
		t.idle = time.Time{}
		s.sharing.Store(true)
		s.drainTurn(t)
	case turn.Grant:
		if t.state != turnAsked || f.Epoch != t.epoch || f.Number != t.number {
			return // it was given up while the grant was under way
		}
		t.hold(t.number)
		t.granted()
	case turn.Offer:
		switch {
		case f.Epoch != t.epoch || s.frozen || s.gate.Load():
		case t.state != turnAsked && f.Number == t.number+1:
			t.offer = f.Number
		case t.state == turnAsked && f.Number == t.number: // asked for while the offer was under way
			t.begin(f.Number, 0, "")
			t.granted()
		}
	case turn.Revoke:
		if f.Epoch == t.epoch && f.Number == t.offer {
			t.offer = 0
		}
	case turn.Lapse:
		if f.Epoch == t.epoch && f.Number == t.number && t.state == turnHeld {
			t.left = 0
			if !t.idle.IsZero() { // it waits for a command
				t.over()
				return
			}
			name, ok := t.keeper()
			if !ok {
				return
			}
			s.log.Warn("a command keeps the GPU while other sessions wait: they go on beside it", "turn", f.Number, "command", name)
			if t.names {
				t.tell(turn.Frame{Kind: turn.Keeps, Epoch: t.epoch, Number: t.number, Name: name})
			}
		}
	}
}

// granted launches what is ready, in a turn that has just begun.
func (t *deviceTurns) granted() {
	s := t.s
	s.advance()
	if t.state == turnHeld && !t.waits { // what was ready is not any more
		t.end()
		s.askTurns()
	}
}

// drainTurn makes what runs the turn that an epoch begins with.
func (s *session) drainTurn(t *deviceTurns) {
	for _, c := range s.contexts() {
		for _, q := range c.queues {
			var ev cl.Event
			if s.turnsOf(q) == t && q.busy() && cl.EnqueueMarkerWithWaitList(q.vendor, nil, &ev) == cl.Success {
				t.last = append(t.last, launched{q: q, seq: q.seq, ev: ev, name: q.kernel})
			}
		}
	}
	t.await()
	if !t.waits {
		t.end()
		s.askTurns()
	}
}

// setFree lets commands be launched without turns.
func (t *deviceTurns) setFree() {
	s := t.s
	t.shared, t.state, t.offer, t.left, t.count = false, turnNone, 0, 0, 0
	s.sharing.Store(slices.ContainsFunc(s.turns, func(x *deviceTurns) bool { return x.shared }))
	s.advance()
}
