package cuda

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/internal/wait"
)

// session is a job whose processes use CUDA.
type session struct {
	m   *Manager
	id  string
	log *slog.Logger

	mu      sync.Mutex
	rec     record
	state   gpuctlv1.SessionState
	message string
	op      *operation
	begun   int // operations
	ended   bool
	silent  bool // has no journal: a canary's
}

// update changes the record and writes it.
func (s *session) update(change func(*record)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.rec)
	if s.silent {
		return nil
	}
	return s.rec.write(s.m.cfg.Dir)
}

// commit commits the session's operation. If that can't be journalled, the record is as before,
// and what takes the operation back writes it before it does anything.
func (s *session) commit() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	before, op := s.rec, *s.rec.Op
	s.rec.Op.Committed = true
	s.rec.settle()
	if s.silent {
		return nil
	}
	err := s.rec.write(s.m.cfg.Dir)
	if err != nil {
		s.rec = before
		*s.rec.Op = op
	}
	return err
}

func (s *session) set(state gpuctlv1.SessionState, message string) {
	s.mu.Lock()
	s.state, s.message = state, message
	s.mu.Unlock()
	s.m.changed(s)
}

// remember keeps that the session is lost, also for the time after the end of its processes.
func (s *session) remember(lost error) {
	if s.silent {
		return
	}
	if err := s.m.losses.Add(s.snapshot(), lost.Error()); err != nil {
		s.log.Warn("the next gpuguest will not know that this session was lost", "err", err)
	}
}

// members returns them. They change only while an operation is prepared.
func (s *session) members() []*member {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.rec.Members)
}

// has reports whether a process is a member, or the root. An operation that makes processes again
// gives them other start times.
func (s *session) has(pid int, start uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.PID == pid && s.rec.Start == start ||
		slices.ContainsFunc(s.rec.Members, func(mb *member) bool { return mb.PID == pid && mb.Start == start })
}

// snapshot returns the session as the API has it.
func (s *session) snapshot() *gpuctlv1.Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &s.rec
	out := &gpuctlv1.Session{
		Id: s.id, Claim: r.Claim, Pid: uint32(r.PID), Command: r.Command, State: s.state, StartedUnixMs: r.StartedMS,
		Message: s.message, Generation: r.Generation, SuspendedTo: r.SuspendedTo, Engine: engineName,
		Usage: &gpuctlv1.Usage{}, Driver: &gpuctlv1.DriverState{DriverVersion: r.Driver},
	}
	if s.ended {
		out.State = gpuctlv1.SessionState_SESSION_STATE_ENDED
	}
	if len(r.Target) > 0 {
		out.Target = targetOf(r.Target)
	} else {
		out.Target = &gpuctlv1.Target{}
	}
	for _, g := range r.GPUs {
		out.Driver.Gpus = append(out.Driver.Gpus, g.proto())
		out.Usage.Memory += g.Used
	}
	out.Target.Driver = out.Driver.Gpus
	if out.Target.Model == "" && len(r.GPUs) > 0 {
		out.Target.Model = r.GPUs[0].Name
	}
	if r.SuspendedTo != "" {
		out.Driver.HostMemory = out.Usage.Memory
	}
	for _, mb := range r.Members {
		p := &gpuctlv1.DriverProcess{Pid: uint32(mb.PID), Parent: uint32(mb.Parent), Start: mb.Start, Command: mb.Command, State: string(mb.state)}
		for i, u := range mb.Uses {
			p.Gpus = append(p.Gpus, &gpuctlv1.DriverGPU{Uuid: string(u), Used: mb.Used[i]})
		}
		out.Driver.Processes = append(out.Driver.Processes, p)
	}
	if !slices.ContainsFunc(r.Members, func(mb *member) bool { return mb.PID == r.PID }) {
		out.Driver.Processes = append([]*gpuctlv1.DriverProcess{{Pid: uint32(r.PID), Start: r.Start, Command: r.Command}}, out.Driver.Processes...)
	}
	return out
}

func (g gpu) proto() *gpuctlv1.DriverGPU {
	return &gpuctlv1.DriverGPU{Uuid: string(g.UUID), PciAddress: g.Address, PciDevice: g.Chip, Model: g.Name, Used: g.Used}
}

// gpusOf returns the GPUs that members have memory on, and gives the members their slots.
// GPUs that the session had keep their order, which is that of its target's; new ones follow
// in the order of their UUIDs.
func gpusOf(c *machine, members []*member, had []gpu) []gpu {
	used := map[ask.UUID]uint64{}
	for _, mb := range members {
		for i, u := range mb.Uses {
			used[u] += mb.Used[i]
		}
	}
	var order []ask.UUID
	for _, g := range had {
		if _, ok := used[g.UUID]; ok {
			order = append(order, g.UUID)
		}
	}
	for _, u := range slices.Sorted(maps.Keys(used)) {
		if !slices.Contains(order, u) {
			order = append(order, u)
		}
	}
	var gs []gpu
	for _, u := range order {
		g := gpu{UUID: u, Used: used[u]}
		if have := c.gpu(u); have != nil {
			g.Address, g.Chip, g.Name = have.Address, have.Chip, have.Name
		}
		gs = append(gs, g)
	}
	for _, mb := range members {
		mb.Slots = make([]int, len(mb.Uses))
		for i, u := range mb.Uses {
			mb.Slots[i] = slices.IndexFunc(gs, func(g gpu) bool { return g.UUID == u })
		}
	}
	return gs
}

// watchAgain is how long it takes until processes are looked at again that could not be.
const watchAgain = time.Second

// watch waits for the end of the session's processes, and then ends the session.
func (s *session) watch() {
	said := false
	for {
		s.mu.Lock()
		all := [][2]uint64{{uint64(s.rec.PID), s.rec.Start}}
		for _, mb := range s.rec.Members {
			all = append(all, [2]uint64{uint64(mb.PID), mb.Start})
		}
		s.mu.Unlock()
		var alive *holders.Pinned
		var unknown error // of one that can't be looked at, for lack of descriptors
		for _, id := range all {
			p, err := holders.Pin(int(id[0]), id[1])
			if err == nil {
				alive = p
				break
			}
			if !errors.Is(err, holders.ErrGone) {
				unknown = err
			}
		}
		if alive == nil && unknown != nil {
			if !said {
				s.log.Warn("it is not known whether the session has ended", "err", unknown)
			}
			said = true
			if wait.For(s.m.ctx, watchAgain) != nil {
				return
			}
			continue
		}
		if alive == nil {
			break
		}
		select {
		case <-alive.Done():
			alive.Close()
		case <-s.m.ctx.Done():
			alive.Close()
			return
		}
	}
	s.mu.Lock()
	s.ended = true
	op := s.op
	s.mu.Unlock()
	if op != nil {
		op.GiveUp()
		<-op.Done()
	}
	s.m.remove(s)
}

// suspendedText is the message of a suspended session.
func suspendedText(r *record) string {
	var n uint64
	for _, g := range r.GPUs {
		n += g.Used
	}
	return fmt.Sprintf("the state, about %s, is in the memory of its processes", size(n))
}
