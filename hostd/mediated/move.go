package mediated

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/mmio/server"
)

// Source is the other host of a migration, of which contents are taken.
type Source interface {
	// Contents seals the part at a slot of the VM, and writes its contents.
	Contents(ctx context.Context, slot uint8, w io.Writer) error
	// Give ends its use there for good, if its contents are those of the seal.
	Give(ctx context.Context, slot uint8, seal string) error
}

// knows reports whether a part of the GPU's process is on record. The caller holds k.mu.
func (k *Keeper) knows(id string) bool {
	for _, a := range k.parts {
		if a.part() == id || a.Old == id {
			return true
		}
	}
	return false
}

// Parts returns a VM's parts, as a migration needs to know them.
func (k *Keeper) Parts(uuid string) (out []*gpuctlv1.SitePart) {
	for _, a := range k.of(func(a *assignment) bool { return a.UUID == uuid }) {
		out = append(out, k.sitePart(a))
	}
	return out
}

func (k *Keeper) sitePart(a assignment) *gpuctlv1.SitePart {
	p := &gpuctlv1.SitePart{
		Gpu: k.Cluster.HostName() + "/" + a.GPU, Lost: a.Astray, Anew: a.Anew, Slot: uint32(a.Slot), Memory: a.Memory, Weight: uint32(a.Weight), Mode: a.Mode, Config: a.Config,
	}
	if g := k.gpu(a.GPU); g != nil {
		p.Channels = uint32(g.Model.Channels())
	}
	return p
}

// Room returns the GPUs that have free parts.
func (k *Keeper) Room() (out []*gpuctlv1.SitePartRoom) {
	for _, c := range k.Cards() {
		g := k.gpu(c.GetGpu())
		k.mu.Lock()
		sick := k.health[c.GetGpu()] != ""
		k.mu.Unlock()
		if p := c.GetProfiles()[0]; g != nil && p.GetFree() > 0 && !sick {
			out = append(out, &gpuctlv1.SitePartRoom{
				Gpu: k.Cluster.HostName() + "/" + c.GetGpu(), Memory: p.GetMemory(), Channels: uint32(g.Model.Channels()), Free: p.GetFree(),
			})
		}
	}
	return out
}

// ParkParts has no command of a VM's parts begin any more, and returns them. It may be
// repeated, also when the VM has left. A part that does not work is not parked: where the VM
// goes, it has one when it is started anew. A part without which the VM has run here is told
// as lost.
func (k *Keeper) ParkParts(ctx context.Context, m vm.VM, migration string) (out []*gpuctlv1.SitePart, err error) {
	k.lookAgain(ctx, m)
	k.work.Lock()
	defer k.work.Unlock()
	for _, old := range k.of(func(a *assignment) bool { return a.UUID == m.UUID }) {
		domains, err := k.Domains.Of(ctx)
		if err != nil {
			return nil, err
		}
		d, runs := domains[m.UUID]
		now := k.of(func(a *assignment) bool { return a.ID == old.ID })
		if len(now) == 0 {
			continue // it was given back while another one was parked
		}
		a := now[0]
		if a.moving() && a.Migration != migration {
			return nil, fmt.Errorf("part of gpu %s for vm %s: %w: migration %s moves it", a.GPU, a.vm(), cards.ErrBusy, a.Migration)
		}
		if err := k.went(ctx, &a, d, runs); err != nil {
			return nil, err
		}
		a.Anew = a.Anew || !a.moving() && !runs && a.Phase == ready
		a.Migration = migration
		if a.Phase == attached && a.Message == "" {
			// Recorded first: whoever finds it parked knows why. Without a configuration it has to be
			// parked once more.
			a.Phase, a.Config = parked, nil
			if err := k.put(a); err != nil {
				return nil, err
			}
		}
		if a.Phase == parked && len(a.Config) == 0 {
			if a.Config, err = k.park(ctx, a); err != nil {
				return nil, err
			}
		}
		if err := k.put(a); err != nil {
			return nil, err
		}
		out = append(out, k.sitePart(a))
	}
	return out, nil
}

// went finds out whether a VM that has come here, and is to go back, has run without its part. If
// nobody can say that now, there is an error.
func (k *Keeper) went(ctx context.Context, a *assignment, d Domain, runs bool) error {
	if !a.moving() || !runs || a.Phase == ready || a.Astray || a.Anew {
		return nil
	}
	if d.ID != a.Domain {
		return k.astray(a, without) // it has something else, or nothing
	}
	if a.Phase != awaiting {
		return nil
	}
	p, err := k.Process(ctx, a.GPU)
	if err != nil {
		return err
	}
	has, err := k.statuses(ctx, p)
	if err != nil {
		return err
	}
	if st, exists := has[a.part()]; !exists || st.Lost != "" {
		return k.astray(a, "its accesses were answered by nobody: "+st.Lost)
	}
	return nil
}

// park parks a part that is on record as parked, and returns its configuration space. The caller holds
// k.work, but not meanwhile: the VM decides how long its command runs, and others' VMs start.
func (k *Keeper) park(ctx context.Context, a assignment) ([]byte, error) {
	p, err := k.Process(ctx, a.GPU)
	if err != nil {
		return nil, err
	}
	k.work.Unlock()
	config, err := p.Park(ctx, a.part())
	k.work.Lock()
	if err != nil {
		return nil, fmt.Errorf("part of gpu %s for vm %s: %w", a.GPU, a.vm(), err)
	}
	if len(k.of(func(b *assignment) bool {
		return b.ID == a.ID && b.part() == a.part() && b.Phase == parked && b.Migration == a.Migration
	})) == 0 {
		return nil, fmt.Errorf("part of gpu %s for vm %s: %w: it was changed while it was parked", a.GPU, a.vm(), cards.ErrBusy)
	}
	return config, nil
}

// ExpectParts reserves such parts for a VM that is to arrive. Contents that this host has of
// the same parts are kept.
func (k *Keeper) ExpectParts(ctx context.Context, m vm.VM, migration string, parts []*gpuctlv1.SitePart) error {
	k.work.Lock()
	defer k.work.Unlock()
	for _, p := range parts {
		domains, err := k.Domains.Of(ctx)
		if err != nil {
			return err
		}
		d, runs := domains[m.UUID]
		mine := k.of(func(a *assignment) bool { return a.UUID == m.UUID && uint32(a.Slot) == p.GetSlot() })
		if len(mine) == 0 {
			if err := k.expect(ctx, m, migration, p); err != nil {
				return err
			}
			continue
		}
		a := mine[0]
		if a.moving() && a.Migration != migration {
			return fmt.Errorf("part of gpu %s for vm %s: %w: migration %s moves it", a.GPU, a.vm(), cards.ErrBusy, a.Migration)
		}
		a.Migration = migration
		a.Anew = a.Anew || p.GetAnew() && a.Phase == ready
		if p.GetLost() && a.Phase != ready && (!runs || d.ID != a.Domain) {
			if err := k.lose(ctx, a, "it ran on the other host without its part"); err != nil {
				return err
			}
			continue
		}
		if a.Phase == parked && (!runs || d.ID != a.Domain) { // the VM has left, and comes back in another domain
			if a.Old == "" {
				a.Old = a.part()
			} else if err := k.forgetPart(ctx, a); err != nil {
				return err
			}
			a.Phase, a.Domain, a.Serial = expected, 0, a.Serial+1
		}
		if a.Phase == expected {
			if a.Config, err = k.configOf(ctx, a, p.GetConfig()); err != nil {
				return err
			}
		}
		if err := k.put(a); err != nil {
			return err
		}
	}
	k.Kick()
	return nil
}

// configOf is the configuration space that the VM has when it comes: that of the contents
// that are valid. These may be here, and it may have moved its BARs since it was parked.
func (k *Keeper) configOf(ctx context.Context, a assignment, there []byte) ([]byte, error) {
	if a.Old == "" {
		return there, nil
	}
	p, err := k.Process(ctx, a.GPU)
	if err != nil {
		return nil, err
	}
	has, err := k.statuses(ctx, p)
	if err != nil {
		return nil, err
	}
	if own(has[a.Old]) {
		return has[a.Old].Config, nil
	}
	return there, nil
}

// own reports whether a part of this host has valid contents.
func own(st server.Status) bool {
	return st.ID != "" && st.Lost == "" && (st.State == server.Parked || st.State == server.Sealed)
}

// forgetPart ends the part of a domain that has ended.
func (k *Keeper) forgetPart(ctx context.Context, a assignment) error {
	p, err := k.Process(ctx, a.GPU)
	if err != nil {
		return err
	}
	return p.Detach(ctx, a.part())
}

// expect makes the record of a part that comes.
func (k *Keeper) expect(ctx context.Context, m vm.VM, migration string, p *gpuctlv1.SitePart) error {
	var gpus []GPU
	for _, g := range k.GPUs {
		if g.Model.Each() == p.GetMemory() && uint32(g.Model.Channels()) == p.GetChannels() {
			gpus = append(gpus, g)
		}
	}
	if len(gpus) == 0 || p.GetSlot() < 1 || p.GetSlot() > lastSlot || len(p.GetConfig()) > 4096 || p.GetWeight() > maxWeight {
		return fmt.Errorf("vm %s: %w: no mediated GPU of this host has parts with %d bytes and %d channels", m.Name, cards.ErrRefused, p.GetMemory(), p.GetChannels())
	}
	a := assignment{
		ID: newID(), Profile: gpus[0].Profile(), Weight: max(1, int(p.GetWeight())), Mode: p.GetMode(), UUID: m.UUID, Name: m.Name,
		Claim: "vm-" + newID()[len("mgpu-"):], Phase: expected, Slot: uint8(p.GetSlot()), Migration: migration, Config: p.GetConfig(), Memory: p.GetMemory(),
		Anew: p.GetAnew(),
	}
	if len(a.Config) == 0 { // it did not work where the VM was, or the VM is started anew
		a.Phase = ready
	}
	if err := k.obtain(ctx, &a, gpus, ""); err != nil {
		return err
	}
	defer k.dropClaim(a.Claim)
	if len(k.of(func(b *assignment) bool { return b.UUID == a.UUID && b.Slot == a.Slot })) > 0 {
		return fmt.Errorf("vm %s: part at slot %d: %w: it has got one meanwhile", m.Name, a.Slot, cards.ErrBusy)
	}
	return k.put(a)
}

// settleMoving makes a part of a VM that moves agree with the VM's domain, and ends the move
// when the migration has ended.
func (k *Keeper) settleMoving(ctx context.Context, a assignment, d Domain, runs bool, st server.Status, exists bool) error {
	if k.Over != nil {
		if over, here := k.Over(ctx, a.Migration); over {
			return k.settleOver(ctx, a, d, runs, here)
		}
	}
	switch {
	case a.comes() && runs, a.Phase == awaiting && runs && d.ID == a.Domain && !exists:
		return k.arrive(ctx, a, d)
	case a.Phase == awaiting && (!runs || d.ID != a.Domain): // the arrival has failed
		if err := k.forgetPart(ctx, a); err != nil {
			return err
		}
		a.Phase, a.Domain, a.Serial, a.Message = expected, 0, a.Serial+1, ""
		if err := k.put(a); err != nil || !runs {
			return err
		}
		return k.arrive(ctx, a, d)
	case a.Phase == awaiting && exists && st.Lost != "":
		return k.astray(&a, "its accesses were answered by nobody: "+st.Lost)
	case a.Phase == attached && (!exists || st.Lost != "") && a.Message == "":
		return k.lost(a, st.Lost)
	case a.Phase == attached && exists:
		return k.unpark(ctx, a, st)
	}
	return nil
}

// unpark has a part work that was parked after it was to work again: who parks it does not hold k.work.
func (k *Keeper) unpark(ctx context.Context, a assignment, st server.Status) error {
	if st.State != server.Parked || st.Lost != "" {
		return nil
	}
	p, err := k.Process(ctx, a.GPU)
	if err != nil {
		return err
	}
	return goOn(ctx, p, a)
}

// goOnFor is how long a part's command is waited for by who holds k.work.
const goOnFor = time.Second / 2

// goOn has a part work again. That is when the VM's command that runs has ended, which is waited for for a
// moment only, as others' VMs start. It may be repeated.
func goOn(ctx context.Context, p Process, a assignment) error {
	ctx, cancel := context.WithTimeout(ctx, goOnFor)
	defer cancel()
	return p.Resume(ctx, a.part())
}

// settleAnew ends what is left of a migration of a VM that is started anew, if it has ended. Until
// then its parts are those of any VM that starts.
func (k *Keeper) settleAnew(ctx context.Context, a *assignment, runs bool) (ended bool, err error) {
	if k.Over == nil {
		return false, nil
	}
	over, here := k.Over(ctx, a.Migration)
	switch {
	case !over:
		return false, nil
	case here || runs:
		a.Migration, a.Anew = "", false
		return false, k.put(*a)
	}
	a.Over = true
	if a.Domain == 0 {
		a.Domain = noDomain
	}
	return true, k.release(ctx, *a)
}

// arrive gives the domain of a VM that arrives a part whose accesses wait.
func (k *Keeper) arrive(ctx context.Context, a assignment, d Domain) error {
	if d.Ran || !d.HVM {
		return k.astray(&a, without)
	}
	p, err := k.Process(ctx, a.GPU)
	if err != nil {
		return err
	}
	a.Phase, a.Domain = awaiting, d.ID
	if err := k.put(a); err != nil {
		return err
	}
	err = p.Attach(ctx, server.Part{
		ID: a.part(), Name: a.Name, Owner: a.UUID, Domain: d.ID, Slot: a.Slot, Memory: a.Memory, Weight: a.Weight, Mode: a.Mode, Guest: guestEnd,
		Await: true, Config: a.Config,
	})
	if err == nil || errors.Is(err, server.ErrExists) {
		err = k.inTime(ctx, a)
	}
	if err == nil {
		return nil
	}
	if undo := p.Detach(ctx, a.part()); undo != nil {
		return errors.Join(err, undo)
	}
	a.Phase, a.Domain, a.Serial = expected, 0, a.Serial+1
	if errors.Is(err, errLate) {
		return k.astray(&a, without)
	}
	return errors.Join(err, k.put(a))
}

const without = "it ran here before its part was there"

// astray records that a VM has run here without its part. What it has written there since is
// nowhere, so nobody may give it the contents from before.
func (k *Keeper) astray(a *assignment, how string) error {
	a.Phase, a.Domain, a.Config, a.Astray, a.Message = expected, 0, nil, true, "its contents are lost, as "+how+": start it anew"
	k.Event(a.GPU, "PartLost", "VM "+a.vm()+": "+a.Message)
	return k.put(*a)
}

// lose ends a part whose contents are not valid any more. The VM reads ones until it is started
// anew.
func (k *Keeper) lose(ctx context.Context, a assignment, how string) error {
	p, err := k.Process(ctx, a.GPU)
	if err != nil {
		return err
	}
	old, migration, part := a.Old, a.Migration, a.part()
	a.rest()
	a.Migration, a.Message = migration, "its contents are lost, as "+how+": start it anew"
	k.Event(a.GPU, "PartLost", "VM "+a.vm()+": "+a.Message)
	if err := k.put(a); err != nil { // first: then they are not valid, whatever comes
		return err
	}
	for _, id := range []string{part, old} {
		if id == "" {
			continue
		}
		if err := p.Detach(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// lost records that a VM reads ones.
func (k *Keeper) lost(a assignment, how string) error {
	a.Message = "its part is lost and reads as ones until the VM is started anew"
	if how != "" {
		a.Message += ": " + how
	}
	k.Event(a.GPU, "PartLost", "VM "+a.vm()+": "+a.Message)
	return k.put(a)
}

// settleOver ends what is left of a migration that has ended without telling this host.
func (k *Keeper) settleOver(ctx context.Context, a assignment, d Domain, runs, here bool) error {
	a.Over = !here && !runs
	switch {
	case a.Phase == attached && runs, a.Phase == ready:
		if a.Over {
			break
		}
		a.Migration, a.Config = "", nil
		return k.dropOld(ctx, a)
	case a.Phase == parked && runs && d.ID == a.Domain:
		p, err := k.Process(ctx, a.GPU)
		if err == nil {
			err = goOn(ctx, p, a)
		}
		a.Phase, a.Migration, a.Config = attached, "", nil
		if errors.Is(err, server.ErrGiven) || errors.Is(err, server.ErrRefused) || errors.Is(err, server.ErrNotFound) {
			return k.lost(a, err.Error())
		}
		if err != nil {
			return err
		}
		return k.put(a)
	}
	lost := runs && a.Phase != ready
	if a.Domain == 0 && (a.Phase == expected || a.Old != "") {
		a.Domain = d.ID // so that what there may be in the process is taken back
		if !runs {
			a.Domain = noDomain
		}
	}
	if err := k.release(ctx, a); err != nil || !lost {
		return err
	}
	a.rest()
	a.Message = "its contents did not come: the VM runs without its part; start it anew"
	k.Event(a.GPU, "PartLost", "VM "+a.vm()+": "+a.Message)
	return k.put(a)
}

// noDomain is no domain's id: Xen's begin anew before.
const noDomain = 0x7fff

// dropOld ends the part of the domain that was here before.
func (k *Keeper) dropOld(ctx context.Context, a assignment) error {
	if a.Old != "" {
		p, err := k.Process(ctx, a.GPU)
		if err == nil {
			err = p.Detach(ctx, a.Old)
		}
		if err != nil {
			return err
		}
		a.Old = ""
	}
	return k.put(a)
}

// TakeParts has the parts of a VM that is on this host work. Their contents are here, or are
// brought from the other host of the migration, which gives them first.
func (k *Keeper) TakeParts(ctx context.Context, m vm.VM, migration string, from Source) error {
	k.lookAgain(ctx, m)
	for _, a := range k.of(func(a *assignment) bool { return a.UUID == m.UUID && a.moving() && a.Phase != ready }) {
		if a.Migration != migration {
			return fmt.Errorf("part of gpu %s for vm %s: %w: migration %s moves it", a.GPU, a.vm(), cards.ErrBusy, a.Migration)
		}
		if err := k.take(ctx, a, from); err != nil {
			return fmt.Errorf("part of gpu %s for vm %s: %w", a.GPU, a.vm(), err)
		}
	}
	return nil
}

// lookAgain reconciles, as the VM may have come just now. An error may be about others.
func (k *Keeper) lookAgain(ctx context.Context, m vm.VM) {
	if err := k.Reconcile(ctx); err != nil {
		k.Log.Debug("before parts of a VM move", "vm", m.Name, "err", err)
	}
}

// homeless reports whether a part has no domain that could use it, although its VM has come home:
// it ran on this host, or on its way, without it.
func (k *Keeper) homeless(ctx context.Context, a assignment) (bool, error) {
	if !a.Astray && a.Phase != parked {
		return false, nil
	}
	domains, err := k.Domains.Of(ctx)
	if err != nil {
		return false, err
	}
	d, runs := domains[a.UUID]
	if a.Phase == parked && !runs {
		return false, fmt.Errorf("%w: the VM is not here", cards.ErrBusy)
	}
	return a.Astray && a.Old != "" || a.Phase == parked && d.ID != a.Domain, nil
}

// take has one part work. Nobody waits for it but this migration: contents take long.
func (k *Keeper) take(ctx context.Context, a assignment, from Source) error {
	if lost, err := k.homeless(ctx, a); err != nil {
		return err
	} else if lost {
		k.work.Lock()
		defer k.work.Unlock()
		return k.lose(ctx, a, "it came back without its part being there")
	}
	p, err := k.Process(ctx, a.GPU)
	if err != nil {
		return err
	}
	has, err := k.statuses(ctx, p)
	if err != nil {
		return err
	}
	st, exists := has[a.part()]
	switch {
	case a.Phase == expected:
		return fmt.Errorf("%w: the VM is not here, or ran before its part was there (%s)", cards.ErrRefused, a.Message)
	case !exists || st.Lost != "":
		return fmt.Errorf("%w: its process has lost it: %s", cards.ErrRefused, st.Lost)
	case a.Phase == awaiting && st.State != server.Served:
		if err := k.fill(ctx, p, a, st, has[a.Old], from); err != nil {
			return err
		}
	}
	if err := p.Resume(ctx, a.part()); err != nil {
		return err
	}
	k.work.Lock()
	defer k.work.Unlock()
	if now := k.of(func(b *assignment) bool { return b.ID == a.ID }); len(now) != 1 || now[0].part() != a.part() {
		return fmt.Errorf("%w: the VM's domain has ended meanwhile", cards.ErrBusy)
	}
	a.Phase, a.Message = attached, ""
	return k.dropOld(ctx, a)
}

func (k *Keeper) statuses(ctx context.Context, p Process) (map[string]server.Status, error) {
	all, err := p.List(ctx)
	has := map[string]server.Status{}
	for _, st := range all {
		has[st.ID] = st
	}
	return has, err
}

// fill brings the contents of a part that awaits them, and has whoever had them give them. They
// are valid in one place: in the old part of this host, unless it has given them.
func (k *Keeper) fill(ctx context.Context, p Process, a assignment, st, old server.Status, from Source) error {
	contents, give := from.Contents, from.Give
	if own(old) {
		contents = func(ctx context.Context, _ uint8, w io.Writer) error { return p.Save(ctx, a.Old, w) }
		give = func(ctx context.Context, _ uint8, seal string) error { return p.Give(ctx, a.Old, seal) }
	}
	switch {
	case st.State == server.Sealed && old.State == server.Given && old.Seal == st.Seal:
		return nil // all but the last of this was done before
	case st.State == server.Sealed:
		err := give(ctx, a.Slot, st.Seal)
		if err == nil {
			return nil
		}
		if !errors.Is(err, cards.ErrRefused) && !errors.Is(err, server.ErrRefused) {
			return err
		}
		// The contents were changed since they were restored.
	}
	in, out := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := contents(ctx, a.Slot, out)
		out.CloseWithError(err) // nil: that was all
		done <- err
	}()
	err := p.Restore(ctx, a.part(), in)
	_ = in.CloseWithError(err)
	if err = errors.Join(<-done, err); err != nil {
		return err
	}
	has, err := k.statuses(ctx, p)
	if err != nil {
		return err
	}
	return give(ctx, a.Slot, has[a.part()].Seal)
}

// DropParts gives the parts of a VM back that is not on this host.
func (k *Keeper) DropParts(ctx context.Context, m vm.VM, migration string) error {
	k.work.Lock()
	defer k.work.Unlock()
	domains, err := k.Domains.Of(ctx)
	if err != nil {
		return err
	}
	if _, runs := domains[m.UUID]; runs {
		return fmt.Errorf("vm %s: %w: it is on this host", m.Name, cards.ErrBusy)
	}
	for _, a := range k.of(func(a *assignment) bool { return a.UUID == m.UUID && a.Migration == migration }) {
		if a.Over = true; a.Domain == 0 {
			a.Domain = noDomain
		}
		if err := k.release(ctx, a); err != nil {
			return err
		}
		k.Event(a.GPU, "Detached", "VM "+a.vm()+" is on another host: its part ("+a.Profile+") is free")
	}
	return nil
}

// Contents writes the contents of a part of a VM that has left this host.
func (k *Keeper) Contents(ctx context.Context, m vm.VM, migration string, slot uint32, w io.Writer) error {
	a, p, err := k.left(ctx, m, migration, slot)
	if err != nil {
		return err
	}
	return p.Save(ctx, a.part(), w)
}

// GivePart ends a part's use on this host for good: the host to which the VM has moved has its
// contents.
func (k *Keeper) GivePart(ctx context.Context, m vm.VM, migration string, slot uint32, seal string) error {
	a, p, err := k.left(ctx, m, migration, slot)
	if err != nil {
		return err
	}
	return p.Give(ctx, a.part(), seal)
}

// left returns a part of a VM that has left this host.
func (k *Keeper) left(ctx context.Context, m vm.VM, migration string, slot uint32) (assignment, Process, error) {
	k.work.Lock()
	defer k.work.Unlock()
	domains, err := k.Domains.Of(ctx)
	if err != nil {
		return assignment{}, nil, err
	}
	if _, runs := domains[m.UUID]; runs {
		return assignment{}, nil, fmt.Errorf("vm %s: %w: it is still on this host", m.Name, cards.ErrBusy)
	}
	all := k.of(func(a *assignment) bool {
		return a.UUID == m.UUID && a.Migration == migration && uint32(a.Slot) == slot && a.Phase == parked
	})
	if len(all) != 1 {
		return assignment{}, nil, fmt.Errorf("vm %s: part at slot %d: %w", m.Name, slot, cards.ErrNotFound)
	}
	p, err := k.Process(ctx, all[0].GPU)
	return all[0], p, err
}
