package mediated

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/mmio/server"
)

func why(code, format string, args ...any) *gpuctlv1.Reason {
	return &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)}
}

const lastSlot = 31

// Attach gives a VM a part for its next start. Errors wrap those of package cards.
func (k *Keeper) Attach(ctx context.Context, r *gpuctlv1.AttachRequest, report cards.Report) error {
	m, err := k.VMs.Find(ctx, r.GetMachine())
	if err != nil {
		return err
	}
	k.work.Lock()
	defer k.work.Unlock()
	gpus := k.GPUs
	if g := k.gpu(r.GetGpu()); g != nil {
		gpus = []GPU{*g}
	}
	gpus = slices.DeleteFunc(slices.Clone(gpus), func(g GPU) bool {
		return r.GetProfile() != "" && g.Profile() != r.GetProfile() || r.GetMinMemory() > g.Model.Each()
	})
	steps := []*gpuctlv1.PlannedStep{
		{Name: "claim", What: "have the cluster bind a part to a claim of VM " + m.Name, Undo: "the claim is given back"},
		{Name: "store", What: "record that VM " + m.Name + " has it from its next start on", Undo: "the record is removed"},
	}
	reasons := k.against(m, r, gpus)
	if r.GetPlan() {
		report(&gpuctlv1.DeviceUpdate{Gpu: r.GetGpu(), Machine: m.Name, Plan: steps, Reasons: reasons, Done: true, Steps: uint32(len(steps))})
		return nil
	}
	if len(reasons) > 0 {
		return fmt.Errorf("attach %s to vm %s: %w: %s", r.GetGpu(), m.Name, cards.ErrRefused, reasons[0].GetMessage())
	}
	a := assignment{
		ID: newID(), Profile: gpus[0].Profile(), Weight: max(1, int(r.GetWeight())), Mode: r.GetMode(), UUID: m.UUID, Name: m.Name,
		Claim: "vm-" + newID()[len("mgpu-"):], Phase: ready,
	}
	if err := k.obtain(ctx, &a, gpus, r.GetExpr()); err != nil {
		return err
	}
	defer k.dropClaim(a.Claim)
	if a.Slot = k.slot(m.UUID); a.Slot == 0 { // it has got others meanwhile
		return fmt.Errorf("attach %s to vm %s: %w: it has no slot left for another part", r.GetGpu(), m.Name, cards.ErrRefused)
	}
	report(&gpuctlv1.DeviceUpdate{Gpu: a.GPU, Machine: m.Name, Step: "claim", StepIndex: 1, Steps: 2})
	a.Memory = k.gpu(a.GPU).Model.Each()
	if err := k.put(a); err != nil {
		return err
	}
	k.Event(a.GPU, "Attached", "VM "+m.Name+" has a part ("+a.Profile+") from its next start on")
	report(&gpuctlv1.DeviceUpdate{Gpu: a.GPU, Machine: m.Name, Step: "store", StepIndex: 2, Steps: 2, Done: true, Card: k.card(a.GPU)})
	return nil
}

func (k *Keeper) card(gpu string) *gpuctlv1.Card {
	for _, c := range k.Cards() {
		if c.GetGpu() == gpu {
			return c
		}
	}
	return nil
}

// against returns the reasons why a VM cannot get a part.
func (k *Keeper) against(m vm.Info, r *gpuctlv1.AttachRequest, gpus []GPU) (out []*gpuctlv1.Reason) {
	switch {
	case m.Type != "hvm":
		out = append(out, why("type", "VM %s is of type %s, and only an HVM guest has a PCI bus on which it finds a mediated GPU", m.Name, m.Type))
	case m.Active():
		out = append(out, why("running", "VM %s is %s: it looks for a mediated GPU only when it starts; shut it down first", m.Name, m.State))
	}
	if r.GetMode() != "" && r.GetMode() != "lazy" && r.GetMode() != "eager" && r.GetMode() != "para" {
		out = append(out, why("mode", "mode %q is not lazy, eager or para", r.GetMode()))
	}
	if r.GetWeight() > maxWeight {
		out = append(out, why("weight", "weight %d is not from 1 to %d", r.GetWeight(), maxWeight))
	}
	switch {
	case len(gpus) == 0:
		out = append(out, why("profile", "no mediated GPU of this host has that profile or that much memory: gpuctl cards -o wide lists them"))
	case !slices.ContainsFunc(gpus, k.works):
		out = append(out, why("health", "mediated GPU %s: nobody can use it: gpuctl cards says why", gpus[0].Name))
	case !slices.ContainsFunc(gpus, func(g GPU) bool { return k.works(g) && k.hasRoom(g) }):
		out = append(out, why("busy", "all parts that it could have are taken: gpuctl cards lists which VM has which"))
	}
	if k.slot(m.UUID) == 0 {
		out = append(out, why("count", "VM %s has no slot left for another part", m.Name))
	}
	return out
}

// works reports whether a GPU's process answered when it was asked last.
func (k *Keeper) works(g GPU) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.health[g.Name] == ""
}

// hasRoom reports whether a GPU has a part that no VM has.
func (k *Keeper) hasRoom(g GPU) bool {
	return len(k.of(func(a *assignment) bool { return a.GPU == g.Name })) < g.Model.Parts
}

const (
	maxWeight  = timeshare.MaxWeight
	mostPerVM  = 4
	lowestSlot = lastSlot - mostPerVM + 1
)

// slot returns a slot of a VM's PCI bus that no part has; 0: there is none.
func (k *Keeper) slot(uuid string) uint8 {
	taken := map[uint8]bool{}
	for _, a := range k.of(func(a *assignment) bool { return a.UUID == uuid }) {
		taken[a.Slot] = true
	}
	for s := uint8(lastSlot); s >= lowestSlot; s-- {
		if !taken[s] {
			return s
		}
	}
	return 0
}

// Find returns the parts that a request to detach is about: of a VM, and of the GPU or
// with the id that it names.
func (k *Keeper) find(uuid, ref string) []assignment {
	g := k.gpu(ref)
	return k.of(func(a *assignment) bool {
		return a.UUID == uuid && (ref == "" || a.ID == ref || g != nil && a.GPU == g.Name)
	})
}

// Owns reports whether a request to detach is about a part of a mediated GPU.
func (k *Keeper) Owns(ctx context.Context, machine, ref string) bool {
	if len(k.of(func(*assignment) bool { return true })) == 0 {
		return k.Has(ref)
	}
	m, err := k.owner(ctx, machine)
	return k.Has(ref) || err == nil && len(k.find(m.UUID, ref)) > 0
}

// owner finds a VM by its name or UUID: also one that has parts and that libvirt does not have any
// more.
func (k *Keeper) owner(ctx context.Context, ref string) (vm.VM, error) {
	m, err := k.VMs.Find(ctx, ref)
	if !errors.Is(err, cards.ErrNotFound) {
		return m.VM, err
	}
	had := k.of(func(a *assignment) bool { return a.UUID == ref || a.Name == ref })
	if len(had) == 0 {
		return vm.VM{}, err
	}
	if slices.ContainsFunc(had, func(a assignment) bool { return a.UUID != had[0].UUID }) {
		return vm.VM{}, fmt.Errorf("%w: several VMs that had that name have parts; say the UUID", err)
	}
	return vm.VM{UUID: had[0].UUID, Name: had[0].Name}, nil
}

// Detach takes a part back. From a VM that runs only if the request says that nobody has
// confirmed that it has let go: the VM reads ones then, as of a card that was pulled.
func (k *Keeper) Detach(ctx context.Context, r *gpuctlv1.DetachRequest, report cards.Report) error {
	m, err := k.owner(ctx, r.GetMachine())
	if err != nil {
		return err
	}
	k.work.Lock()
	defer k.work.Unlock()
	all := k.find(m.UUID, r.GetGpu())
	switch {
	case len(all) == 0:
		return fmt.Errorf("vm %s: part of gpu %s: %w", m.Name, r.GetGpu(), cards.ErrNotFound)
	case len(all) > 1:
		return fmt.Errorf("vm %s: %w: it has %d parts; name one by its id (gpuctl cards)", m.Name, cards.ErrInvalid, len(all))
	}
	a := all[0]
	steps := []*gpuctlv1.PlannedStep{
		{Name: "detach", What: "take the part back and scrub it; VM " + m.Name + " reads ones"},
		{Name: "return", What: "forget the part; its claim ends"},
	}
	var reasons []*gpuctlv1.Reason
	if a.moving() {
		reasons = append(reasons, why("migration", "VM %s is being moved by migration %s: wait for its end, or gpuctl migrations abort %s", m.Name, a.Migration, a.Migration))
	}
	if a.Phase != ready && !r.GetUnconfirmed() {
		reasons = append(reasons, why("running", "VM %s uses it and cannot be asked to release it: shut it down first, or say --unconfirmed", m.Name))
	}
	if r.GetPlan() {
		report(&gpuctlv1.DeviceUpdate{Gpu: a.GPU, Machine: m.Name, Plan: steps, Reasons: reasons, Done: true, Steps: 2})
		return nil
	}
	if len(reasons) > 0 {
		return fmt.Errorf("detach %s from vm %s: %w: %s", a.GPU, m.Name, cards.ErrRefused, reasons[0].GetMessage())
	}
	a.Over = true
	if err := k.release(ctx, a); err != nil {
		return err
	}
	k.Event(a.GPU, "Detached", "VM "+m.Name+" has given its part ("+a.Profile+") back")
	report(&gpuctlv1.DeviceUpdate{Gpu: a.GPU, Machine: m.Name, Step: "return", StepIndex: 2, Steps: 2, Done: true, Card: k.card(a.GPU)})
	return nil
}

// release takes a part back from its domain. It is repeated until it has succeeded.
func (k *Keeper) release(ctx context.Context, a assignment) error {
	if a.Domain != 0 {
		a.Phase = detaching
		if err := k.put(a); err != nil {
			return err
		}
		p, err := k.Process(ctx, a.GPU)
		if err == nil {
			err = p.Detach(ctx, a.part())
		}
		if err == nil && a.Old != "" {
			err = p.Detach(ctx, a.Old)
		}
		if p == nil && k.gpu(a.GPU) == nil {
			err = nil // it is not configured any more, and no process has it
		}
		if err != nil {
			return fmt.Errorf("take %s back from vm %s: %w", a.GPU, a.vm(), err)
		}
	}
	k.mu.Lock()
	delete(k.seen, a.part())
	k.mu.Unlock()
	if a.Over {
		return k.drop(a.ID)
	}
	a.rest()
	return k.put(a)
}

// rest is the record of a part whose VM does not run.
func (a *assignment) rest() {
	a.Phase, a.Domain, a.Config, a.Old, a.Astray = ready, 0, nil, "", false
	if !a.Anew { // the migration goes on
		a.Migration = ""
	}
}

// PrepareStart makes sure that a VM's parts can be made when its domain exists. An error
// says why the VM must not start.
func (k *Keeper) PrepareStart(ctx context.Context, m vm.VM) error {
	for _, a := range k.of(func(a *assignment) bool { return a.UUID == m.UUID }) {
		p, err := k.Process(ctx, a.GPU)
		if err == nil {
			_, err = p.List(ctx)
		}
		if err != nil {
			return fmt.Errorf("vm %s cannot have its part of gpu %s: %w: %w", m.Name, a.GPU, cards.ErrRefused, err)
		}
	}
	k.Kick()
	return nil
}

// Arrived makes sure that a VM has its parts that has arrived and has not run here yet. An error
// says why it must not run here; it goes on where it was then.
func (k *Keeper) Arrived(ctx context.Context, m vm.VM) error {
	coming := func() []assignment {
		return k.of(func(a *assignment) bool { return a.UUID == m.UUID && a.comes() })
	}
	if len(coming()) == 0 {
		return nil
	}
	err := k.Reconcile(ctx)
	left := coming()
	if len(left) == 0 {
		return nil
	}
	domains, look := k.Domains.Of(ctx)
	if d, runs := domains[m.UUID]; look == nil && (!runs || d.Ran) {
		return nil // it is not an arrival
	}
	err = errors.Join(err, look)
	if err == nil {
		err = errors.New("it is not there yet")
	}
	return fmt.Errorf("vm %s must not run here: its part of gpu %s: %w: %w", m.Name, left[0].GPU, cards.ErrRefused, err)
}

// Reconcile compares the record with the domains and with the processes, and makes them
// agree.
func (k *Keeper) Reconcile(ctx context.Context) error {
	k.work.Lock()
	defer k.work.Unlock()
	domains, err := k.Domains.Of(ctx)
	if err != nil {
		return err
	}
	var errs []error
	has := map[string]server.Status{}
	silent := map[string]bool{} // GPUs whose process does not answer: what it has is unknown
	for _, g := range k.GPUs {
		if err := k.look(ctx, g.Name, has); err != nil {
			errs = append(errs, err)
			silent[g.Name] = true
		}
	}
	k.mu.Lock()
	k.seen = maps.Clone(has)
	k.mu.Unlock()
	until := map[string]time.Time{}
	for _, a := range k.of(func(*assignment) bool { return true }) {
		d, runs := domains[a.UUID]
		if !silent[a.GPU] {
			errs = append(errs, k.settle(ctx, a, d, runs, has))
			continue
		}
		if (a.Phase == attached || a.moving()) && runs {
			continue // it may have what the VM uses
		}
		// All that is asked for of its process together: VMs that have parts of others start.
		if until[a.GPU].IsZero() {
			until[a.GPU] = time.Now().Add(hangsFor)
		}
		brief, cancel := context.WithDeadline(ctx, until[a.GPU])
		errs = append(errs, k.settle(brief, a, d, runs, has))
		cancel()
	}
	k.Settled.Store(true)
	return errors.Join(errs...)
}

const (
	answersWithin = 5 * time.Second // a process that is asked what it has
	hangsFor      = time.Second     // the same, if it did not say so the last time
)

// look asks a GPU's process, and takes back parts that no record knows.
func (k *Keeper) look(ctx context.Context, gpu string, has map[string]server.Status) error {
	k.mu.Lock()
	limit := answersWithin
	if k.health[gpu] != "" {
		limit = hangsFor
	}
	k.mu.Unlock()
	p, err := k.Process(ctx, gpu)
	var all []server.Status
	if err == nil {
		asked, cancel := context.WithTimeout(ctx, limit)
		all, err = p.List(asked)
		cancel()
	}
	k.mu.Lock()
	k.health[gpu] = ""
	if err != nil {
		k.health[gpu] = "nobody can use it: " + err.Error()
	}
	k.mu.Unlock()
	if err != nil {
		return fmt.Errorf("mediated gpu %s: %w", gpu, err)
	}
	for _, st := range all {
		k.mu.Lock()
		known := k.knows(st.ID)
		k.mu.Unlock()
		if known {
			has[st.ID] = st
			continue
		}
		k.Log.Warn("a part that nobody has on record is taken back", "gpu", gpu, "part", st.ID, "domain", st.Domain)
		if err := p.Detach(ctx, st.ID); err != nil {
			return fmt.Errorf("mediated gpu %s: %w", gpu, err)
		}
	}
	return nil
}

// settle makes one part agree with its VM's domain.
func (k *Keeper) settle(ctx context.Context, a assignment, d Domain, runs bool, has map[string]server.Status) error {
	st, exists := has[a.part()]
	switch {
	case a.Anew:
		if ended, err := k.settleAnew(ctx, &a, runs); ended || err != nil {
			return err
		}
	case a.moving():
		return k.settleMoving(ctx, a, d, runs, st, exists)
	}
	switch {
	case a.Phase == detaching,
		a.Domain != 0 && (!runs || d.ID != a.Domain),
		a.Domain == 0 && exists:
		if a.Domain == 0 {
			a.Domain = st.Domain
		}
		a.Message = ""
		if err := k.release(ctx, a); err != nil || a.Over || !runs {
			return err
		}
		a.Phase, a.Domain = ready, 0
		return k.start(ctx, a, d)
	case a.Phase == ready && runs:
		return k.start(ctx, a, d)
	case a.Phase == attaching && exists && st.Lost == "":
		a.Phase = attached
		return k.put(a)
	case a.Phase == attaching:
		return k.start(ctx, a, d)
	case a.Phase == attached && (!exists || st.Lost != "") && a.Message == "":
		a.Message = "its part is lost and reads as ones until the VM is started anew"
		if st.Lost != "" {
			a.Message += ": " + st.Lost
		}
		k.Event(a.GPU, "PartLost", "VM "+a.vm()+": "+a.Message)
		return k.put(a)
	case a.Phase == attached && exists:
		return k.unpark(ctx, a, st)
	}
	return nil
}

// start gives the domain of a VM that starts its part. If the domain runs already, it gets
// none: it has looked for its devices without.
func (k *Keeper) start(ctx context.Context, a assignment, d Domain) error {
	if !d.Paused || d.Ran || !d.HVM {
		return k.late(a, d)
	}
	a.Phase, a.Domain, a.Message = attaching, d.ID, ""
	if err := k.put(a); err != nil {
		return err
	}
	p, err := k.Process(ctx, a.GPU)
	if err == nil {
		err = p.Attach(ctx, server.Part{
			ID: a.part(), Name: a.Name, Owner: a.UUID, Domain: d.ID, Slot: a.Slot, Memory: a.Memory, Weight: a.Weight, Mode: a.Mode, Guest: guestEnd,
		})
	}
	if errors.Is(err, server.ErrEarly) { // Run looks again soon
		a.Phase, a.Domain = ready, 0
		return errors.Join(err, k.put(a))
	}
	if err == nil {
		err = k.inTime(ctx, a)
	}
	if err != nil {
		a.Message = err.Error()
		if undo := k.release(ctx, a); undo != nil {
			return errors.Join(err, undo)
		}
		k.Event(a.GPU, "NotAttached", "VM "+a.vm()+" starts without its part: "+err.Error())
		return fmt.Errorf("vm %s: its part of gpu %s: %w", a.vm(), a.GPU, err)
	}
	a.Phase = attached
	if err := k.put(a); err != nil {
		return err
	}
	k.Event(a.GPU, "Started", fmt.Sprintf("VM %s has started with its part (%s)", a.vm(), a.Profile))
	return nil
}

// guestEnd is the end of a VM's memory as far as it is checked before Xen is asked for a
// page: Xen knows which pages exist.
const guestEnd = 1 << 40

// inTime returns an error if the domain has run before its part was there.
func (k *Keeper) inTime(ctx context.Context, a assignment) error {
	domains, err := k.Domains.Of(ctx)
	if err != nil {
		return err
	}
	if d, runs := domains[a.UUID]; !runs || d.ID != a.Domain || d.Ran {
		return errLate
	}
	return nil
}

func (k *Keeper) late(a assignment, d Domain) error {
	const message = "the VM runs without its part: start it anew"
	if a.Message == message {
		return nil
	}
	a.Message = message
	k.Event(a.GPU, "NotAttached", fmt.Sprintf("VM %s (domain %d): %s", a.vm(), d.ID, message))
	a.Phase, a.Domain = ready, 0
	return k.put(a)
}
