package clitest

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// Machines has the VMs and cards of a Cluster's hosts, and implements DeviceService and
// MigrationService. A card belongs to one VM at a time, a card in use is not reset, and
// no card is taken from a VM that has not confirmed it. Make one with NewMachines.
type Machines struct {
	gpuctlv1connect.UnimplementedDeviceServiceHandler

	c    *Cluster
	here string

	mu       sync.Mutex
	cards    map[string]*gpuctlv1.Card // by id in the inventory
	vms      map[string]*gpuctlv1.Machine
	verdicts map[string]*gpuctlv1.IsolationResponse
	missing  map[string]bool            // hosts that do not answer
	nics     map[string][]*gpuctlv1.NIC // by host
	moves    Migrations
}

// NewMachines returns the VMs and cards of a cluster. The host here is the one that is
// asked.
func NewMachines(c *Cluster, here string) *Machines {
	m := &Machines{
		c: c, here: here, cards: map[string]*gpuctlv1.Card{}, vms: map[string]*gpuctlv1.Machine{},
		verdicts: map[string]*gpuctlv1.IsolationResponse{}, missing: map[string]bool{}, nics: map[string][]*gpuctlv1.NIC{},
	}
	m.moves.init(m)
	return m
}

// Handle adds both services to a mux.
func (m *Machines) Handle(mux *http.ServeMux) {
	mux.Handle(gpuctlv1connect.NewDeviceServiceHandler(m))
	mux.Handle(gpuctlv1connect.NewMigrationServiceHandler(&m.moves))
}

// Close ends operations in progress.
func (m *Machines) Close() { m.moves.close() }

// AddCard adds a free card to a host and to the inventory.
func (m *Machines) AddCard(host string, card *gpuctlv1.Card, rank uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if card.GetPhase() == 0 {
		card.Phase = gpuctlv1.CardPhase_CARD_PHASE_FREE
	}
	id := host + "/" + card.GetGpu()
	m.cards[id] = card
	m.c.Put(&clusterv1.GPU{
		Id: id, Host: host, Name: card.GetGpu(), Model: card.GetModel(), Rank: rank, Type: "gpu", PciAddress: card.GetAddress(), Present: true, Free: true,
		NumaNode: -1, Health: clusterv1.Health_HEALTH_OK, FreeMemory: card.GetMemory(), Limits: &gpuctlv1.Limits{GlobalMemory: card.GetMemory()},
	})
}

// AddMachine starts a VM. Its GPUs, by name, must be free cards of its host.
func (m *Machines) AddMachine(vm *gpuctlv1.Machine) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.vms[vm.GetUuid()] = vm
	for i, gpu := range vm.GetGpus() {
		vm.Gpus[i] = vm.GetHost() + "/" + gpu
		if err := m.give(vm.GetGpus()[i], vm); err != nil {
			panic(err)
		}
	}
}

// Judge sets the answer of Isolation for a card. The default is yes.
func (m *Machines) Judge(gpu string, verdict *gpuctlv1.IsolationResponse) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.verdicts[gpu] = verdict
}

// Mute makes a host not answer any more.
func (m *Machines) Mute(host string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.missing[host] = true
}

// give assigns a card to a VM. The caller holds the lock.
func (m *Machines) give(id string, vm *gpuctlv1.Machine) error {
	card := m.cards[id]
	switch {
	case card == nil:
		return fail(connect.CodeNotFound, "there is no card %s", id)
	case card.GetMachine() != "" && card.GetMachine() != vm.GetUuid():
		return fail(connect.CodeFailedPrecondition, "refused: %s belongs to VM %s", id, card.GetMachineName())
	case card.GetPhase() == gpuctlv1.CardPhase_CARD_PHASE_QUARANTINED:
		return fail(connect.CodeFailedPrecondition, "refused: %s is quarantined: gpuctl reset %s tries to bring it back", id, id)
	}
	card.Phase, card.Machine, card.MachineName = gpuctlv1.CardPhase_CARD_PHASE_ATTACHED, vm.GetUuid(), vm.GetName()
	card.Claim = "vm-" + vm.GetName()
	return nil
}

func (m *Machines) takeBack(id string) {
	card := m.cards[id]
	card.Phase, card.Machine, card.MachineName, card.Claim, card.Persistent = gpuctlv1.CardPhase_CARD_PHASE_FREE, "", "", "", false
	card.ResetMethod = "flr"
}

// look returns a copy of an object of the cluster.
func look[T proto.Message](c *Cluster, kind clusterv1.Kind, name string) (T, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return get[T](c, kind, name)
}

// host checks a host's name. Empty means the host that is asked.
func (m *Machines) host(name string) (string, error) {
	if name == "" {
		name = m.here
	}
	if _, err := look[*clusterv1.Host](m.c, clusterv1.Kind_KIND_HOST, name); err != nil {
		return "", err
	}
	if m.missing[name] {
		return "", reason.Coded(reason.Errorf(reason.HostDown, "host %s does not answer", name).On("host", name))
	}
	return name, nil
}

// card finds a card by its id, its name on a host or its address.
func (m *Machines) card(host, gpu string) (string, *gpuctlv1.Card, error) {
	if at, _, ok := strings.Cut(gpu, "/"); ok && host == "" {
		host = at
	}
	host, err := m.host(host)
	if err != nil {
		return "", nil, err
	}
	for _, id := range sortedKeys(m.cards) {
		card := m.cards[id]
		if strings.HasPrefix(id, host+"/") && (id == gpu || card.GetGpu() == gpu || card.GetAddress() == gpu) {
			return id, card, nil
		}
	}
	return "", nil, reason.Coded(reason.Errorf(reason.NotFound, "not found: host %s has no card %q", host, gpu).On("gpu", gpu).Do("gpuctl cards --on %s lists them", host))
}

// machine finds a VM by its name or UUID.
func (m *Machines) machine(host, name string) (*gpuctlv1.Machine, error) {
	if host != "" {
		if _, err := m.host(host); err != nil {
			return nil, err
		}
	}
	var found []*gpuctlv1.Machine
	var at []string
	for _, uuid := range sortedKeys(m.vms) {
		vm := m.vms[uuid]
		if (vm.GetName() == name || uuid == name) && (host == "" || vm.GetHost() == host) {
			found, at = append(found, vm), append(at, vm.GetHost())
		}
	}
	switch {
	case len(found) == 0 && host != "":
		return nil, reason.Coded(reason.Errorf(reason.NotFound, "not found: host %s has no VM %q", host, name).On("vm", name))
	case len(found) == 0:
		return nil, reason.Coded(reason.Errorf(reason.NotFound, "not found: there is no VM %q", name).On("vm", name))
	case len(found) > 1:
		return nil, fail(connect.CodeInvalidArgument, "invalid: VM %s is on %s: say which with --on", name, strings.Join(at, " and "))
	}
	return found[0], nil
}

// ListCards implements the RPC.
func (m *Machines) ListCards(_ context.Context, r *connect.Request[gpuctlv1.ListCardsRequest]) (*connect.Response[gpuctlv1.ListCardsResponse], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	host, err := m.host(r.Msg.GetHost())
	if err != nil {
		return nil, err
	}
	res := &gpuctlv1.ListCardsResponse{Host: host}
	for _, id := range sortedKeys(m.cards) {
		if strings.HasPrefix(id, host+"/") {
			res.Cards = append(res.Cards, proto.CloneOf(m.cards[id]))
		}
	}
	return connect.NewResponse(res), nil
}

// ListMachines implements the RPC.
func (m *Machines) ListMachines(_ context.Context, r *connect.Request[gpuctlv1.ListMachinesRequest]) (*connect.Response[gpuctlv1.ListMachinesResponse], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	host := r.Msg.GetHost()
	if host != "*" {
		var err error
		if host, err = m.host(host); err != nil {
			return nil, err
		}
	}
	res := &gpuctlv1.ListMachinesResponse{}
	for _, vm := range m.vms {
		if (host == "*" || vm.GetHost() == host) && !m.missing[vm.GetHost()] {
			res.Machines = append(res.Machines, proto.CloneOf(vm))
		}
	}
	slices.SortFunc(res.Machines, func(a, b *gpuctlv1.Machine) int {
		return strings.Compare(a.GetName()+"\x00"+a.GetHost(), b.GetName()+"\x00"+b.GetHost())
	})
	for _, name := range sortedKeys(m.missing) {
		if host == "*" {
			res.Missing = append(res.Missing, name+": it does not answer")
		}
	}
	return connect.NewResponse(res), nil
}

// Isolation implements the RPC.
func (m *Machines) Isolation(_ context.Context, r *connect.Request[gpuctlv1.IsolationRequest]) (*connect.Response[gpuctlv1.IsolationResponse], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	id, _, err := m.card(r.Msg.GetHost(), r.Msg.GetGpu())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(m.verdict(id)), nil
}

func (m *Machines) verdict(id string) *gpuctlv1.IsolationResponse {
	if v := m.verdicts[id]; v != nil {
		return v
	}
	return &gpuctlv1.IsolationResponse{Gpu: id, Verdict: "yes", Summary: "it may be given to a VM", Source: "xen"}
}

// script is a change of a card, as a list of steps.
type script struct {
	plan    []*gpuctlv1.PlannedStep
	reasons []*gpuctlv1.Reason
	gpu     string // the card's name on its host
	machine string
	do      func() error
	card    *gpuctlv1.Card
}

func (s *script) against(is bool, code, format string, args ...any) {
	if is {
		s.reasons = append(s.reasons, &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)})
	}
}

// play sends a plan, refuses, or executes the script. The caller holds the lock, which is
// unlocked while messages are sent.
func (m *Machines) play(s *script, plan bool, out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	last := &gpuctlv1.DeviceUpdate{Gpu: s.gpu, Machine: s.machine, Done: true}
	if plan {
		last.Plan, last.Reasons = s.plan, s.reasons
		m.mu.Unlock()
		return out.Send(last)
	}
	if len(s.reasons) > 0 {
		m.mu.Unlock()
		return fail(connect.CodeFailedPrecondition, "refused: %s", s.reasons[0].GetMessage())
	}
	if err := s.do(); err != nil {
		m.mu.Unlock()
		return err
	}
	last.Card = proto.CloneOf(s.card)
	m.mu.Unlock()
	for i, step := range s.plan {
		u := &gpuctlv1.DeviceUpdate{Gpu: s.gpu, Machine: s.machine, Step: step.GetName(), StepIndex: uint32(i + 1), Steps: uint32(len(s.plan))}
		if err := out.Send(u); err != nil {
			return err
		}
		u.TookNs = int64(time.Millisecond)
		if err := out.Send(u); err != nil {
			return err
		}
	}
	return out.Send(last)
}

// operates begins a call that changes something. If it returns no error, it has locked
// the lock.
func (m *Machines) operates() error {
	unlock, err := m.c.operator()
	if err != nil {
		return err
	}
	unlock()
	m.mu.Lock()
	return nil
}

// change does a change that an operator asks for. prepare finds out what is to be done, with
// the lock.
func (m *Machines) change(plan bool, out *connect.ServerStream[gpuctlv1.DeviceUpdate], prepare func() (*script, error)) error {
	if err := m.operates(); err != nil {
		return err
	}
	s, err := prepare()
	if err != nil {
		m.mu.Unlock()
		return err
	}
	return m.play(s, plan, out)
}

// Attach implements the RPC.
func (m *Machines) Attach(_ context.Context, r *connect.Request[gpuctlv1.AttachRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	return m.change(r.Msg.GetPlan(), out, func() (*script, error) { return m.attach(r.Msg) })
}

func (m *Machines) attach(r *gpuctlv1.AttachRequest) (*script, error) {
	host := r.GetHost()
	if at, _, ok := strings.Cut(r.GetGpu(), "/"); ok && host == "" {
		host = at
	}
	vm, err := m.machine(host, r.GetMachine())
	if err != nil {
		return nil, err
	}
	gpu := r.GetGpu()
	if gpu == "" {
		if gpu, err = m.choose(vm, r); err != nil {
			return nil, err
		}
	}
	id, card, err := m.card(vm.GetHost(), gpu)
	if err != nil {
		return nil, err
	}
	s := &script{gpu: id, machine: vm.GetName(), card: card}
	s.plan = []*gpuctlv1.PlannedStep{
		{Name: "claim", What: "bind a claim to " + id, Undo: "the claim is released"},
		{Name: "take", What: "take it from its driver", Undo: "it is returned"},
		{Name: "reset", What: "reset it and read it back"},
		{Name: "attach", What: "attach it to VM " + vm.GetName(), Undo: "it is detached"},
	}
	v := m.verdict(id)
	s.against(card.GetMachine() != "", "taken", "%s belongs to VM %s", id, card.GetMachineName())
	s.against(card.GetPhase() == gpuctlv1.CardPhase_CARD_PHASE_QUARANTINED, "quarantined", "%s is quarantined: gpuctl reset %s tries to bring it back", id, id)
	s.against(v.GetVerdict() == "no", "isolation", "%s may not be given away: %s", id, v.GetSummary())
	s.against(v.GetVerdict() == "care" && !r.GetAcceptCare(), "isolation", "%s can be given away with care: %s; --accept-care takes the risk", id, v.GetSummary())
	s.against(vm.GetState() != "running" && !r.GetStoredOnly(), "not_running", "VM %s is %s; --stored gives it the GPU from its next start on", vm.GetName(), vm.GetState())
	s.do = func() error {
		if r.GetStoredOnly() {
			card.Persistent = true
			return nil
		}
		if err := m.give(id, vm); err != nil {
			return err
		}
		card.Persistent = r.GetPersistent()
		vm.Gpus = append(vm.GetGpus(), id)
		return nil
	}
	return s, nil
}

// choose returns a free card of the VM's host.
func (m *Machines) choose(vm *gpuctlv1.Machine, r *gpuctlv1.AttachRequest) (string, error) {
	match, err := m.c.filter(clusterv1.Kind_KIND_GPU, r.GetExpr())
	if err != nil {
		return "", err
	}
	for _, id := range sortedKeys(m.cards) {
		card := m.cards[id]
		g, err := look[*clusterv1.GPU](m.c, clusterv1.Kind_KIND_GPU, id)
		if err != nil {
			return "", err
		}
		ok, err := match(g)
		if err != nil {
			return "", err
		}
		if ok && g.GetHost() == vm.GetHost() && card.GetPhase() == gpuctlv1.CardPhase_CARD_PHASE_FREE && card.GetMemory() >= r.GetMinMemory() {
			return card.GetGpu(), nil
		}
	}
	return "", fail(connect.CodeResourceExhausted, "no free card of host %s will do", vm.GetHost())
}

// Detach implements the RPC.
func (m *Machines) Detach(_ context.Context, r *connect.Request[gpuctlv1.DetachRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	return m.change(r.Msg.GetPlan(), out, func() (*script, error) { return m.detach(r.Msg) })
}

func (m *Machines) detach(r *gpuctlv1.DetachRequest) (*script, error) {
	vm, err := m.machine(r.GetHost(), r.GetMachine())
	if err != nil {
		return nil, err
	}
	gpu := r.GetGpu()
	switch {
	case gpu == "" && len(vm.GetGpus()) == 0:
		return nil, fail(connect.CodeFailedPrecondition, "refused: VM %s has no GPU", vm.GetName())
	case gpu == "" && len(vm.GetGpus()) > 1:
		return nil, fail(connect.CodeInvalidArgument, "invalid: VM %s has %s: name one", vm.GetName(), strings.Join(vm.GetGpus(), " and "))
	case gpu == "":
		gpu = vm.GetGpus()[0]
	}
	id, card, err := m.card(vm.GetHost(), gpu)
	if err != nil {
		return nil, err
	}
	s := &script{gpu: id, machine: vm.GetName(), card: card}
	s.plan = []*gpuctlv1.PlannedStep{
		{Name: "release", What: "have VM " + vm.GetName() + " release it", Undo: "it takes it up again"},
		{Name: "detach", What: "detach it"},
		{Name: "reset", What: "reset it and read it back"},
		{Name: "return", What: "give it back to its driver"},
	}
	s.against(card.GetMachine() != vm.GetUuid(), "not_its", "VM %s has not got %s", vm.GetName(), id)
	s.against(noAgent(vm) && !r.GetUnconfirmed(), "agent_absent", "no gpuguest answers in VM %s; --unconfirmed takes the GPU all the same", vm.GetName())
	s.do = func() error {
		m.takeBack(id)
		vm.Gpus = slices.DeleteFunc(vm.GetGpus(), func(g string) bool { return g == id })
		return nil
	}
	return s, nil
}

// noAgent reports whether no agent in a VM answers.
func noAgent(vm *gpuctlv1.Machine) bool {
	return vm.GetAgent() == "" || strings.HasPrefix(vm.GetAgent(), "no ")
}

// Reset implements the RPC.
func (m *Machines) Reset(_ context.Context, r *connect.Request[gpuctlv1.ResetRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	return m.change(r.Msg.GetPlan(), out, func() (*script, error) {
		id, card, err := m.card(r.Msg.GetHost(), r.Msg.GetGpu())
		if err != nil {
			return nil, err
		}
		s := &script{gpu: id, card: card, plan: []*gpuctlv1.PlannedStep{{Name: "reset", What: "reset " + id + " and read it back"}}}
		s.against(card.GetMachine() != "", "taken", "%s belongs to VM %s: gpuctl detach %s takes it back first", id, card.GetMachineName(), card.GetMachineName())
		s.do = func() error {
			m.takeBack(id)
			card.Message = ""
			return nil
		}
		return s, nil
	})
}
