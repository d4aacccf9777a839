package cards

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/vgpu"
)

// Slicer creates slices of cards and deletes them. What Pick has chosen for a VM is
// recorded before Make creates it.
type Slicer interface {
	List(card *pci.Card, use vgpu.Use) ([]vgpu.Profile, error)
	Instances(card *pci.Card) ([]vgpu.Instance, error)
	VFs(card *pci.Card) (vfs []pci.Address, total int)
	Pick(card *pci.Card, profile, id string, use vgpu.Use) (vgpu.Instance, error)
	Make(ctx context.Context, i vgpu.Instance) error
	// Delete deletes an instance. If it does not exist, there is no error.
	Delete(ctx context.Context, i vgpu.Instance) error
	Resize(ctx context.Context, card *pci.Card, n int, use vgpu.Use) error
	Whole(card *pci.Card) error
}

// Mediated attaches mediated devices to VMs, by their UUIDs.
type Mediated interface {
	Owners(ctx context.Context) (map[string]vm.VM, error)
	Attach(ctx context.Context, machine, device string) error
	Detach(ctx context.Context, machine, device string) error
}

// slice is the part of a card that an assignment is about. A slice is never modified: a
// change replaces it.
type slice struct {
	ID      string    `json:"id"` // a UUID; for a mediated device, the one that the kernel uses
	Profile string    `json:"profile"`
	Kind    vgpu.Kind `json:"kind"`
	Made    bool      `json:"made,omitempty"` // the card's virtual functions were made for slices, and are removed with the last slice
	Kept    bool      `json:"kept,omitempty"` // the slice existed before the assignment, and is not deleted
}

// errGone means that a slice's function does not exist any more.
var errGone = errors.New("it is not there any more")

// mediated reports whether the assignment is of a mediated device.
func (a *cardAssignment) mediated() bool { return a.Slice != nil && a.Slice.Kind == vgpu.Mdev }

// bound reports whether the functions are bound to the hypervisor's driver. Those of
// slices that the card's own driver provides are not.
func (a *cardAssignment) bound() bool { return a.Slice == nil || a.Slice.Kind == vgpu.SRIOV }

// key returns a key that is unique among assignments.
func (a *cardAssignment) key() string {
	if a.Slice != nil {
		return a.Slice.ID
	}
	return a.Card.String()
}

// label returns a name of what is assigned, for people.
func (a *cardAssignment) label() string {
	if a.Slice == nil {
		return a.GPU
	}
	at := a.Slice.ID
	if len(a.Functions) > 0 && a.Slice.Kind != vgpu.Mdev {
		at = a.Functions[0].String()
	}
	return a.GPU + " (" + a.Slice.Profile + " " + at + ")"
}

// what returns "it" for a whole card, or the label of the slice, for messages.
func (a *cardAssignment) what() string {
	if a.Slice == nil {
		return "it"
	}
	return a.label()
}

func (a *cardAssignment) instance() vgpu.Instance {
	i := vgpu.Instance{ID: a.Slice.ID, Kind: a.Slice.Kind, Profile: a.Slice.Profile, Function: a.Functions[0]}
	if i.Kind != vgpu.Mdev {
		i.ID = i.Function.String()
	}
	return i
}

// called reports whether ref is the slice's id or the address of its function.
func (a *cardAssignment) called(ref string) bool {
	function, err := pci.ParseAddress(ref)
	return ref == a.Slice.ID || err == nil && a.Slice.Kind != vgpu.Mdev && slices.Contains(a.Functions, function)
}

// checkSlice returns an error if the record of a slice is inconsistent.
func (a *cardAssignment) checkSlice() error {
	s := a.Slice
	switch {
	case !vgpu.IsUUID(s.ID), s.Profile == "", len(a.Functions) > 1, s.Kind != vgpu.SRIOV && s.Kind != vgpu.Mdev && s.Kind != vgpu.Vendor:
		return errors.New("an entry of a slice makes no sense")
	case len(a.Functions) == 0 && a.Phase != cutting && a.Phase != returning && a.Phase != resetting: // the last was written by earlier versions
		return fmt.Errorf("slice %s is %s and has no function", s.ID, a.Phase)
	}
	return nil
}

// each iterates over all assignments, of cards and of slices. The caller holds k.mu.
func (k *Keeper) each() iter.Seq[*cardAssignment] {
	return func(yield func(*cardAssignment) bool) {
		for _, a := range k.assignments {
			if !yield(a) {
				return
			}
		}
		for _, a := range k.slices {
			if !yield(a) {
				return
			}
		}
	}
}

// set replaces the assignment of the same card or slice as like; if a is nil, it removes
// it. The caller holds k.mu.
func (k *Keeper) set(like, a *cardAssignment) {
	switch {
	case like.Slice == nil && a == nil:
		delete(k.assignments, like.Card)
	case like.Slice == nil:
		k.assignments[like.Card] = a
	case a == nil:
		delete(k.slices, like.Slice.ID)
	default:
		k.slices[like.Slice.ID] = a
	}
}

// at returns the recorded assignment of the same card or slice as a. The caller holds
// k.mu.
func (k *Keeper) at(a *cardAssignment) *cardAssignment {
	if a.Slice != nil {
		return k.slices[a.Slice.ID]
	}
	return k.assignments[a.Card]
}

// current returns a copy of the recorded assignment of the same card or slice as a; nil:
// there is none.
func (k *Keeper) current(a *cardAssignment) *cardAssignment {
	k.mu.Lock()
	defer k.mu.Unlock()
	if now := k.at(a); now != nil {
		c := *now
		return &c
	}
	return nil
}

// slicesOf returns copies of the assignments of a card's slices, in the order of their
// functions.
func (k *Keeper) slicesOf(card pci.Address) (out []cardAssignment) {
	k.mu.Lock()
	for _, h := range k.slices {
		if h.Card == card {
			out = append(out, *h)
		}
	}
	k.mu.Unlock()
	slices.SortFunc(out, func(a, b cardAssignment) int { return strings.Compare(a.label(), b.label()) })
	return out
}

// sliceAt returns a copy of the assignment of a virtual function; nil: there is none.
func (k *Keeper) sliceAt(f pci.Address) *cardAssignment {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, a := range k.slices {
		if a.Slice.Kind != vgpu.Mdev && slices.Contains(a.Functions, f) {
			c := *a
			return &c
		}
	}
	return nil
}

// use returns what the record has about a card's slices. The slice with the key but is
// left out.
func (k *Keeper) use(card pci.Address, but string) vgpu.Use {
	u := vgpu.Use{Scheduled: map[string]uint32{}, Profiles: map[string]string{}}
	for _, a := range k.slicesOf(card) {
		switch {
		case a.key() == but:
		case len(a.Functions) == 0:
			if a.Phase == cutting {
				u.Scheduled[a.Slice.Profile]++
			}
		default:
			u.Held = append(u.Held, a.instance().ID)
			u.Profiles[a.instance().ID] = a.Slice.Profile
		}
	}
	return u
}

// owners returns what the hypervisor reports about an assignment. The owner of a mediated
// device is listed under its parent's address.
func (k *Keeper) owners(ctx context.Context, a *cardAssignment) (map[pci.Address]vm.VM, error) {
	if !a.mediated() {
		return k.Hypervisor.Owners(ctx)
	}
	if k.Mediated == nil {
		return nil, errors.New("this hypervisor has no mediated devices")
	}
	all, err := k.Mediated.Owners(ctx)
	if err != nil {
		return nil, err
	}
	return a.view(all), nil
}

func (a *cardAssignment) view(mediated map[string]vm.VM) map[pci.Address]vm.VM {
	out := map[pci.Address]vm.VM{}
	if d, owned := mediated[a.Slice.ID]; owned && len(a.Functions) > 0 {
		out[a.Functions[0]] = d
	}
	return out
}

// attachFunction and detachFunction change the running VM. The hypervisor must confirm
// that.
func (c *change) attachFunction(ctx context.Context, f pci.Address) error {
	if c.assignment.mediated() {
		return c.k.Mediated.Attach(ctx, c.assignment.UUID, c.assignment.Slice.ID)
	}
	return c.k.VMs.Attach(ctx, c.assignment.UUID, f, c.goesTo(f))
}

func (c *change) detachFunction(ctx context.Context, f pci.Address) error {
	if c.assignment.mediated() {
		return c.k.Mediated.Detach(ctx, c.assignment.UUID, c.assignment.Slice.ID)
	}
	return c.k.VMs.Detach(ctx, c.assignment.UUID, f)
}

// part returns a virtual function as a card of its own, to be reset or judged. The error
// wraps errGone if it does not exist.
func part(card *pci.Card, f pci.Address) (*pci.Card, error) {
	for _, d := range card.VFs {
		if d.Address == f {
			return &pci.Card{Address: f, Functions: []*pci.Device{d}}, nil
		}
	}
	return nil, fmt.Errorf("virtual function %s: %w", f, errGone)
}

// parent returns the card of a slice in its present state. The error wraps errGone if it
// does not exist.
func (c *change) parent() (*pci.Card, error) {
	cards, err := c.k.scan()
	if err != nil {
		return nil, err
	}
	for _, card := range cards {
		if card.Address == c.assignment.Card {
			return card, nil
		}
	}
	return nil, fmt.Errorf("card %s: %w", c.assignment.Card, errGone)
}

// madeVFs reports whether a card's virtual functions were made for slices.
func (k *Keeper) madeVFs(card pci.Address) bool {
	return slices.ContainsFunc(k.slicesOf(card), func(a cardAssignment) bool { return a.Slice.Made })
}

// createSlice creates the slice. It is recorded first. deleteSlice is the undo.
func (c *change) createSlice(ctx context.Context, care bool) error {
	card, err := c.parent()
	if err != nil {
		return err
	}
	s := *c.assignment.Slice
	vfs, total := c.k.Slicer.VFs(card)
	first := s.Kind == vgpu.SRIOV && len(vfs) == 0
	s.Made = first || c.k.madeVFs(c.assignment.Card)
	c.assignment.Slice = &s
	if err := c.enter(cutting); err != nil {
		return err
	}
	return c.step(ctx, stepCut, func(ctx context.Context) error {
		use := c.k.use(c.assignment.Card, s.ID)
		if first {
			if err := c.k.Slicer.Resize(ctx, card, total, use); err != nil {
				return err
			}
		}
		owners, err := c.k.Hypervisor.Owners(ctx)
		if err != nil {
			return err
		}
		for f := range owners { // also of those that a VM was given without gpuctl
			use.Held = append(use.Held, f.String())
		}
		i, err := c.k.Slicer.Pick(card, s.Profile, s.ID, use)
		if err != nil {
			return err
		}
		c.assignment.Functions = []pci.Address{i.Function}
		if err := c.enter(cutting); err != nil {
			return err
		}
		if err := c.k.Slicer.Make(ctx, i); err != nil {
			return err
		}
		if !c.assignment.bound() {
			return nil
		}
		return c.isolated(ctx, care)
	})
}

// isolated returns an error if the virtual function must not be given to a VM.
func (c *change) isolated(ctx context.Context, care bool) error {
	f, err := c.rescan()
	if err != nil {
		return err
	}
	reasons, err := c.k.isolation(ctx, f, care)
	if err == nil && len(reasons) > 0 {
		err = refusal("virtual function "+f.Address.String(), reasons)
	}
	return err
}

// deleteSlice deletes a slice. With the last slice, it removes the virtual functions that
// were made for slices.
func (c *change) deleteSlice(ctx context.Context) error {
	a := &c.assignment
	card, err := c.parent()
	if errors.Is(err, errGone) {
		return nil
	}
	if err != nil {
		return err
	}
	if len(a.Functions) > 0 && !a.Slice.Kept {
		there, err := c.k.Slicer.Instances(card)
		if err != nil {
			return err
		}
		if i := a.instance(); slices.ContainsFunc(there, func(x vgpu.Instance) bool { return x.ID == i.ID }) {
			if err := c.k.Slicer.Delete(ctx, i); err != nil {
				return err
			}
		}
	}
	if !a.Slice.Made || len(c.k.slicesOf(a.Card)) > 1 {
		return nil
	}
	return c.k.Slicer.Resize(ctx, card, 0, vgpu.Use{})
}

// returnFunction returns the slice's function to its driver, if the function exists.
func (c *change) returnFunction(ctx context.Context) error {
	if !c.assignment.bound() || len(c.assignment.Functions) == 0 {
		return nil
	}
	if _, err := c.rescan(); errors.Is(err, errGone) {
		return nil
	} else if err != nil {
		return err
	}
	return c.k.Binder.Return(ctx, c.assignment.Functions)
}

// profiles returns the profiles of a card, and how much room is left for each.
func (k *Keeper) profiles(card *pci.Card) ([]vgpu.Profile, error) {
	if k.Slicer == nil {
		return nil, nil
	}
	return k.Slicer.List(card, k.use(card.Address, ""))
}

// canGive returns why instances of this kind cannot be given to a VM on this host; empty:
// they can.
func (k *Keeper) canGive(kind vgpu.Kind) string {
	switch kind {
	case vgpu.SRIOV:
		return ""
	case vgpu.Mdev, vgpu.Vendor:
		if k.Mediated != nil {
			return ""
		}
		return "slices of kind " + string(kind) + " are given to VMs by VFIO and qemu; Xen's toolstack assigns PCI functions only: use a card with SR-IOV virtual functions, or the whole card"
	}
	return "slices of kind " + string(kind) + " serve programs of this host, and cannot be given to a VM"
}

// againstSlice returns the reasons why a VM must not get a slice of a card, and the
// slice's kind.
func (k *Keeper) againstSlice(ctx context.Context, card *pci.Card, name, profile string) (kind vgpu.Kind, out []*gpuctlv1.Reason, err error) {
	if a := k.assignmentOf(card.Address); a != nil {
		if a.Phase == quarantined {
			out = append(out, why("quarantined", "%s is quarantined (%s): gpuctl reset %s tries to bring it back", a.GPU, a.Message, a.GPU))
		} else {
			out = append(out, why("owned", "%s belongs as a whole to VM %s (%s): gpuctl detach %s %s gives it back", a.GPU, a.vm(), a.Phase, a.vm(), a.GPU))
		}
		return "", out, nil
	}
	owners, err := k.Hypervisor.Owners(ctx)
	if err != nil {
		return "", nil, err
	}
	for _, f := range addresses(card) {
		if d, owned := owners[f]; owned {
			return "", []*gpuctlv1.Reason{why("owned", "the hypervisor says that VM %s has %s", d.Name, f)}, nil
		}
	}
	all, err := k.profiles(card)
	if err != nil {
		return "", nil, err
	}
	i := slices.IndexFunc(all, func(p vgpu.Profile) bool { return p.Name == profile })
	if i < 0 {
		var names []string
		for _, p := range all {
			names = append(names, p.Name)
		}
		if len(names) == 0 {
			return "", []*gpuctlv1.Reason{why("profile", "%s cannot be cut into slices as it is: it has neither SR-IOV functions nor a driver that makes vGPUs", name)}, nil
		}
		return "", []*gpuctlv1.Reason{why("profile", "%s has no profile %q; it has %s", name, profile, strings.Join(names, ", "))}, nil
	}
	p := all[i]
	if no := k.canGive(p.Kind); no != "" {
		out = append(out, why("kind", "%s of %s: %s", profile, name, no))
	}
	if p.Free == 0 {
		text := fmt.Sprintf("%s has no room for another %s: %s", name, profile, p.Why)
		if has := k.whoHas(card.Address); has != "" {
			text += "; " + has
		}
		out = append(out, why("full", "%s", text))
	}
	if p.Memory == 0 {
		out = append(out, why("memory", "it is not known how much memory a %s of %s has, so it cannot be accounted for: add the model to a catalogue file", profile, name))
	}
	return p.Kind, out, nil
}

// whoHas returns in words which VMs have which slices of a card; empty: no slice is
// assigned.
func (k *Keeper) whoHas(card pci.Address) string {
	var out []string
	for _, a := range k.slicesOf(card) {
		who := "VM " + a.vm() + " has"
		if a.Phase == quarantined {
			who = "quarantined is"
		}
		out = append(out, who+" "+a.label())
	}
	return strings.Join(out, ", ")
}

// againstWhole returns the reasons why a card cannot be taken as a whole: slices of it
// exist.
func (k *Keeper) againstWhole(card *pci.Card, name string) []*gpuctlv1.Reason {
	if has := k.whoHas(card.Address); has != "" {
		return []*gpuctlv1.Reason{why("sliced", "%s is cut into slices: %s; detach them first", name, has)}
	}
	if k.Slicer == nil {
		return nil
	}
	if err := k.Slicer.Whole(card); err != nil {
		text := err.Error()
		if vfs, _ := k.Slicer.VFs(card); len(vfs) > 0 {
			text += fmt.Sprintf(" (gpuctl resize %s --functions 0)", name)
		}
		return []*gpuctlv1.Reason{why("sliced", "%s: %s", name, text)}
	}
	return nil
}

// Profiles returns the profiles of a card for the inventory, with the number of slices of
// each that may exist together. Profiles without a known memory are left out, because
// claims on them could not be accounted for. So are virtual functions of NVIDIA's cards,
// which need a vGPU type.
func (k *Keeper) Profiles(card *pci.Card) []*clusterv1.Profile {
	all, err := k.profiles(card)
	if err != nil {
		k.Log.Warn("slices of a card are not known", "card", card.Address, "err", err)
		return nil
	}
	held := map[string]uint32{}
	for _, a := range k.slicesOf(card.Address) {
		if a.Phase != quarantined {
			held[a.Slice.Profile]++
		}
	}
	var out []*clusterv1.Profile
	for _, p := range all {
		if p.Memory == 0 || k.canGive(p.Kind) != "" || p.Kind == vgpu.SRIOV && card.Main().VendorID == vendorNVIDIA {
			continue
		}
		// A slice that is being created is both in held and taken from Free.
		out = append(out, &clusterv1.Profile{Name: p.Name, Memory: p.Memory, MaxInstances: min(held[p.Name]+p.Free, maxInstances), Apart: p.Apart})
	}
	return out
}

const (
	vendorNVIDIA = 0x10de
	maxInstances = 256
)

// describeSlices adds the profiles of a card, and the VMs that have its slices.
func (k *Keeper) describeSlices(card *pci.Card, out *gpuctlv1.Card) {
	if k.Slicer == nil {
		return
	}
	all, err := k.profiles(card)
	if err != nil && out.GetMessage() == "" {
		out.Message = err.Error()
	}
	for _, p := range all {
		out.Profiles = append(out.Profiles, &gpuctlv1.SliceProfile{
			Name: p.Name, Kind: string(p.Kind), Memory: p.Memory, Max: p.Max, Existing: p.Existing, Scheduled: p.Scheduled, Free: p.Free, Why: p.Why,
		})
	}
	for _, a := range k.slicesOf(card.Address) {
		s := &gpuctlv1.Slice{
			Id: a.Slice.ID, Profile: a.Slice.Profile, Kind: string(a.Slice.Kind), Phase: phases()[a.Phase], Machine: a.UUID, MachineName: a.Name,
			Claim: a.Claim, Message: a.Message, SinceUnixMs: a.Since,
		}
		if len(a.Functions) > 0 {
			s.Function = a.Functions[0].String()
		}
		out.Slices = append(out.Slices, s)
	}
	vfs, total := k.Slicer.VFs(card)
	out.FunctionsNow, out.FunctionsMost = uint32(len(vfs)), uint32(max(total, 0))
}

// Resize sets the number of a card's virtual functions. They stay until they are resized
// again. Errors wrap ErrNotFound, ErrRefused or ErrBusy.
func (k *Keeper) Resize(ctx context.Context, r *gpuctlv1.ResizeRequest, report Report) error {
	card, name, err := k.find(ctx, r.GetGpu())
	if err != nil {
		return err
	}
	if k.Slicer == nil {
		return fmt.Errorf("gpu %s: %w: this hostd cuts no cards", name, ErrRefused)
	}
	n := int(min(r.GetFunctions(), 1<<16))
	vfs, total := k.Slicer.VFs(card)
	steps := []*gpuctlv1.PlannedStep{planned(stepResize, fmt.Sprintf("set the number of its virtual functions from %d to %d", len(vfs), n), "as many as before are made again")}
	var reasons []*gpuctlv1.Reason
	switch {
	case total == 0:
		reasons = append(reasons, why("no_sriov", "%s can have no virtual functions: it has no SR-IOV, or it is switched off in the firmware", name))
	case n > total:
		reasons = append(reasons, why("functions", "%s can have %d virtual functions at most, not %d", name, total, n))
	}
	if a := k.assignmentOf(card.Address); a != nil {
		reasons = append(reasons, why("owned", "%s is %s for VM %s", name, a.Phase, a.vm()))
	}
	if has := k.whoHas(card.Address); has != "" {
		reasons = append(reasons, why("sliced", "all functions go when their number changes, and %s", has))
	}
	if r.GetPlan() {
		report(&gpuctlv1.DeviceUpdate{Gpu: name, Plan: steps, Reasons: reasons, Done: true, Steps: uint32(len(steps))})
		return nil
	}
	if len(reasons) > 0 {
		return refusal("resize "+name, reasons)
	}
	return k.outlive(ctx, func(ctx context.Context) error {
		end, err := k.lockCard(card.Address, "a resize")
		if err != nil {
			return err
		}
		defer end()
		if k.assignmentOf(card.Address) != nil || k.whoHas(card.Address) != "" {
			return fmt.Errorf("resize %s: %w: it has been given away meanwhile", name, ErrBusy)
		}
		c := &change{k: k, card: card, steps: steps, report: report, assignment: cardAssignment{Card: card.Address, Functions: addresses(card), GPU: name}}
		err = c.step(ctx, stepResize, func(ctx context.Context) error { return k.Slicer.Resize(ctx, card, n, vgpu.Use{}) })
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		k.Event(name, "Resized", fmt.Sprintf("it has %d virtual functions", n))
		k.Cluster.Kick()
		report(k.last(c))
		return nil
	})
}

// obtainSlice does the same as obtain, for a slice.
func (k *Keeper) obtainSlice(ctx context.Context, m vm.VM, profile string, gpus []string, more string, memory uint64) (claim, gpu string, err error) {
	claim = "vm-" + random.Hex(6)
	a := cardAssignment{Claim: claim, UUID: m.UUID, Name: m.Name, Slice: &slice{Profile: profile}}
	gpu, err = k.obtainFor(ctx, &a, gpus, more, memory)
	return claim, gpu, err
}

// foundSlice returns an assignment for a virtual function that exists already.
func (k *Keeper) foundSlice(card *pci.Card, name string, f pci.Address, d vm.VM) (*cardAssignment, error) {
	all, err := k.Slicer.Instances(card)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(all, func(i vgpu.Instance) bool { return i.Kind != vgpu.Mdev && i.Function == f })
	if i < 0 {
		return nil, fmt.Errorf("virtual function %s of %s: %w: there is no vGPU on it; gpuctl attach --profile makes one", f, name, ErrRefused)
	}
	return &cardAssignment{
		Card: card.Address, Functions: []pci.Address{f}, GPU: name, UUID: d.UUID, Name: d.Name,
		Slice: &slice{ID: vgpu.NewUUID(), Profile: all[i].Profile, Kind: all[i].Kind, Kept: true},
	}, nil
}

// prepareSlice prepares a virtual function that is in a VM's definition for the VM's
// start.
func (k *Keeper) prepareSlice(ctx context.Context, d vm.VM, card *pci.Card, f pci.Address) error {
	end, err := k.await(ctx, card.Address, "the start of vm "+d.Name)
	if err != nil {
		return err
	}
	defer end()
	_, name, err := k.find(ctx, card.Address.String())
	if err != nil {
		return err
	}
	if a := k.sliceAt(f); a != nil {
		if a.UUID == d.UUID && (a.Phase == ready || a.Phase == attached) {
			return k.prepareRestart(ctx, d, a)
		}
		return refusal(fmt.Sprintf("vm %s cannot have %s", d.Name, f), []*gpuctlv1.Reason{why("owned", "%s belongs to VM %s (%s): gpuctl detach %s %s gives it back", a.label(), a.vm(), a.Phase, a.vm(), f)})
	}
	a, err := k.foundSlice(card, name, f, d)
	if err != nil {
		return fmt.Errorf("vm %s cannot have %s: %w", d.Name, f, err)
	}
	m := vm.VM{UUID: d.UUID, Name: d.Name}
	claim, _, err := k.obtainSlice(ctx, m, a.Slice.Profile, []string{name}, "", 0)
	if err != nil {
		return err
	}
	defer k.dropClaim(claim)
	a.Claim, a.Starting = claim, true
	c := &change{k: k, card: card, report: quiet, assignment: *a}
	if err = c.isolated(ctx, true); err == nil {
		err = c.take(ctx)
	}
	if err == nil {
		err = c.reset(ctx)
	}
	if err == nil {
		err = c.enter(ready)
	}
	if err != nil && k.current(&c.assignment) != nil {
		err = c.rollBack(ctx, err)
	}
	if err != nil {
		return fmt.Errorf("vm %s cannot have %s: %w", d.Name, f, err)
	}
	return nil
}

// prepareSlices prepares the virtual functions among a VM's devices for its start.
func (k *Keeper) prepareSlices(ctx context.Context, d vm.VM, cards []*pci.Card, devices []pci.Address) error {
	if k.Slicer == nil {
		return nil
	}
	for _, card := range cards {
		for _, f := range card.VFs {
			if !slices.Contains(devices, f.Address) {
				continue
			}
			if err := k.prepareSlice(ctx, d, card, f.Address); err != nil {
				k.forgetStart(d)
				return err
			}
		}
	}
	return nil
}

// forgetStart gives back the slices that were prepared for a start that is now refused.
func (k *Keeper) forgetStart(d vm.VM) {
	k.mu.Lock()
	var had []cardAssignment
	for _, a := range k.slices {
		if a.UUID == d.UUID && a.Phase == ready && a.Starting {
			had = append(had, *a)
		}
	}
	k.mu.Unlock()
	for _, a := range had {
		k.background(a)
	}
}

// adoptSlices records virtual functions that were given to VMs without gpuctl.
func (k *Keeper) adoptSlices(ctx context.Context, card *pci.Card, owners map[pci.Address]vm.VM) error {
	var errs []error
	for _, f := range card.VFs {
		if _, owned := owners[f.Address]; !owned || k.Slicer == nil || k.sliceAt(f.Address) != nil {
			continue
		}
		errs = append(errs, func() error {
			end, err := k.lockCard(card.Address, "a look after it")
			if err != nil {
				return err
			}
			defer end()
			now, err := k.Hypervisor.Owners(ctx)
			if err != nil {
				return err
			}
			d, owned := now[f.Address]
			if !owned || k.sliceAt(f.Address) != nil {
				return nil // it has changed since Reconcile asked
			}
			_, name, err := k.find(ctx, card.Address.String())
			if err != nil {
				return err
			}
			a, err := k.foundSlice(card, name, f.Address, d)
			if err != nil {
				return err
			}
			k.Log.Warn("a VM has a virtual function that nobody asked this hostd for", "gpu", name, "function", f.Address, "machine", d.Name)
			k.Event(name, "Adopted", "VM "+d.Name+" has "+a.label()+"; it was not given by gpuctl")
			return k.owned(ctx, &change{k: k, report: quiet, assignment: *a}, d)
		}())
	}
	return errors.Join(errs...)
}

// resetSlice resets a quarantined virtual function.
func (k *Keeper) resetSlice(ctx context.Context, a *cardAssignment, plan bool, report Report) error {
	steps := []*gpuctlv1.PlannedStep{
		planned(stepReset, "reset it and read it back", ""),
		planned(stepReturn, "bind it to the driver that it had", ""),
	}
	var reasons []*gpuctlv1.Reason
	if a.Phase != quarantined {
		reasons = append(reasons, why("owned", "%s belongs to VM %s (%s)", a.label(), a.vm(), a.Phase))
	}
	if plan {
		report(&gpuctlv1.DeviceUpdate{Gpu: a.label(), Plan: steps, Reasons: reasons, Done: true, Steps: uint32(len(steps))})
		return nil
	}
	if len(reasons) > 0 {
		return refusal("reset "+a.label(), reasons)
	}
	return k.outlive(ctx, func(ctx context.Context) error {
		end, err := k.lockCard(a.Card, "a reset")
		if err != nil {
			return err
		}
		defer end()
		if now := k.current(a); now == nil || now.rev != a.rev {
			return fmt.Errorf("reset %s: %w: it has changed meanwhile", a.label(), ErrBusy)
		}
		c := &change{k: k, steps: steps, report: report, assignment: *a}
		if err := c.resetQuarantined(ctx); err != nil {
			return fmt.Errorf("reset %s: %w", a.label(), err)
		}
		report(&gpuctlv1.DeviceUpdate{Gpu: a.label(), Done: true, Steps: uint32(len(steps)), StepIndex: uint32(c.at)})
		return nil
	})
}
