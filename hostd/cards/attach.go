package cards

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/vgpu"
)

// Names of steps, as operators see them. The steps cut and uncut create and delete a
// slice.
const (
	stepClaim   = "claim"
	stepTake    = "take"
	stepReset   = "reset"
	stepAttach  = "attach"
	stepStore   = "store"
	stepConfirm = "confirm"
	stepDetach  = "detach"
	stepUnstore = "unstore"
	stepReturn  = "return"
	stepCut     = "cut"
	stepUncut   = "delete"
	stepResize  = "resize"
)

func planned(name, what, undo string) *gpuctlv1.PlannedStep {
	return &gpuctlv1.PlannedStep{Name: name, What: what, Undo: undo}
}

func why(code, format string, args ...any) *gpuctlv1.Reason {
	return &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)}
}

// refusal makes one error of all reasons. It wraps ErrRefused.
func refusal(what string, reasons []*gpuctlv1.Reason) error {
	texts := make([]string, len(reasons))
	for i, r := range reasons {
		texts[i] = r.GetMessage()
	}
	return fmt.Errorf("%s: %w: %s", what, ErrRefused, strings.Join(texts, "; "))
}

// Attach gives a card, or a slice of one, to a VM. Errors wrap ErrNotFound, ErrRefused or
// ErrBusy.
func (k *Keeper) Attach(ctx context.Context, r *gpuctlv1.AttachRequest, report Report) error {
	if r.GetPersistent() && r.GetStoredOnly() {
		return fmt.Errorf("%w: persistent and stored-only exclude each other", ErrInvalid)
	}
	if r.GetProfile() != "" && (r.GetStoredOnly() || k.Slicer == nil) {
		return fmt.Errorf("%w: a slice is made for a running VM, so the stored definition alone cannot have it, and this hostd must manage VMs", ErrInvalid)
	}
	m, err := k.VMs.Find(ctx, r.GetMachine())
	if err != nil {
		return err
	}
	p, err := k.planAttach(ctx, m, r)
	if err != nil {
		return err
	}
	if r.GetPlan() {
		report(p.update(m))
		return nil
	}
	if len(p.reasons) > 0 {
		return refusal("attach "+p.name()+" to vm "+m.Name, p.reasons)
	}
	return k.outlive(ctx, func(ctx context.Context) error {
		if r.GetStoredOnly() {
			return k.store(ctx, m.VM, p, report)
		}
		return k.attach(ctx, m, p, r, report)
	})
}

// attachPlan is what Attach is going to do.
type attachPlan struct {
	choices map[string]*pci.Card // cards that the VM may get, by GPU name
	kinds   map[string]vgpu.Kind // kinds of the slices, by GPU name
	steps   []*gpuctlv1.PlannedStep
	reasons []*gpuctlv1.Reason
}

func (p *attachPlan) names() []string {
	var out []string
	for n := range p.choices {
		out = append(out, n)
	}
	slices.Sort(out)
	return out
}

func (p *attachPlan) name() string {
	if len(p.choices) == 1 {
		return p.names()[0]
	}
	return "a gpu"
}

func (p *attachPlan) update(m vm.Info) *gpuctlv1.DeviceUpdate {
	return &gpuctlv1.DeviceUpdate{
		Gpu: strings.Join(p.names(), " or "), Machine: m.Name, Plan: p.steps, Reasons: p.reasons, Done: true, Steps: uint32(len(p.steps)),
	}
}

func (k *Keeper) planAttach(ctx context.Context, m vm.Info, r *gpuctlv1.AttachRequest) (*attachPlan, error) {
	p := &attachPlan{choices: map[string]*pci.Card{}, kinds: map[string]vgpu.Kind{}}
	if r.GetStoredOnly() {
		p.steps = []*gpuctlv1.PlannedStep{planned(stepStore, "add it to the stored definition of "+m.Name, "the definition as it was")}
		if !m.Persistent {
			p.reasons = append(p.reasons, why("transient", "VM %s has no stored definition", m.Name))
		}
	} else {
		p.steps = []*gpuctlv1.PlannedStep{
			planned(stepClaim, "bind a claim of "+m.Name+" to it in the cluster", "the claim is released"),
			planned(stepTake, "unbind all of its functions from their drivers and bind them to "+k.Hypervisor.Driver(), "they go back to their drivers"),
			planned(stepReset, "reset it and read it back", ""),
			planned(stepAttach, "attach it to "+m.Name+", and have the hypervisor confirm it", "it is detached, if the VM lets it"),
		}
		if r.GetPersistent() {
			p.steps = append(p.steps, planned(stepStore, "add it to the stored definition of "+m.Name, "the definition as it was"))
			if !m.Persistent {
				p.reasons = append(p.reasons, why("transient", "VM %s has no stored definition: leave out --persistent", m.Name))
			}
		}
		if m.State != "running" {
			p.reasons = append(p.reasons, why("not_running", "VM %s is %s: start it, or change only its stored definition (--stored)", m.Name, m.State))
		} else {
			reasons, err := k.VMs.Check(ctx, m.UUID)
			if err != nil {
				return nil, err
			}
			p.reasons = append(p.reasons, reasons...)
		}
	}
	if r.GetGpu() != "" {
		card, name, err := k.find(ctx, r.GetGpu())
		if err != nil {
			return nil, err
		}
		p.choices[name] = card
		against, err := k.againstRequest(ctx, m, p, card, name, r)
		p.reasons = append(p.reasons, against...)
		p.slice(r.GetProfile())
		return p, err
	}
	err := k.choose(ctx, m, r, p)
	p.slice(r.GetProfile())
	return p, err
}

// slice changes the steps to those of attaching a slice. An empty profile means a whole
// card.
func (p *attachPlan) slice(profile string) {
	if profile == "" {
		return
	}
	bound := len(p.kinds) == 0
	for _, kind := range p.kinds {
		bound = bound || kind == vgpu.SRIOV
	}
	var out []*gpuctlv1.PlannedStep
	for _, s := range p.steps {
		switch {
		case s.GetName() == stepTake:
			out = append(out, planned(stepCut, "make a slice of profile "+profile, "the slice is deleted, and virtual functions that were made for it"))
			s = planned(stepTake, "unbind its function from its driver and bind it for the VM", "it goes back to its driver")
		case s.GetName() == stepClaim:
			s = planned(stepClaim, "bind a claim to a slice of profile "+profile+" in the cluster", s.GetUndo())
		}
		if bound || s.GetName() != stepTake && s.GetName() != stepReset {
			out = append(out, s)
		}
	}
	p.steps = out
}

// againstRequest returns the reasons why a VM must not get the requested card or slice.
func (k *Keeper) againstRequest(ctx context.Context, m vm.Info, p *attachPlan, card *pci.Card, name string, r *gpuctlv1.AttachRequest) ([]*gpuctlv1.Reason, error) {
	if r.GetProfile() == "" {
		out, err := k.against(ctx, m.VM, card, r.GetAcceptCare())
		if !r.GetStoredOnly() {
			out = append(out, k.againstHotplug(card)...)
		}
		return out, err
	}
	kind, reasons, err := k.againstSlice(ctx, card, name, r.GetProfile())
	if err != nil {
		return reasons, err
	}
	p.kinds[name] = kind
	if vfs, _ := k.Slicer.VFs(card); r.GetPersistent() && (kind != vgpu.SRIOV || len(vfs) == 0 || k.madeVFs(card.Address)) {
		reasons = append(reasons, why("transient", "the slice of %s is made for the running VM and deleted after it, so that its definition cannot name it: leave out --persistent, or make lasting virtual functions first (gpuctl resize %s)", name, name))
	}
	return reasons, nil
}

// choose adds to the plan the cards that a VM may get. The cluster chooses one of them.
func (k *Keeper) choose(ctx context.Context, m vm.Info, r *gpuctlv1.AttachRequest, p *attachPlan) error {
	if r.GetStoredOnly() {
		return fmt.Errorf("%w: name the gpu that the stored definition is to have", ErrInvalid)
	}
	gpus, err := k.gpus(ctx)
	if err != nil {
		return err
	}
	var against []*gpuctlv1.Reason
	for _, g := range gpus {
		if g.GetPciAddress() == "" {
			continue
		}
		card, name, err := k.find(ctx, g.GetPciAddress())
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		reasons, err := k.againstRequest(ctx, m, p, card, name, r)
		if err != nil {
			return err
		}
		if len(reasons) == 0 {
			p.choices[name] = card
		}
		against = append(against, reasons...)
	}
	if len(p.choices) == 0 {
		p.reasons = append(p.reasons, why("no_card", "no card of host %s can be given away", k.Cluster.HostName()))
		p.reasons = append(p.reasons, against...)
	}
	return nil
}

// against returns the reasons why a VM must not get a card.
func (k *Keeper) against(ctx context.Context, m vm.VM, card *pci.Card, care bool) (out []*gpuctlv1.Reason, err error) {
	if a := k.assignmentOf(card.Address); a != nil {
		switch {
		case a.Phase == quarantined:
			out = append(out, why("quarantined", "%s is quarantined (%s): gpuctl reset %s tries to bring it back", a.GPU, a.Message, a.GPU))
		case a.UUID == m.UUID:
			out = append(out, why("has_it", "VM %s has %s already (%s)", m.Name, a.GPU, a.Phase))
		default:
			out = append(out, why("owned", "%s belongs to VM %s (%s): gpuctl detach %s %s gives it back", a.GPU, a.vm(), a.Phase, a.vm(), a.GPU))
		}
	}
	owners, err := k.Hypervisor.Owners(ctx)
	if err != nil {
		return nil, err
	}
	for _, f := range addresses(card) {
		if d, owned := owners[f]; owned && len(out) == 0 {
			out = append(out, why("owned", "the hypervisor says that VM %s has %s", d.Name, f))
		}
	}
	out = append(out, k.againstWhole(card, k.nameOf(ctx, card))...)
	more, err := k.isolation(ctx, card, care)
	return append(out, more...), err
}

// againstHotplug returns the reasons why a card cannot be attached to a running VM.
func (k *Keeper) againstHotplug(card *pci.Card) (out []*gpuctlv1.Reason) {
	if said := k.Hypervisor.HotplugBlocker(card); said != "" {
		out = append(out, why("one_by_one", "%s: %s", card.Address, said))
	}
	return out
}

// nameOf returns a card's name in the inventory, or its address if the inventory does not
// have it.
func (k *Keeper) nameOf(ctx context.Context, card *pci.Card) string {
	if _, name, err := k.find(ctx, card.Address.String()); err == nil {
		return name
	}
	return card.Address.String()
}

// isolation returns the reasons against a card that its isolation report contains. care:
// the operator accepts findings of level care.
func (k *Keeper) isolation(ctx context.Context, card *pci.Card, care bool) (out []*gpuctlv1.Reason, err error) {
	report, err := k.Isolation.Report(ctx, card)
	if err != nil {
		return nil, err
	}
	for _, f := range report.GetFindings() {
		if f.GetSeverity() == "refuse" || f.GetSeverity() == "care" && !care {
			text := f.GetMessage()
			if f.GetAdvice() != "" {
				text += ": " + f.GetAdvice()
			}
			if f.GetSeverity() == "care" {
				text += " (--accept-care gives it away all the same)"
			}
			out = append(out, why("isolation_"+f.GetCode(), "%s: %s", card.Address, text))
		}
	}
	return out, nil
}

func (k *Keeper) attach(ctx context.Context, m vm.Info, p *attachPlan, r *gpuctlv1.AttachRequest, report Report) error {
	// If there is only one card, lock it before the cluster assigns it. If there are
	// several, the cluster chooses, and the claim keeps others away.
	var end func()
	begin := k.lockCard
	if r.GetProfile() != "" { // another change may be working on a slice of the same card
		begin = func(card pci.Address, what string) (func(), error) {
			ctx, cancel := context.WithTimeout(ctx, k.Step)
			defer cancel()
			return k.await(ctx, card, what)
		}
	}
	if names := p.names(); len(names) == 1 {
		var err error
		if end, err = begin(p.choices[names[0]].Address, "an attach to vm "+m.Name); err != nil {
			return err
		}
	}
	var claim, gpu string
	var err error
	began := time.Now()
	if r.GetProfile() != "" {
		claim, gpu, err = k.obtainSlice(ctx, m.VM, r.GetProfile(), p.names(), r.GetExpr(), r.GetMinMemory())
	} else {
		claim, gpu, err = k.obtain(ctx, m.VM, p.names(), r.GetExpr(), r.GetMinMemory())
	}
	if err == nil && end == nil {
		end, err = begin(p.choices[gpu].Address, "an attach to vm "+m.Name)
		if err != nil {
			k.dropClaim(claim)
		}
	}
	if end != nil {
		defer end()
	}
	if err != nil {
		return err
	}
	card := p.choices[gpu]
	c := &change{k: k, card: card, steps: p.steps, at: 1, report: report, assignment: cardAssignment{
		Card: card.Address, Functions: addresses(card), GPU: gpu, UUID: m.UUID, Name: m.Name, Claim: claim, Persistent: r.GetPersistent(),
	}}
	if r.GetProfile() != "" {
		c.assignment.Functions, c.assignment.Slice = nil, &slice{ID: vgpu.NewUUID(), Profile: r.GetProfile(), Kind: p.kinds[gpu]}
	}
	report(c.update(stepClaim, time.Since(began)))
	if a := k.assignmentOf(card.Address); a != nil { // assigned after the plan was made
		k.dropClaim(claim)
		return fmt.Errorf("attach %s to vm %s: %w: VM %s has got it meanwhile", gpu, m.Name, ErrRefused, a.vm())
	}
	if c.assignment.Slice != nil {
		err = c.createSlice(ctx, r.GetAcceptCare())
	} else if reasons := k.againstWhole(card, gpu); len(reasons) > 0 { // sliced after the plan was made
		err = refusal(gpu, reasons)
	}
	if err == nil {
		err = c.take(ctx)
	}
	k.dropClaim(claim) // the record has the claim now, or the attach failed and nothing has it
	if err == nil {
		err = c.reset(ctx)
	}
	if err == nil {
		err = c.attach(ctx)
	}
	if err != nil {
		if k.current(&c.assignment) == nil { // it failed before it was recorded
			return err
		}
		return fmt.Errorf("attach %s to vm %s: %w", gpu, m.Name, c.rollBack(ctx, err))
	}
	if r.GetPersistent() {
		if err := c.step(ctx, stepStore, func(ctx context.Context) error { return k.VMs.Store(ctx, m.UUID, c.assignment.Functions) }); err != nil {
			c.assignment.Persistent, c.assignment.Message = false, ""
			return errors.Join(fmt.Errorf("vm %s has %s, but only until it stops: %w", m.Name, gpu, err), k.put(c.assignment))
		}
	}
	report(k.last(c))
	return nil
}

// last returns the final update of a change.
func (k *Keeper) last(c *change) *gpuctlv1.DeviceUpdate {
	u := &gpuctlv1.DeviceUpdate{Gpu: c.assignment.label(), Machine: c.assignment.vm(), Done: true, Steps: uint32(len(c.steps)), StepIndex: uint32(c.at)}
	if card, err := c.parent(); err == nil {
		u.Card = k.describe(card, c.assignment.GPU)
	}
	return u
}

// store changes only the stored definition: the VM gets the card at its next start.
func (k *Keeper) store(ctx context.Context, m vm.VM, p *attachPlan, report Report) error {
	name := p.name()
	c := &change{k: k, card: p.choices[name], steps: p.steps, report: report, assignment: cardAssignment{GPU: name, UUID: m.UUID, Name: m.Name, Card: p.choices[name].Address}}
	functions := addresses(c.card)
	if err := c.step(ctx, stepStore, func(ctx context.Context) error { return k.VMs.Store(ctx, m.UUID, functions) }); err != nil {
		return err
	}
	report(k.last(c))
	return nil
}

// describe returns a card in the API's form.
func (k *Keeper) describe(card *pci.Card, gpu string) *gpuctlv1.Card {
	main := card.Main()
	out := &gpuctlv1.Card{
		Gpu: gpu, Address: card.Address.String(), Group: card.Group, Phase: gpuctlv1.CardPhase_CARD_PHASE_FREE,
		Model: main.DeviceName, Memory: main.VideoMemory, Dom0Access: k.Hypervisor.Dom0Access(card),
	}
	for _, f := range card.Functions {
		out.Functions = append(out.Functions, &gpuctlv1.Function{
			Address: f.Address.String(), VendorId: uint32(f.VendorID), DeviceId: uint32(f.DeviceID), Class: f.Class,
			SubVendorId: uint32(f.SubVendorID), SubDeviceId: uint32(f.SubDeviceID), Vendor: f.VendorName, Name: f.DeviceName, Driver: f.Driver,
		})
	}
	k.mu.Lock()
	out.ResetMethod = k.resets[card.Address]
	k.mu.Unlock()
	if a := k.assignmentOf(card.Address); a != nil {
		out.Phase, out.Machine, out.MachineName, out.Claim = phases()[a.Phase], a.UUID, a.Name, a.Claim
		out.Persistent, out.Message, out.SinceUnixMs = a.Persistent, a.Message, a.Since
	}
	k.describeSlices(card, out)
	return out
}

// Cards returns the cards of the host in their present state.
func (k *Keeper) Cards(ctx context.Context) ([]*gpuctlv1.Card, error) {
	cards, err := k.scan()
	if err != nil {
		return nil, err
	}
	gpus, err := k.gpus(ctx)
	if err != nil {
		return nil, err
	}
	var out []*gpuctlv1.Card
	for _, card := range cards {
		d := k.describe(card, card.Address.String())
		for _, g := range gpus {
			if g.GetPciAddress() == d.GetAddress() {
				d.Gpu, d.Model = g.GetName(), g.GetModel()
				d.Memory = max(d.GetMemory(), g.GetLimits().GetGlobalMemory())
			}
		}
		out = append(out, d)
	}
	return out, nil
}

// Isolated judges whether a card may be given to a VM.
func (k *Keeper) Isolated(ctx context.Context, gpu string) (*gpuctlv1.IsolationResponse, error) {
	card, name, err := k.find(ctx, gpu)
	if err != nil {
		return nil, err
	}
	report, err := k.Isolation.Report(ctx, card)
	if err != nil {
		return nil, err
	}
	report = proto.CloneOf(report)
	report.Gpu = name
	return report, nil
}
