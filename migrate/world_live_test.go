package migrate

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuctl/gpuctl/internal/vm"
)

// computes reports whether a session uses this GPU now.
func (w *world) computes(id, gpu string) bool { return !w.frozen[id] && w.runs[id] == gpu }

// Lend is about what the record names only: a GPU that no record has would be lent for ever.
func (s *site) Lend(_ context.Context, m vm.VM, f Far) error {
	return s.do("lend", func() error {
		if mm := s.kept.GetMachine(); mm.GetFarGpu() != f.GPU || mm.GetFarClaim() != f.Claim {
			s.t.Errorf("%v is lent, and the record says %s, %s", f, mm.GetFarGpu(), mm.GetFarClaim())
		}
		if HostOf(f.GPU) != s.host {
			s.t.Errorf("%s is lent by %s", f.GPU, s.host)
		}
		if c := s.cards[f.GPU]; c != nil && c.holder != "" {
			s.t.Errorf("%s is lent, and held for %s", f.GPU, c.holder)
		}
		for c, g := range s.claims {
			if g == f.GPU && c != f.Claim {
				return fmt.Errorf("%s: %w", f.GPU, ErrTaken)
			}
		}
		s.claims[f.Claim], s.lent[f.GPU] = f.GPU, f.Claim
		return nil
	})
}

func (s *site) EndLend(_ context.Context, _ vm.VM, f Far) error {
	return s.do("endlend", func() error {
		for id, on := range s.runs {
			switch {
			case on == f.GPU && s.twin != "": // nobody knows which copy has used it
				delete(s.runs, id)
				delete(s.frozen, id)
			case on == f.GPU:
				s.t.Errorf("session %s computes on %s, and its far executor is ended", id, on)
			}
		}
		delete(s.lent, f.GPU)
		delete(s.claims, f.Claim)
		return nil
	})
}

// swap moves sessions that run, and no others.
func (s *site) swap(gpu string, sessions []string) error {
	if err := requested(sessions...); err != nil {
		return err
	}
	s.alone("swapped")
	if err := s.here(); err != nil {
		return err
	}
	for _, id := range sessions {
		if s.down[HostOf(s.runs[id])] {
			return fmt.Errorf("session %s: its GPU %s does not answer", id, s.runs[id])
		}
		if _, lives := s.runs[id]; lives && !s.frozen[id] {
			s.runs[id] = gpu
		}
	}
	return nil
}

func (s *site) Swap(_ context.Context, _ vm.VM, f Far, sessions []string, _ time.Duration, _ Progress) (time.Duration, error) {
	return 2 * time.Millisecond, s.do("swap", func() error {
		if s.lent[f.GPU] != f.Claim {
			s.t.Errorf("sessions go to %s, which is lent to %q, not %s", f.GPU, s.lent[f.GPU], f.Claim)
		}
		if s.down[HostOf(f.GPU)] {
			return fmt.Errorf("host %s: %w", HostOf(f.GPU), ErrUnreachable)
		}
		return s.swap(f.GPU, sessions)
	})
}

func (s *site) Home(_ context.Context, m vm.VM, gpu string, sessions []string, _ time.Duration, _ Progress) (time.Duration, error) {
	return 3 * time.Millisecond, s.do("home", func() error {
		if s.cards[gpu].plugged != m.UUID || s.released {
			s.t.Errorf("sessions go to %s, which the VM does not have", gpu)
		}
		if err := s.swap(gpu, sessions); err != nil {
			return err
		}
		s.onGPU = gpu
		return nil
	})
}
