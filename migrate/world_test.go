package migrate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
)

var errCrashed = errors.New("the driver is dead")

type card struct {
	gpu, holder, plugged string // holder: VM that it is held for; plugged: VM that has it
	claim                string
	dirty                bool
	seat                 string // where the VM had it
}

// world is a cluster with one VM. It enforces what hosts, hypervisor, guest and
// cluster enforce.
type world struct {
	t  *testing.T
	mu sync.Mutex

	at       string          // host of the VM
	off      bool            // it was stopped
	defined  map[string]bool // hosts that have its definition
	cold     bool            // the migrations are
	dead     bool            // the VM
	cards    map[string]*card
	claims   map[string]string // claim: GPU
	kept     *clusterv1.Migration
	token    uint64
	released bool             // the guest has let go
	frozen   map[string]bool  // session
	onGPU    string           // where the sessions run or ran
	stored   string           // card of the VM's stored definition
	down     map[string]bool  // hosts that do not answer
	fails    map[string]error // "host step": what it answers
	moves    int
	loses    bool            // the destination's last answer of the next move: the source goes on, too
	most     int             // names that a record may have
	cuts     string          // host that is lost with it
	stalls   bool            // the destination is lost before it has got anything of the next move, and libvirt does not end that
	twin     string          // host where the VM runs, too
	locks    bool            // libvirt has a lock manager: what goes on where the VM is not is kept paused
	keptOn   map[string]bool // hosts where it is
	paused   map[string]bool // hosts where it is
	sessions int             // more of them, which nobody looks at
	long     string          // in their names

	free   uint64                    // the VM's memory, bytes
	sizes  map[string]uint64         // of sessions' states
	waits  map[string]int            // session: the state that it waits for, which is away
	keeps  map[string]map[string]int // host, session: the state that is kept there
	states int                       // that were taken out so far

	parts  worldParts        // of a mediated GPU
	late   string            // host that does not give the VM's domain its part before it runs
	astray bool              // the VM ran without
	far    string            // remote GPU of the migrations; empty: applications are frozen
	strict bool              // an operator wants it so
	wait   bool              // they wait for one
	lent   map[string]string // GPU: the claim that it is lent to
	runs   map[string]string // session: the GPU that it is on

	begin []string          // sessions that begin on the VM's card, one before each release
	lost  map[string]string // sessions that were lost, and why
	dooms string            // session that is lost after it was listed
	seat  string            // where the VM's card is, or was last

	calls, crashAt int
	after, crashed bool
}

const from, to, other = "h1/a", "h2/b", "h2/c"

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{
		t: t, at: "h1", cards: map[string]*card{}, claims: map[string]string{"vm-1": from}, frozen: map[string]bool{"s1": false, "s2": false, "user": true},
		free: gib, sizes: map[string]uint64{"s1": 100 * mib, "s2": 10 * mib}, waits: map[string]int{}, keeps: map[string]map[string]int{},
		lost: map[string]string{}, lent: map[string]string{}, runs: map[string]string{"s1": from, "s2": from},
		seat: "0000:06:00.0", onGPU: from, stored: from, defined: map[string]bool{"h1": true}, most: 4096, down: map[string]bool{}, paused: map[string]bool{}, fails: map[string]error{},
	}
	for _, g := range []string{from, to, other, "h1/d", "h3/e"} {
		w.cards[g] = &card{gpu: g}
	}
	*w.cards[from] = card{gpu: from, holder: "vm", plugged: "vm", claim: "vm-1", dirty: true, seat: w.seat}
	return w
}

func (w *world) migration(target string, candidates ...string) *clusterv1.Migration {
	farClaim := ""
	if w.far != "" {
		farClaim = "vm-far"
	}
	return &clusterv1.Migration{
		Id: "m-1", Verb: "migrate", Object: "vm", Driver: "h1", From: from, To: target, State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
		Machine: &clusterv1.MachineMove{
			Uuid: "vm", Name: "vm", FromHost: "h1", ToHost: HostOf(target), FromGpu: from, ToGpu: target, FromClaim: "vm-1", ToClaim: "vm-2", Stored: true, Cold: w.cold, Candidates: candidates,
			FarGpu: w.far, FarClaim: farClaim, Live: w.strict, Wait: w.wait,
		},
	}
}

func (w *world) runner() *Runner {
	return New(Config{
		Sites: w, Claims: w, Journal: w, Hosts: func() []string { return []string{"h1", "h2", "h3"} }, Log: slog.New(slog.DiscardHandler), Patience: 20 * time.Millisecond, Pause: time.Millisecond,
	})
}

// call is one of the driver's calls that change something.
func (w *world) call(do func() error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.crashed {
		return errCrashed
	}
	w.calls++
	if w.calls == w.crashAt {
		if w.after {
			_ = do()
		}
		w.crashed = true
		return errCrashed
	}
	return do()
}

// drive runs a migration, with a new driver after each crash, to its end.
func (w *world) drive(m *clusterv1.Migration) *clusterv1.Migration {
	w.t.Helper()
	for range 4 {
		ctx, cancel := context.WithTimeout(w.t.Context(), 20*time.Second)
		done := make(chan struct{})
		go func() { // a dead driver does nothing any more
			for {
				w.mu.Lock()
				dead := w.crashed
				w.mu.Unlock()
				if dead {
					cancel()
				}
				select {
				case <-done:
					return
				case <-time.After(time.Millisecond):
				}
			}
		}()
		out, err := w.runner().Run(ctx, m)
		close(done)
		cancel()
		w.mu.Lock()
		crashed := w.crashed
		if crashed {
			w.crashed, w.crashAt = false, 0
		}
		w.mu.Unlock()
		if !crashed {
			if err != nil {
				w.t.Errorf("run: %v", err)
			}
			return out
		}
		if w.kept == nil { // it never was recorded: nothing to go on with
			return nil
		}
		m = proto.CloneOf(w.kept)
	}
	w.t.Error("no end")
	return m
}

// dieAnywhere does something in one new world after the other, with the driver ended at each
// of its calls, before and after the call has its effect, and another one that goes on, until
// all calls have been that one. It returns how often a driver ended.
func dieAnywhere(t *testing.T, what string, do func(w *world)) (ends int) {
	t.Helper()
	for _, after := range []bool{false, true} {
		for n := 1; ; n++ {
			w := newWorld(t)
			w.crashAt, w.after = n, after
			do(w)
			if t.Failed() {
				t.Fatalf("%s: driver ended at call %d (effect: %v)", what, n, after)
			}
			if w.crashAt != 0 { // it was never reached
				break
			}
			ends++
		}
	}
	return ends
}

func (w *world) Put(_ context.Context, m *clusterv1.Migration) (*clusterv1.Migration, error) {
	err := w.call(func() error {
		if w.kept != nil && m.GetToken() != w.kept.GetToken() {
			return ErrStale
		}
		if mm := m.GetMachine(); len(mm.GetSessions())+len(mm.GetAway())+len(mm.GetCandidates()) > w.most {
			return ErrRefused
		}
		if !storable(m) {
			return ErrRefused
		}
		w.kept = proto.CloneOf(m)
		if w.token == 0 {
			w.token = 7
		}
		w.kept.Token = w.token
		return nil
	})
	if err != nil {
		return nil, err
	}
	return proto.CloneOf(w.kept), nil
}

// Reserve and EndClaim are calls of the GPU's host, as in a cluster.
func (w *world) Reserve(_ context.Context, claim string, _ vm.VM, gpu string) error {
	return (&site{w, HostOf(gpu)}).do("reserve", func() error {
		for c, g := range w.claims {
			if g == gpu && c != claim {
				return fmt.Errorf("%s: %w", gpu, ErrTaken)
			}
		}
		w.claims[claim] = gpu
		return nil
	})
}

func (w *world) EndClaim(_ context.Context, claim string, _ vm.VM, gpu string) error {
	return (&site{w, HostOf(gpu)}).do("endclaim", func() error { delete(w.claims, claim); return nil })
}

func (w *world) Site(host string) Site { return &site{w, host} }

type site struct {
	*world
	host string
}

func (s *site) do(name string, do func() error) error {
	return s.call(func() error {
		if s.down[s.host] {
			return fmt.Errorf("host %s: %w", s.host, ErrUnreachable)
		}
		if err := s.fails[s.host+" "+name]; err != nil {
			return err
		}
		return do()
	})
}

// here is about a VM that runs on this host.
func (s *site) here() error {
	if s.at != s.host && s.twin != s.host || s.dead || s.off || s.paused[s.host] {
		return fmt.Errorf("host %s: the VM does not run here", s.host)
	}
	return nil
}

func (s *site) Where(context.Context, vm.VM) (p Presence, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.crashed:
		return 0, errCrashed
	case s.down[s.host]:
		return 0, ErrUnreachable
	case s.keptOn[s.host]:
		return Kept, nil
	case (s.at == s.host || s.twin == s.host) && s.paused[s.host]:
		return Moving, nil
	case (s.at == s.host || s.twin == s.host) && !s.dead && !s.off:
		return Running, nil
	case s.off && s.defined[s.host]:
		return Stopped, nil
	}
	return Absent, nil
}

func (s *site) Pause(context.Context, vm.VM) error {
	return s.do("pause", func() error {
		if s.at == s.twin || s.twin == "" {
			s.t.Error("the only VM is paused")
		}
		s.paused[s.host] = true
		return nil
	})
}

func (s *site) Unpause(context.Context, vm.VM) error {
	return s.do("unpause", func() error {
		if s.twin != "" {
			s.t.Errorf("it goes on on %s, and runs on %s and %s", s.host, s.at, s.twin)
		}
		delete(s.paused, s.host)
		return nil
	})
}

// alone is broken where something is done that a VM which runs twice must not have.
func (s *site) alone(what string) {
	if len(s.keptOn) > 0 {
		s.t.Errorf("%s on %s, while libvirt keeps a copy: %v", what, s.host, s.keptOn)
	}
	if s.twin != "" {
		s.t.Errorf("%s on %s, while the VM runs on %s and %s", what, s.host, s.at, s.twin)
	}
}

// Expect is only asked while the applications run.
func (s *site) Expect(_ context.Context, _ vm.VM, id *gpuctlv1.PCIIdentity) error {
	return s.do("expect", func() error {
		if id.GetDeviceId() != 1 {
			s.t.Errorf("it expects %v", id)
		}
		for name, frozen := range s.frozen {
			if frozen && name != "user" {
				s.t.Errorf("session %s stands still for what can be done later", name)
			}
		}
		return nil
	})
}

func (s *site) Prepare(_ context.Context, m vm.VM, gpu, claim string) (*gpuctlv1.PCIIdentity, error) {
	return &gpuctlv1.PCIIdentity{DeviceId: 1}, s.do("prepare", func() error {
		c := s.cards[gpu]
		if HostOf(gpu) != s.host {
			s.t.Errorf("%s prepared on %s", gpu, s.host)
		}
		if s.claims[claim] != gpu {
			s.t.Errorf("%s prepared without a claim: %v", gpu, s.claims)
		}
		if c.holder != "" && c.holder != m.UUID {
			return fmt.Errorf("%s: %w", gpu, ErrTaken)
		}
		c.holder, c.claim, c.dirty = m.UUID, claim, false
		return nil
	})
}

func (s *site) Attach(_ context.Context, m vm.VM, gpu string, stored bool, at string) error {
	return s.do("attach", func() error {
		c := s.cards[gpu]
		s.alone("plugged in")
		if err := s.here(); err != nil {
			return err
		}
		if stored {
			s.stored = gpu
		}
		if c.plugged == m.UUID {
			return nil
		}
		if c.holder != m.UUID || c.dirty {
			s.t.Errorf("%s plugged in, and it is %+v", gpu, c)
		}
		if at != s.seat && !(at == "" && c.seat == s.seat) { // a host knows where its own card was
			s.t.Errorf("%s is plugged in at %q, and the VM's card was at %s", gpu, at, s.seat)
		}
		c.plugged, c.dirty, c.seat = m.UUID, true, s.seat
		s.released = false
		return nil
	})
}

func (s *site) Detach(_ context.Context, m vm.VM, gpu string) (at string, err error) {
	err = s.do("detach", func() error {
		c := s.cards[gpu]
		at = c.seat
		if s.stored == gpu {
			s.stored = ""
		}
		if c.plugged == "" {
			c.dirty = false
			return nil
		}
		if err := s.here(); err != nil {
			return err
		}
		if !s.released {
			s.t.Errorf("%s is unplugged from a VM that has not let go of it", gpu)
		}
		for id := range s.frozen {
			if s.computes(id, gpu) {
				s.t.Errorf("%s is unplugged while session %s runs", gpu, id)
			}
		}
		c.plugged, c.dirty = "", false
		return nil
	})
	return at, err
}

func (s *site) GiveBack(_ context.Context, m vm.VM, gpu string) error {
	return s.do("giveback", func() error {
		c := s.cards[gpu]
		if c.plugged != "" {
			return fmt.Errorf("%s: the VM has it", gpu)
		}
		if c.holder == m.UUID {
			*c = card{gpu: gpu}
		}
		return nil
	})
}

func (s *site) Move(_ context.Context, _ vm.VM, to string, report Progress) error {
	return s.do("move", func() error {
		if err := s.here(); err != nil {
			return err
		}
		for _, c := range s.cards {
			if c.plugged != "" {
				s.t.Errorf("the VM moves with %s plugged in", c.gpu)
			}
		}
		for id, frozen := range s.frozen {
			if !frozen && s.lent[s.runs[id]] == "" {
				s.t.Errorf("the VM moves while session %s computes on %s, which is lent to nobody", id, s.runs[id])
			}
		}
		if s.down[to] {
			return fmt.Errorf("host %s: %w", to, ErrUnreachable)
		}
		report(1, 1, "")
		for id, state := range s.waits {
			if s.keeps[to][id] != state {
				s.t.Errorf("the VM goes to %s, where state %d of session %s is not: %v", to, state, id, s.keeps)
			}
		}
		if s.stalls {
			s.stalls, s.down[to], s.paused[s.host] = false, true, true // the source says that it moves
			return fmt.Errorf("nothing of it was sent: %w", ErrUnreachable)
		}
		s.partsMove(to)
		s.moves++
		if s.loses { // as libvirt does: there it runs, and here it goes on
			s.loses = false
			if s.locks {
				s.keptOn = map[string]bool{s.host: true}
				s.at = to
				return fmt.Errorf("the connection to %s was lost", to)
			}
			s.twin = to
			if s.cuts != "" {
				s.down[s.cuts] = true
			}
			return fmt.Errorf("the connection to %s was lost: %w", to, ErrUnreachable)
		}
		s.at = to
		return nil
	})
}

func (s *site) Stop(_ context.Context, m vm.VM, gpu string) error {
	return s.do("stop", func() error {
		if !s.defined[s.host] {
			return fmt.Errorf("host %s does not know the VM", s.host)
		}
		if s.at != s.host || s.off {
			return nil
		}
		c := s.cards[gpu]
		if s.off = true; c.plugged != "" && c.plugged != m.UUID {
			s.t.Errorf("stopped with %s, which it has not got", gpu)
		}
		c.plugged = ""
		if p := s.parts[s.host]; p != nil && p.serves {
			*p = worldPart{reserved: true}
		}
		clear(s.frozen)
		clear(s.runs)
		clear(s.waits) // its applications end with it
		if s.stored == gpu {
			s.stored = ""
		}
		return nil
	})
}

func (s *site) Start(_ context.Context, m vm.VM, gpu string, stored bool) error {
	return s.do("start", func() error {
		c := s.cards[gpu]
		switch {
		case !s.off && s.at == s.host: // with this card, or somebody has started it without one
		case !s.off:
			s.t.Errorf("started on %s while it runs on %s", s.host, s.at)
		case !s.defined[s.host]:
			return fmt.Errorf("host %s does not know the VM", s.host)
		case c.holder != m.UUID:
			s.t.Errorf("started with %s, which is held for %q", gpu, c.holder)
		}
		s.at, s.off, c.plugged, c.dirty = s.host, false, m.UUID, true
		if stored {
			s.stored = gpu
		}
		s.onGPU = gpu
		if p := s.parts[s.host]; p != nil && p.reserved {
			*p = worldPart{serves: true, contents: 1}
		}
		return nil
	})
}

func (s *site) Definition(context.Context, vm.VM) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.defined[s.host] {
		return "", errors.New("no such VM")
	}
	return "<domain/>", nil
}

func (s *site) Define(context.Context, vm.VM, string) error {
	return s.do("define", func() error { s.defined[s.host] = true; return nil })
}

func (s *site) Undefine(context.Context, vm.VM) error {
	return s.do("undefine", func() error {
		if s.at == s.host && !s.off {
			s.t.Errorf("undefined on %s, where it runs", s.host)
		}
		delete(s.defined, s.host)
		return nil
	})
}

func (s *site) Sessions(context.Context, vm.VM) (*AgentFacts, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &AgentFacts{Protocol: AwayProtocol, FreeMemory: s.free}
	for id, frozen := range s.frozen {
		if !frozen {
			out.Sessions = append(out.Sessions, SessionFacts{ID: id, Memory: s.sizes[id]})
		}
	}
	if s.dooms != "" {
		s.losing(s.dooms, "its executor has ended")
		s.dooms = ""
	}
	for i := range s.sessions {
		out.Sessions = append(out.Sessions, SessionFacts{ID: fmt.Sprintf("more%s-%d", s.long, i)})
	}
	return out, nil
}

// keep has a host keep a session's state.
func (s *site) keep(host, session string, state int) error {
	if s.down[host] {
		return fmt.Errorf("host %s: %w", host, ErrUnreachable)
	}
	if err := s.fails[host+" keep"]; err != nil {
		return err
	}
	// Both ends look at the record: it must name them.
	if m := s.kept.GetMachine(); host != m.GetFromHost() && host != m.GetToHost() || !slices.Contains(m.GetAway(), session) {
		s.t.Errorf("host %s keeps a state of session %s, and the record says %v", host, session, m)
	}
	if s.keeps[host] == nil {
		s.keeps[host] = map[string]int{}
	}
	s.keeps[host][session] = state
	return nil
}

func (s *site) Freeze(_ context.Context, _ vm.VM, f Freezing, _ Progress) error {
	sessions, away, to := f.Sessions, f.Away, f.To
	return s.do("freeze", func() error {
		if err := requested(slices.Concat(sessions, away)...); err != nil {
			return err
		}
		if err := s.here(); err != nil {
			return err
		}
		room := s.free
		for _, id := range sessions {
			if s.lost[id] != "" {
				continue // there is nothing to be frozen
			}
			if s.lent[s.runs[id]] != "" {
				s.t.Errorf("session %s is frozen on the remote GPU %s", id, s.runs[id])
			}
			if !slices.Contains(away, id) {
				if s.sizes[id] > room {
					return fmt.Errorf("session %s: the VM has no room", id)
				}
				room -= s.sizes[id]
				s.frozen[id] = true
				continue
			}
			state := s.waits[id]
			if !s.frozen[id] {
				s.states++
				state = s.states
			} else if s.keeps[s.host][id] != state {
				s.t.Errorf("session %s waits for state %d, and %s keeps %v", id, state, s.host, s.keeps)
			}
			for _, host := range []string{s.host, to} {
				if err := s.keep(host, id, state); err != nil {
					return err
				}
			}
			s.frozen[id], s.waits[id] = true, state
		}
		return nil
	})
}

func (s *site) Deposit(_ context.Context, _ vm.VM, away []string, to string, _ Progress) error {
	return s.do("deposit", func() error {
		for _, id := range away {
			if state, ok := s.waits[id]; ok {
				if s.keeps[s.host][id] != state {
					s.t.Errorf("%s is to send state %d of session %s, and it keeps %v", s.host, state, id, s.keeps)
				}
				if err := s.keep(to, id, state); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func (s *site) Forget(context.Context, vm.VM) error {
	return s.do("forget", func() error {
		if len(s.waits) > 0 && s.at == s.host {
			s.t.Errorf("%s forgets what sessions wait for: %v", s.host, s.waits)
		}
		delete(s.keeps, s.host)
		return nil
	})
}

func (s *site) Release(_ context.Context, _ vm.VM, gpu string) error {
	return s.do("release", func() error {
		if err := s.here(); err != nil {
			return err
		}
		if len(s.begin) > 0 && s.cards[gpu].plugged != "" {
			s.frozen[s.begin[0]], s.runs[s.begin[0]] = false, gpu
			s.begin = s.begin[1:]
		}
		for id := range s.frozen {
			if s.computes(id, gpu) {
				return fmt.Errorf("session %s uses %s", id, gpu)
			}
		}
		s.released = true
		return nil
	})
}

func (s *site) TakeUp(context.Context, vm.VM, string) error {
	return s.do("takeup", func() error { s.released = false; return s.here() })
}

func (s *site) Await(_ context.Context, m vm.VM, gpu string) error {
	return s.do("await", func() error {
		if s.cards[gpu].plugged != m.UUID || s.released {
			return fmt.Errorf("the VM does not have %s", gpu)
		}
		return s.here()
	})
}

func (s *site) Thaw(_ context.Context, m vm.VM, gpu string, sessions []string, _ Progress) error {
	return s.do("thaw", func() error {
		if err := requested(sessions...); err != nil {
			return err
		}
		s.alone("thawed")
		if err := s.here(); err != nil {
			return err
		}
		if s.cards[gpu].plugged != m.UUID {
			s.t.Errorf("thawed on %s, which the VM does not have", gpu)
		}
		for _, id := range sessions {
			if s.lost[id] != "" {
				continue
			}
			if state, ok := s.waits[id]; ok && s.keeps[s.host][id] != state {
				return fmt.Errorf("session %s waits for state %d, and %s keeps %v", id, state, s.host, s.keeps)
			}
			delete(s.waits, id)
			s.frozen[id], s.runs[id] = false, gpu
		}
		s.onGPU = gpu
		return nil
	})
}

// check compares what is with what the record says.
func (w *world) check(m *clusterv1.Migration) {
	w.t.Helper()
	if m == nil {
		m = &clusterv1.Migration{State: clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK, Machine: w.migration(to).GetMachine()}
	}
	mm := m.GetMachine()
	plugged := []string{}
	for _, c := range w.cards {
		if c.plugged != "" {
			plugged = append(plugged, c.gpu)
		}
	}
	var want string
	switch m.GetState() {
	case clusterv1.MigrationState_MIGRATION_STATE_DONE:
		want = mm.GetToGpu()
		if w.at != mm.GetToHost() {
			w.t.Errorf("done, and the VM is on %s", w.at)
		}
	case clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK:
		want = mm.GetFromGpu()
		if w.at != mm.GetFromHost() {
			w.t.Errorf("rolled back, and the VM is on %s", w.at)
		}
	case clusterv1.MigrationState_MIGRATION_STATE_HELD:
		for _, id := range mm.GetSessions() {
			if on := w.runs[id]; on != "" && !w.frozen[id] && w.lent[on] == "" && (w.far == "" || w.cards[on].plugged == "") {
				w.t.Errorf("held, and session %s is neither frozen nor on a GPU that the VM has: %s", id, on)
			}
			if state, away := w.waits[id]; away && w.keeps[w.at][id] != state {
				w.t.Errorf("held, and state %d of session %s is not where the VM is: %v", state, id, w.keeps)
			}
		}
		return
	default:
		w.t.Errorf("it ended as %s: %s", m.GetState(), m.GetMessage())
		return
	}
	if !slices.Equal(plugged, []string{want}) || w.onGPU != want {
		w.t.Errorf("%s: the VM has %v and runs on %s, not %s", m.GetState(), plugged, w.onGPU, want)
	}
	if w.cold && w.off {
		w.t.Errorf("%s: the VM does not run", m.GetState())
	}
	if w.cold {
		w.checkDefined(m)
	}
	if w.stored != want {
		w.t.Errorf("%s: the stored definition has %q, not %s", m.GetState(), w.stored, want)
	}
	for id, frozen := range w.frozen {
		if frozen != (id == "user") {
			w.t.Errorf("%s: session %s frozen: %v", m.GetState(), id, frozen)
		}
	}
	for id, on := range w.runs {
		if on != want && !w.frozen[id] && !w.cold {
			w.t.Errorf("%s: session %s is on %s, not %s", m.GetState(), id, on, want)
		}
	}
	for gpu, claim := range w.lent {
		if host := HostOf(gpu); w.fails[host+" endlend"] == nil && !w.down[host] {
			w.t.Errorf("%s: %s is still lent to claim %s", m.GetState(), gpu, claim)
		}
		delete(w.claims, claim)
	}
	for _, c := range w.cards {
		if c.gpu != want && c.holder != "" {
			w.t.Errorf("%s: %s is still held for %s", m.GetState(), c.gpu, c.holder)
		}
	}
	if len(w.claims) != 1 || w.claims[w.cards[want].claim] != want {
		w.t.Errorf("%s: claims %v", m.GetState(), w.claims)
	}
	// What a host could not be told to forget goes when it sees the end.
	for host, states := range w.keeps {
		if w.fails[host+" forget"] == nil && !w.down[host] && len(states) > 0 {
			w.t.Errorf("%s: %s still keeps %v", m.GetState(), host, states)
		}
	}
	w.checkParts(m)
	if strings.Contains(m.GetStep(), " ") || m.GetStep() != "" {
		w.t.Errorf("step %q after the end", m.GetStep())
	}
}
