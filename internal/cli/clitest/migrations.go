package clitest

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
)

// Migrations implements MigrationService. It changes the VMs and cards, and records
// migrations in the cluster. A VM has one migration at a time. After a failed step, all
// steps before it are undone. What is committed is not undone. Only a running migration
// can be aborted, and only a held one can be resumed. Its steps take no time; their
// reported times are 1.1 times the predicted ones.
type Migrations struct {
	gpuctlv1connect.UnimplementedMigrationServiceHandler

	m    *Machines
	ctx  context.Context // migrations go on after the calls that begin them
	stop context.CancelFunc
	wait sync.WaitGroup

	// Guarded by the lock of Machines.
	next  int
	jobs  map[string]*job
	fails map[string]string                      // message by step; used once
	stuck map[string]string                      // message by step whose undo fails; used once
	holds map[string]chan struct{}               // steps that wait for Go
	most  int                                    // most migrations at a time; 0: not limited
	cuda  map[string][]*gpuctlv1.OperationUpdate // by VM: how the rehearsal of each of its CUDA programs ends
	loses []*gpuctlv1.LostSession                // by the next migration
}

type job struct {
	rec      *clusterv1.Migration
	vm       *gpuctlv1.Machine
	rest     []*gpuctlv1.MachineCandidate // candidates; the first one is tried now
	done     []string
	clock    time.Duration
	abort    bool
	said     []*gpuctlv1.MachineProgress
	changed  chan struct{}
	steps    []*gpuctlv1.MachineStep
	frozenAt time.Duration
	stopped  time.Duration
	why      string
}

func (s *Migrations) init(m *Machines) {
	s.m, s.jobs, s.cuda = m, map[string]*job{}, map[string][]*gpuctlv1.OperationUpdate{}
	s.fails, s.stuck, s.holds = map[string]string{}, map[string]string{}, map[string]chan struct{}{}
	s.ctx, s.stop = context.WithCancel(context.Background())
}

func (s *Migrations) close() {
	s.stop()
	s.wait.Wait()
}

// FailAt makes the next attempt of a step fail.
func (m *Machines) FailAt(step, message string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.moves.fails[step] = message
}

// StickAt makes the next undo of a step fail, so that the migration is held.
func (m *Machines) StickAt(step, message string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.moves.stuck[step] = message
}

// Lose makes the next migration lose a session.
func (m *Machines) Lose(session, reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.moves.loses = append(m.moves.loses, &gpuctlv1.LostSession{Id: session, Command: "train", Reason: reason})
}

// PauseAt makes a step wait until Go.
func (m *Machines) PauseAt(step string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.moves.holds[step] = make(chan struct{})
}

// Go continues a step that waits.
func (m *Machines) Go(step string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.moves.holds[step] == nil {
		panic("step " + step + " does not wait")
	}
	close(m.moves.holds[step])
	delete(m.moves.holds, step)
}

// Most limits how many migrations run at a time.
func (m *Machines) Most(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.moves.most = n
}

// costs returns the predicted time of a step.
func costs(name string) time.Duration {
	ms := map[string]int{
		"reserve": 100, "prepare": 2000, "freeze": 500, "release": 300, "detach": 1200, "move": 30000, "attach": 1000, "await": 2000, "thaw": 1000,
		"commit": 100, "clean": 2000,
	}[name]
	return time.Duration(ms) * time.Millisecond
}

// words returns in words what a step does, and what its undo does.
func words(name string) (what, undo string) {
	w := map[string][2]string{
		"reserve": {"bind a claim", "the claim is released"},
		"prepare": {"take the card from its driver", "it is returned"},
		"freeze":  {"stop the applications", "they go on where they were"},
		"release": {"have the VM release its card", "it takes it up again"},
		"detach":  {"detach the card", "it is attached again"},
		"move":    {"migrate the VM live", "it is migrated back"},
		"attach":  {"attach the card", "it is detached"},
		"await":   {"wait until the VM has found it", ""},
		"thaw":    {"let the applications go on", "they are frozen again"},
		"commit":  {"record that it is done", ""},
		"clean":   {"return the old card", ""},
	}[name]
	return w[0], w[1]
}

func stepsOf(vm *gpuctlv1.Machine, host, gpu string) []*gpuctlv1.MachineStep {
	var names []string
	if gpu != "" {
		names = []string{"reserve", "prepare", "freeze", "release", "detach"}
	}
	if host != vm.GetHost() {
		names = append(names, "move")
	}
	if gpu != "" {
		names = append(names, "attach", "await", "thaw")
	}
	names = append(names, "commit")
	if gpu != "" {
		names = append(names, "clean")
	}
	var out []*gpuctlv1.MachineStep
	for _, name := range names {
		s := &gpuctlv1.MachineStep{Name: name, PredictedNs: int64(costs(name))}
		s.What, s.Undo = words(name)
		switch name {
		case "freeze", "thaw":
			s.Bytes = 64 << 20
		case "move":
			s.Bytes = vm.GetMemory()
		}
		out = append(out, s)
	}
	return out
}

// Plan implements the RPC.
func (s *Migrations) Plan(_ context.Context, r *connect.Request[gpuctlv1.MachinePlanRequest]) (*connect.Response[gpuctlv1.MachinePlanResponse], error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	_, res, err := s.plan(r.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

type reasons []*gpuctlv1.Reason

func (r *reasons) add(is bool, code, format string, args ...any) {
	if is {
		*r = append(*r, &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)})
	}
}

func (s *Migrations) running() (n int) {
	for _, j := range s.jobs {
		if j.rec.GetState() == clusterv1.MigrationState_MIGRATION_STATE_RUNNING {
			n++
		}
	}
	return n
}

// plan makes a plan. The caller holds the lock.
func (s *Migrations) plan(r *gpuctlv1.MachinePlanRequest) (*gpuctlv1.Machine, *gpuctlv1.MachinePlanResponse, error) {
	if !slices.Contains([]string{"migrate", "upgrade", "downgrade"}, r.GetVerb()) {
		return nil, nil, fail(connect.CodeInvalidArgument, "invalid: verb %q", r.GetVerb())
	}
	vm, err := s.m.machine(r.GetHost(), r.GetMachine())
	if err != nil {
		return nil, nil, err
	}
	res := &gpuctlv1.MachinePlanResponse{Machine: vm.GetName(), Host: vm.GetHost(), Gpus: slices.Clone(vm.GetGpus())}
	var why reasons
	for _, id := range sortedKeys(s.jobs) {
		j := s.jobs[id]
		state := j.rec.GetState()
		why.add(j.vm == vm && (state == clusterv1.MigrationState_MIGRATION_STATE_RUNNING || state == clusterv1.MigrationState_MIGRATION_STATE_HELD), "migration_running",
			"migration %s of VM %s runs already: gpuctl describe migration %s shows how far it is", id, vm.GetName(), id)
	}
	why.add(vm.GetState() != "running", "not_running", "VM %s is %s: only a running VM can be moved with its applications", vm.GetName(), vm.GetState())
	why.add(len(vm.GetGpus()) > 1, "several_gpus", "VM %s has %d GPUs; only VMs with one can be moved", vm.GetName(), len(vm.GetGpus()))
	why.add(len(vm.GetGpus()) == 0 && r.GetVerb() != "migrate", "no_gpu", "VM %s has no GPU that could be exchanged: gpuctl attach %s gives it one", vm.GetName(), vm.GetName())
	why.add(len(vm.GetGpus()) > 0 && noAgent(vm), "agent_absent", "no gpuguest answers in VM %s: install it there", vm.GetName())
	res.Reasons = why
	if len(vm.GetGpus()) > 0 && !noAgent(vm) {
		res.Sessions, res.GpuState, res.Away = 2, 64<<20, 48<<20
	}
	for _, h := range hostsOf(s.m.c) {
		s.judge(r, vm, h, res)
	}
	res.Live = meanwhile(r, vm)
	slices.SortStableFunc(res.Candidates, func(a, b *gpuctlv1.MachineCandidate) int {
		return cmp.Compare(s.rank(b.GetGpu()), s.rank(a.GetGpu()))
	})
	if r.GetVerb() == "downgrade" {
		slices.Reverse(res.Candidates)
	}
	return vm, res, nil
}

// meanwhile is about the remote GPU of a VM's applications: h3 lends one, to whoever asks for
// it. By default this cluster's hosts have no lock manager.
func meanwhile(r *gpuctlv1.MachinePlanRequest, vm *gpuctlv1.Machine) *gpuctlv1.MachineLive {
	if len(vm.GetGpus()) == 0 || noAgent(vm) || r.GetLive() != "always" {
		return nil
	}
	if r.GetTo() == "h3" { // which lends none of what it is to give for good
		return &gpuctlv1.MachineLive{
			Reasons:  []*gpuctlv1.Reason{{Code: "no_remote_gpu", Message: "no GPU of the cluster can be lent to VM " + vm.GetName() + " meanwhile"}},
			Rejected: []*gpuctlv1.MachineRejection{{Host: "h2", Gpu: "h2/r", Model: "L4", Reasons: []*gpuctlv1.Reason{{Code: "taken", Message: "h2/r belongs to a claim"}}}},
		}
	}
	return &gpuctlv1.MachineLive{Gpu: "h3/r", Model: "L40", RttNs: 300_000, OtherwiseStopNs: 36_000_000_000}
}

func hostsOf(c *Cluster) (out []*clusterv1.Host) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range all[*clusterv1.Host](c, clusterv1.Kind_KIND_HOST) {
		out = append(out, proto.CloneOf(h))
	}
	return out
}

func (s *Migrations) rank(gpu string) uint32 {
	g, err := look[*clusterv1.GPU](s.m.c, clusterv1.Kind_KIND_GPU, gpu)
	if err != nil {
		return 0
	}
	return g.GetRank()
}

// judge adds a host to a plan.
func (s *Migrations) judge(r *gpuctlv1.MachinePlanRequest, vm *gpuctlv1.Machine, h *clusterv1.Host, res *gpuctlv1.MachinePlanResponse) {
	var why reasons
	here, to := h.GetName() == vm.GetHost(), r.GetTo()
	why.add(here && r.GetVerb() == "migrate" && !strings.HasPrefix(to, h.GetName()+"/"), "same_host", "VM %s is on host %s already", vm.GetName(), h.GetName())
	why.add(!here && r.GetVerb() != "migrate", "same_host", "%s leaves VM %s on host %s: gpuctl migrate moves it", r.GetVerb(), vm.GetName(), vm.GetHost())
	if len(why) == 0 && !here {
		why.add(h.GetState() != clusterv1.HostState_HOST_STATE_READY, "host_state", "host %s is not ready", h.GetName())
		why.add(s.most > 0 && s.running() >= s.most, "too_many_migrations", "%d migrations run already, and no more than %d may", s.running(), s.most)
	}
	if len(why) > 0 {
		res.Rejected = append(res.Rejected, &gpuctlv1.MachineRejection{Host: h.GetName(), Reasons: why})
		return
	}
	offer := func(gpu, model string) {
		c := &gpuctlv1.MachineCandidate{Host: h.GetName(), Gpu: gpu, Model: model, Steps: stepsOf(vm, h.GetName(), gpu)}
		for _, step := range c.GetSteps() {
			c.PredictedNs += step.GetPredictedNs()
			c.Bytes += step.GetBytes()
			if gpu != "" && !slices.Contains([]string{"reserve", "prepare", "commit", "clean"}, step.GetName()) {
				c.PredictedStopNs += step.GetPredictedNs()
			}
		}
		why.add(to != "" && to != gpu && to != model && to != h.GetName(), "model", "it is not %s", to)
		why.add(r.GetDeadlineMs() > 0 && c.GetPredictedNs() > r.GetDeadlineMs()*1e6, "link_slow", "it would take about %v, and the deadline is %v",
			time.Duration(c.GetPredictedNs()), time.Duration(r.GetDeadlineMs())*time.Millisecond)
		if len(why) > 0 {
			res.Rejected = append(res.Rejected, &gpuctlv1.MachineRejection{Host: h.GetName(), Gpu: gpu, Model: model, Reasons: why})
			return
		}
		res.Candidates = append(res.Candidates, c)
	}
	if len(vm.GetGpus()) == 0 {
		offer("", "")
		return
	}
	own := vm.GetGpus()[0]
	for _, id := range sortedKeys(s.m.cards) {
		card := s.m.cards[id]
		if !strings.HasPrefix(id, h.GetName()+"/") || id == own {
			continue
		}
		why = nil
		why.add(r.GetVerb() == "upgrade" && s.rank(id) <= s.rank(own), "model", "%s is no higher model", card.GetModel())
		why.add(r.GetVerb() == "downgrade" && s.rank(id) >= s.rank(own), "model", "%s is no lower model", card.GetModel())
		why.add(card.GetMachine() != "", "taken", "%s belongs to VM %s", id, card.GetMachineName())
		why.add(card.GetPhase() == gpuctlv1.CardPhase_CARD_PHASE_QUARANTINED, "health", "%s is not fit: it is quarantined", id)
		offer(id, card.GetModel())
	}
}

// Start implements the RPC.
func (s *Migrations) Start(ctx context.Context, r *connect.Request[gpuctlv1.MachineStartRequest], out *connect.ServerStream[gpuctlv1.MachineProgress]) error {
	if err := s.m.operates(); err != nil {
		return err
	}
	vm, p, err := s.plan(r.Msg.GetPlan())
	switch {
	case err != nil:
		s.m.mu.Unlock()
		return err
	case len(p.GetReasons()) > 0 || len(p.GetCandidates()) == 0:
		s.m.mu.Unlock()
		return out.Send(&gpuctlv1.MachineProgress{Refused: p})
	}
	j := s.begin(vm, r.Msg.GetPlan().GetVerb(), p)
	s.m.mu.Unlock()
	if r.Msg.GetNoWait() {
		return out.Send(&gpuctlv1.MachineProgress{Id: j.rec.GetId(), Steps: uint32(len(j.steps)), PredictedNs: j.rest[0].GetPredictedNs()})
	}
	return s.tell(ctx, j, 0, out)
}

// begin records a migration and starts it. The caller holds the lock.
func (s *Migrations) begin(vm *gpuctlv1.Machine, verb string, p *gpuctlv1.MachinePlanResponse) *job {
	s.next++
	best := p.GetCandidates()[0]
	j := &job{vm: vm, rest: p.GetCandidates(), changed: make(chan struct{}), steps: best.GetSteps()}
	j.rec = &clusterv1.Migration{
		Id: fmt.Sprintf("m-%d", s.next), Verb: verb, Object: vm.GetUuid(), From: vm.GetHost(), To: best.GetHost(), Driver: vm.GetHost(),
		State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING, StartedUnixMs: time.Now().UnixMilli(),
		Machine: &clusterv1.MachineMove{
			Uuid: vm.GetUuid(), Name: vm.GetName(), FromHost: vm.GetHost(), ToHost: best.GetHost(), ToGpu: best.GetGpu(),
			PredictedNs: best.GetPredictedNs(), PredictedStopNs: best.GetPredictedStopNs(),
		},
	}
	if len(vm.GetGpus()) > 0 {
		j.rec.Machine.FromGpu, j.rec.Machine.Sessions = vm.GetGpus()[0], []string{"s-1", "s-2"}
		j.rec.From, j.rec.To = vm.GetGpus()[0], best.GetGpu()
	}
	for _, c := range j.rest[1:] {
		j.rec.Machine.Candidates = append(j.rec.Machine.Candidates, c.GetGpu())
	}
	s.jobs[j.rec.GetId()] = j
	s.m.c.Put(j.rec)
	s.wait.Go(func() { s.drive(j) })
	return j
}

// say passes progress to those who watch. The caller holds the lock.
func (s *Migrations) say(j *job, u *gpuctlv1.MachineProgress) {
	u.Id, u.Steps, u.Gpu = j.rec.GetId(), uint32(len(j.steps)), j.rec.GetMachine().GetToGpu()
	u.TookNs, u.PredictedNs = int64(j.clock), j.rec.GetMachine().GetPredictedNs()
	j.said = append(j.said, u)
	s.m.c.Put(j.rec)
	close(j.changed)
	j.changed = make(chan struct{})
}

// tell sends the progress from an index on.
func (s *Migrations) tell(ctx context.Context, j *job, at int, out *connect.ServerStream[gpuctlv1.MachineProgress]) error {
	for {
		s.m.mu.Lock()
		fresh, changed := slices.Clone(j.said[at:]), j.changed
		s.m.mu.Unlock()
		s.m.c.mu.Lock()
		dropped := s.m.c.dropped
		s.m.c.mu.Unlock()
		for _, u := range fresh {
			at++
			if err := out.Send(u); err != nil || u.GetEnd() != "" {
				return err
			}
		}
		select {
		case <-changed:
		case <-dropped:
			return fail(connect.CodeUnavailable, "hostd is stopping")
		case <-ctx.Done():
			return ctx.Err()
		case <-s.ctx.Done():
			return fail(connect.CodeUnavailable, "hostd is stopping")
		}
	}
}

// drive does the steps and, after a failure, their undos.
func (s *Migrations) drive(j *job) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	for len(j.done) < len(j.steps) && !j.rec.GetMachine().GetUndoing() {
		i := len(j.done)
		step := j.steps[i]
		u := &gpuctlv1.MachineProgress{Step: step.GetName(), StepIndex: uint32(i + 1), BytesTotal: step.GetBytes()}
		j.rec.Step = step.GetName()
		s.say(j, u)
		if hold := s.holds[step.GetName()]; hold != nil {
			s.m.mu.Unlock()
			select {
			case <-hold:
			case <-s.ctx.Done():
				s.m.mu.Lock()
				return
			}
			s.m.mu.Lock()
		}
		err := s.step(j, step)
		if err == nil && j.abort {
			err = fmt.Errorf("aborted by an operator")
		}
		if err != nil {
			s.turn(j, step.GetName(), err)
			break
		}
		j.done = append(j.done, step.GetName())
		j.rec.Done = slices.Clone(j.done)
	}
	if j.rec.GetMachine().GetUndoing() {
		if s.back(j) {
			s.wait.Go(func() { s.drive(j) })
		}
		return
	}
	s.finish(j, clusterv1.MigrationState_MIGRATION_STATE_DONE, "done", "")
}

// step does one step. Its effect on the VM and the cards stays even if it fails
// afterwards, and is undone with the other steps.
func (s *Migrations) step(j *job, step *gpuctlv1.MachineStep) error {
	if m, ok := s.fails[step.GetName()]; ok {
		delete(s.fails, step.GetName())
		s.record(j, step, false, m)
		return fmt.Errorf("%s: %s", step.GetName(), m)
	}
	if step.GetName() == "freeze" {
		j.frozenAt = j.clock
	}
	s.record(j, step, false, "")
	if step.GetName() == "thaw" {
		j.stopped = j.clock - j.frozenAt
	}
	return s.effect(j, step.GetName(), j.rec.GetMachine().GetFromGpu(), j.rec.GetMachine().GetToGpu(), j.rec.GetMachine().GetToHost())
}

func (s *Migrations) effect(j *job, name, from, to, host string) error {
	switch name {
	case "reserve":
		return s.m.give(to, j.vm)
	case "detach":
		j.vm.Gpus = nil
	case "move":
		if len(j.vm.GetGpus()) > 0 {
			panic("a VM was migrated with its card")
		}
		j.vm.Host = host
	case "attach":
		if len(j.vm.GetGpus()) > 0 {
			panic("a VM got a second card")
		}
		j.vm.Gpus = []string{to}
	case "clean":
		s.m.takeBack(from)
	}
	return nil
}

// record adds a step to the record, with its time.
func (s *Migrations) record(j *job, step *gpuctlv1.MachineStep, undo bool, wrong string) {
	took := time.Duration(step.GetPredictedNs()) * 11 / 10
	j.rec.Steps = append(j.rec.Steps, &clusterv1.MigrationStep{
		Name: step.GetName(), StartedUnixNs: j.rec.GetStartedUnixMs()*1e6 + int64(j.clock), TookNs: int64(took), Bytes: step.GetBytes(), Undo: undo, Error: wrong,
	})
	j.clock += took
	j.rec.Bytes += step.GetBytes()
}

func (s *Migrations) turn(j *job, step string, err error) {
	m := j.rec.GetMachine()
	m.Undoing, m.Failed, j.why = true, step, err.Error()
	j.rec.Message = j.why
	if !slices.Contains(j.done, step) && s.stepDone(j, step) {
		j.done = append(j.done, step)
	}
}

// stepDone reports whether a step has had its effect although it has failed.
func (s *Migrations) stepDone(j *job, step string) bool {
	last := j.rec.GetSteps()[len(j.rec.GetSteps())-1]
	return last.GetName() == step && last.GetError() == ""
}

// back undoes the steps, last first. again reports that another candidate is tried.
func (s *Migrations) back(j *job) (again bool) {
	m := j.rec.GetMachine()
	for len(j.done) > 0 {
		i := len(j.done) - 1
		name := j.done[i]
		step := j.steps[slices.IndexFunc(j.steps, func(x *gpuctlv1.MachineStep) bool { return x.GetName() == name })]
		j.rec.Step = name
		if step.GetUndo() != "" {
			s.say(j, &gpuctlv1.MachineProgress{Step: name, Undo: true, StepIndex: uint32(i + 1), Message: j.why})
			wrong := s.stuck[name]
			delete(s.stuck, name)
			s.record(j, step, true, wrong)
			if wrong != "" {
				s.finish(j, clusterv1.MigrationState_MIGRATION_STATE_HELD, "held", fmt.Sprintf("%s; the undo of %s failed: %s", j.why, name, wrong))
				return false
			}
		}
		s.uneffect(j, name)
		j.done = j.done[:i]
		j.rec.Done = slices.Clone(j.done)
	}
	if (m.GetFailed() == "prepare" || m.GetFailed() == "reserve") && !j.abort && len(j.rest) > 1 {
		j.rest = j.rest[1:]
		m.Undoing, m.Failed, m.ToGpu, m.ToHost, m.Candidates = false, "", j.rest[0].GetGpu(), j.rest[0].GetHost(), m.GetCandidates()[1:]
		j.rec.To = m.GetToGpu()
		return true
	}
	s.finish(j, clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK, "rolled_back", j.why)
	return false
}

func (s *Migrations) uneffect(j *job, name string) {
	m := j.rec.GetMachine()
	switch name {
	case "reserve":
		s.m.takeBack(m.GetToGpu())
	case "detach":
		j.vm.Gpus = []string{m.GetFromGpu()}
	case "move":
		j.vm.Host = m.GetFromHost()
	case "attach":
		j.vm.Gpus = nil
	case "freeze":
		j.stopped = j.clock - j.frozenAt
	}
}

func (s *Migrations) finish(j *job, state clusterv1.MigrationState, end, message string) {
	j.rec.State, j.rec.Message, j.rec.Step, j.rec.StoppedNs = state, message, "", int64(j.stopped)
	j.rec.EndedUnixMs = j.rec.GetStartedUnixMs() + j.clock.Milliseconds()
	j.rec.Machine.Lost, s.loses = append(j.rec.GetMachine().GetLost(), s.loses...), nil
	s.say(j, &gpuctlv1.MachineProgress{End: end, Message: message, StoppedNs: int64(j.stopped), Lost: j.rec.GetMachine().GetLost()})
}

// find returns a migration by its complete id.
func (s *Migrations) find(id string) (*job, error) {
	if j := s.jobs[id]; j != nil {
		return j, nil
	}
	return nil, fail(connect.CodeNotFound, "not found: there is no migration %q", id)
}

// Watch implements the RPC.
func (s *Migrations) Watch(ctx context.Context, r *connect.Request[gpuctlv1.MachineWatchRequest], out *connect.ServerStream[gpuctlv1.MachineProgress]) error {
	s.m.mu.Lock()
	j, err := s.find(r.Msg.GetId())
	at := 0
	if err == nil {
		at = max(0, len(j.said)-1)
	}
	s.m.mu.Unlock()
	if err != nil {
		return err
	}
	return s.tell(ctx, j, at, out)
}

// Abort implements the RPC.
func (s *Migrations) Abort(_ context.Context, r *connect.Request[gpuctlv1.MachineAbortRequest]) (*connect.Response[gpuctlv1.MachineAbortResponse], error) {
	if err := s.m.operates(); err != nil {
		return nil, err
	}
	defer s.m.mu.Unlock()
	j, err := s.find(r.Msg.GetId())
	switch {
	case err != nil:
		return nil, err
	case j.rec.GetState() != clusterv1.MigrationState_MIGRATION_STATE_RUNNING:
		return nil, fail(connect.CodeFailedPrecondition, "refused: migration %s is %s", r.Msg.GetId(), strings.ReplaceAll(stateWord(j.rec.GetState()), "_", " "))
	case slices.Contains(j.done, "commit"):
		return nil, fail(connect.CodeFailedPrecondition, "refused: migration %s is committed, there is no way back", r.Msg.GetId())
	}
	j.abort = true
	j.rec.Machine.Aborting = true
	s.m.c.Put(j.rec)
	return connect.NewResponse(&gpuctlv1.MachineAbortResponse{Message: "after step " + j.rec.GetStep()}), nil
}

// Resume implements the RPC.
func (s *Migrations) Resume(_ context.Context, r *connect.Request[gpuctlv1.MachineResumeRequest]) (*connect.Response[gpuctlv1.MachineResumeResponse], error) {
	if err := s.m.operates(); err != nil {
		return nil, err
	}
	defer s.m.mu.Unlock()
	j, err := s.find(r.Msg.GetId())
	switch {
	case err != nil:
		return nil, err
	case j.rec.GetState() != clusterv1.MigrationState_MIGRATION_STATE_HELD:
		return nil, fail(connect.CodeFailedPrecondition, "refused: migration %s is %s, only one that is held can be resumed", r.Msg.GetId(), strings.ReplaceAll(stateWord(j.rec.GetState()), "_", " "))
	}
	j.rec.State, j.said = clusterv1.MigrationState_MIGRATION_STATE_RUNNING, nil
	j.rec.EndedUnixMs = 0
	s.m.c.Put(proto.CloneOf(j.rec))
	s.wait.Go(func() { s.drive(j) })
	return connect.NewResponse(&gpuctlv1.MachineResumeResponse{Message: "it is gone back"}), nil
}
