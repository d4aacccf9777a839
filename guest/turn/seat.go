package turn

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// state is what a session does at an arbiter.
type state int

const (
	free    state = iota // it launches as it likes
	idle                 // it has nothing to launch
	asked                // it waits for its turn
	running              // it has its turn
	lapsed               // its turn was taken back, and has not ended
)

// Seat is a session's place at an arbiter.
type Seat struct {
	a     *Arbiter
	who   Member
	owner *owner
	conn  *net.UnixConn

	// The rest belongs to the arbiter's lock.
	state   state
	epoch   uint32
	number  uint64        // of the turn; 0: what ran when the epoch began
	name    string        // of its command
	named   bool          // by the executor, after the turn was taken back
	since   time.Duration // when it asked, or its turn began
	charged time.Duration // of a turn that was taken back
	overdue bool          // it was told of
	active  time.Duration // when it had something last
	stale   int           // frames of earlier epochs
	offer   uint64        // the turn that may begin, or might, without being asked for; 0: none was in this epoch
	takes   bool          // offers are understood
	barred  time.Duration // until when there are none
	expire  *time.Timer
	excused bool // it has kept the GPU for long, but nobody wants it
	use     Use
	gone    bool
}

// Use is what a session has had of a GPU.
type Use struct {
	Turns   uint64        // that have ended, or were taken back
	Lapses  uint64        // that were taken back
	Busy    time.Duration // how long they lasted until then
	Overrun time.Duration // how long those that were taken back lasted longer
	Waited  time.Duration // from asking until a turn began
	Shared  bool          // it takes turns now
	Waiting bool          // it waits for its turn now
	// Keeps is for how long the present turn has lasted, and Name is its command.
	Keeps time.Duration
	Name  string
}

// Use returns what the session has had.
func (s *Seat) Use() Use {
	s.a.mu.Lock()
	defer s.a.mu.Unlock()
	u := s.use
	u.Shared, u.Waiting = s.state != free, s.state == asked
	if s.state == running || s.state == lapsed {
		u.Keeps, u.Name = s.a.now()-s.since, s.name
	}
	return u
}

// Leave gives the seat up: the executor ends, or serves the session no more. A turn
// that it had has ended, for the others.
func (s *Seat) Leave() {
	s.a.mu.Lock()
	defer s.a.unlock()
	s.a.remove(s)
}

// Gone reports whether the seat is given up or taken away.
func (s *Seat) Gone() bool {
	s.a.mu.Lock()
	defer s.a.mu.Unlock()
	return s.gone
}

// send sends a frame, and never waits: what an executor does not read is an error when the
// socket's buffer is full.
func (s *Seat) send(f Frame) error {
	raw, err := s.conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("turn: %s: %w", f.Kind, err)
	}
	b := f.Encode()
	var serr error
	err = raw.Write(func(fd uintptr) bool {
		serr = unix.Sendto(int(fd), b[:], unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil)
		return true
	})
	if err == nil {
		err = serr
	}
	if err != nil {
		return fmt.Errorf("turn: %s: %w", f.Kind, err)
	}
	return nil
}

// An executor may send so many frames in a period; the rest wait. It would take turns of less
// than 100 µs to need more.
const (
	framesPerPeriod = 2000
	framesPeriod    = 100 * time.Millisecond
	// mostStale is how many frames of former epochs may be under way when one begins.
	mostStale = 8
)

// read handles what the executor sends, until its connection ends.
func (s *Seat) read() {
	r := bufio.NewReaderSize(s.conn, 16*FrameSize)
	var b [FrameSize]byte
	begin, n := time.Now(), 0
	for {
		if _, err := io.ReadFull(r, b[:]); err != nil {
			s.lose(Gone, fmt.Errorf("connection to the executor: %w", err))
			return
		}
		if n++; n > framesPerPeriod {
			// Not under the lock, and the rest stays in the sender's socket.
			if d := framesPeriod - time.Since(begin); d > 0 {
				time.Sleep(d)
			}
			begin, n = time.Now(), 0
		} else if time.Since(begin) > framesPeriod {
			begin, n = time.Now(), 1
		}
		f, err := Decode(&b)
		if err == nil {
			err = s.handle(f)
		}
		if err != nil {
			s.lose(Breach, err)
			return
		}
	}
}

func (s *Seat) lose(e Event, err error) {
	s.a.mu.Lock()
	defer s.a.unlock()
	if s.gone {
		return
	}
	s.a.remove(s)
	s.a.report(e, s, 0, err)
}

// handle does what a frame says. An error is a breach of the rules.
func (s *Seat) handle(f Frame) error {
	a := s.a
	a.mu.Lock()
	defer a.unlock()
	if s.gone {
		return nil
	}
	if f.Epoch != s.epoch {
		if s.stale++; s.stale > mostStale || f.Epoch > s.epoch {
			return fmt.Errorf("%s in epoch %d, which is %d: %w", f.Kind, f.Epoch, s.epoch, errRules)
		}
		return nil // it was under way
	}
	now := a.now()
	this := f.Number == s.number
	switch {
	case f.Kind == Ask && s.state == idle && f.Number > s.number:
		s.state, s.number, s.name, s.named = asked, f.Number, f.Name, false
		a.forget(s) // it may hear of that after this, and begin: that is the same turn
		a.queue(now, s, f.What)
		a.enter(now)
	case f.Kind == End && this && (s.state == running || s.state == lapsed || s.state == asked && s.number == 0),
		f.Kind == Withdraw && this && (s.state == asked || s.state == running || s.state == lapsed):
		s.takes = s.takes || f.Kind == End && f.What == EndOffers
		a.stop(now, s)
	case f.Kind == Begin && f.Number == s.offer && (s.state == idle && !this || s.state == asked && this):
		a.begin(now, s, f)
	case f.Kind == Begin && this && (s.state == running || s.state == lapsed):
		return nil // it was asked for, too, and has been granted
	case f.Kind == Keeps && this && s.state == lapsed && !s.named:
		s.named = true
		if s.name != f.Name {
			s.name = f.Name
			a.report(Overdue, s, now-s.since, nil)
		}
	default:
		return fmt.Errorf("%s of turn %d, with turn %d %s: %w", f.Kind, f.Number, s.number, s.state, errRules)
	}
	a.decide()
	return nil
}

func (s state) String() string {
	return [...]string{"not needed", "over", "asked for", "granted", "taken back"}[s]
}
