package migrate

import (
	"context"
	"errors"
	"strings"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/vm"
)

// Names of the steps that move a VM's parts of mediated GPUs.
const (
	StepPark    = "park"
	StepRenew   = "renew"
	StepRestore = "restore"
	StepDrop    = "drop"
)

// ReasonPart is the code of what is against a host because of a VM's parts of mediated GPUs.
const ReasonPart = "mediated"

// Parts is a host's part in moving a VM's parts of mediated GPUs. The contents of each are
// valid on one host at a time, and only that host has it work: the other one has given it.
type Parts interface {
	// ParkParts has no command of the parts begin any more, waits for those that run, and
	// returns what another host has to know. The VM's accesses are answered as long as it is
	// on this host. It may also be on the other one already. A part without which the VM has run
	// on this host is told as lost; those of a VM that does not run are for its next start.
	ParkParts(ctx context.Context, m vm.VM) ([]*gpuctlv1.SitePart, error)
	// ExpectParts reserves such parts for the VM's arrival. When the VM is here its accesses
	// wait for TakeParts. Contents that this host has of the same parts are kept, except of those
	// that are lost: they are not valid any more, and the VM's operator is told.
	ExpectParts(ctx context.Context, m vm.VM, parts []*gpuctlv1.SitePart) error
	// TakeParts has the parts work. The VM is on this host. If the contents are on the host
	// other, they are brought here, and given there, first.
	TakeParts(ctx context.Context, m vm.VM, other string) error
	// DropParts gives parts back. The VM is not on this host.
	DropParts(ctx context.Context, m vm.VM) error
}

// withParts reports whether parts of mediated GPUs move with the VM.
func (r *run) withParts() bool {
	m := r.move()
	return len(m.GetParts()) > 0 && m.GetFromHost() != m.GetToHost() && !m.GetCold()
}

// parts reports whether parts of mediated GPUs move with the VM.
func (l *list) parts() bool { return len(l.GetParts()) > 0 && l.moves && !l.cold }

const (
	parkLimit = 2 * time.Minute
	// takeLimit is for 1 GiB at the slowest speed of a link that is used for states.
	takeLimit = 10 * time.Minute
)

// park adds what is done with the VM's parts of mediated GPUs before it moves.
func (l *list) park() {
	l.add(l.parts(), step{
		StepPark, "let no command begin on " + strings.Join(l.GetParts(), ", ") + ", reserve as much on " + l.GetToHost(), "they go on where the VM is", parkLimit + takeLimit,
		func(ctx context.Context, r *run) error { return r.expect(ctx, r.from(), r.to()) },
		func(ctx context.Context, r *run) error {
			if err := r.from().TakeParts(ctx, r.vm(), r.move().GetToHost()); err != nil {
				return err
			}
			r.drop(ctx, r.to())
			return nil
		},
	})
}

// restore adds what is done with them after that. The VM's accesses wait meanwhile.
func (l *list) restore() {
	l.add(l.parts(), step{
		StepRestore, "bring the contents of its parts of mediated GPUs, and let its commands run there", "they are parked again", parkLimit + takeLimit,
		func(ctx context.Context, r *run) error {
			return r.to().TakeParts(ctx, r.vm(), r.move().GetFromHost())
		},
		func(ctx context.Context, r *run) error { return r.expect(ctx, r.to(), r.from()) },
	})
}

// renew adds what is done with the parts of a VM that is started anew on another host. It was
// ended, and nothing of their contents is kept. A host that cannot give it parts is no reason not
// to start it: whoever has it started anew wants that above all.
func (l *list) renew() {
	l.add(len(l.GetParts()) > 0 && l.moves && l.cold, step{
		StepRenew, "reserve as much as " + strings.Join(l.GetParts(), ", ") + " for it on " + l.GetToHost() + ", empty, if there is room", "it is given back", parkLimit,
		func(ctx context.Context, r *run) error {
			parts, err := r.from().ParkParts(ctx, r.vm())
			if err != nil {
				return err
			}
			err = r.to().ExpectParts(ctx, r.vm(), parts)
			if err == nil || errors.Is(err, ErrUnreachable) || errors.Is(err, ErrStale) || ctx.Err() != nil {
				return err
			}
			r.Log.Warn("a VM is started anew without its parts of mediated GPUs", "migration", r.m.GetId(), "machine", r.vm().Name, "err", err)
			return nil
		},
		func(ctx context.Context, r *run) error {
			r.drop(ctx, r.to())
			return nil
		},
	})
}

// leaveParts adds what is done with them on the source at the end.
func (l *list) leaveParts() {
	l.add(len(l.GetParts()) > 0 && l.moves, step{
		StepDrop, "give the parts on " + l.GetFromHost() + " back", "", parkLimit,
		func(ctx context.Context, r *run) error { return r.from().DropParts(ctx, r.vm()) }, nil,
	})
}

// expect parks parts on a host, and has the other one expect them.
func (r *run) expect(ctx context.Context, from, to Site) error {
	parts, err := from.ParkParts(ctx, r.vm())
	if err != nil {
		return err
	}
	return to.ExpectParts(ctx, r.vm(), parts)
}

// drop makes a host give parts back. If it cannot do that now, it does so by itself after
// the migration has ended.
func (r *run) drop(ctx context.Context, s Site) {
	if err := s.DropParts(ctx, r.vm()); err != nil {
		r.Log.Warn("parts of mediated GPUs are not given back yet", "migration", r.m.GetId(), "err", err)
	}
}

// PartFacts is a part of a mediated GPU that a VM has.
type PartFacts struct {
	GPU      string // id
	Memory   uint64
	Channels uint32
}

// PartRoom is a mediated GPU with free parts.
type PartRoom struct {
	GPU      string // id
	Memory   uint64 // of a part
	Channels uint32
	Free     uint32
}

// noPlace returns the parts of a VM for which a host has no place. A part has to be as large there as
// it is here: the VM's driver knows its size.
func noPlace(parts []PartFacts, room []PartRoom) (out []PartFacts) {
	left := map[[2]uint64]uint32{}
	for _, r := range room {
		left[[2]uint64{r.Memory, uint64(r.Channels)}] += r.Free
	}
	for _, p := range parts {
		like := [2]uint64{p.Memory, uint64(p.Channels)}
		if left[like] == 0 {
			out = append(out, p)
			continue
		}
		left[like]--
	}
	return out
}

// againstParts returns what is against a host because of the VM's parts of mediated GPUs.
func againstParts(r Request, m VMFacts, h HostFacts) (out []*gpuctlv1.Reason) {
	if r.Cold {
		return nil // the VM is started anew, with what it has there
	}
	for _, p := range noPlace(m.Parts, h.PartRoom) {
		out = append(out, because(ReasonPart, "VM %s has a part of %s, and host %s has no free part of a mediated GPU with %s and %d channels (mmio.gpus)",
			m.Name, p.GPU, h.Name, size.Format(p.Memory), p.Channels))
	}
	return out
}

// PartGPUs returns the GPUs of which a VM has parts.
func (m VMFacts) PartGPUs() (out []string) {
	for _, p := range m.Parts {
		out = append(out, p.GPU)
	}
	return out
}
