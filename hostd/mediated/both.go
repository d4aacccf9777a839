package mediated

import (
	"context"
	"fmt"
	"slices"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
)

// CardKeeper manages cards.
type CardKeeper interface {
	Cards(ctx context.Context) ([]*gpuctlv1.Card, error)
	List(ctx context.Context) ([]*gpuctlv1.Machine, error)
	Isolated(ctx context.Context, gpu string) (*gpuctlv1.IsolationResponse, error)
	Attach(ctx context.Context, r *gpuctlv1.AttachRequest, report cards.Report) error
	Detach(ctx context.Context, r *gpuctlv1.DetachRequest, report cards.Report) error
	Reset(ctx context.Context, r *gpuctlv1.ResetRequest, report cards.Report) error
	Resize(ctx context.Context, r *gpuctlv1.ResizeRequest, report cards.Report) error
}

// Both is the keeper of cards and of mediated GPUs, for the API: the same verbs serve
// both, and what a request names decides.
type Both struct {
	CardKeeper
	Mediated *Keeper
}

// Cards lists cards, and mediated GPUs after them.
func (b Both) Cards(ctx context.Context) ([]*gpuctlv1.Card, error) {
	out, err := b.CardKeeper.Cards(ctx)
	return append(out, b.Mediated.Cards()...), err
}

// List lists VMs with all that they have.
func (b Both) List(ctx context.Context) ([]*gpuctlv1.Machine, error) {
	out, err := b.CardKeeper.List(ctx)
	for _, m := range out {
		m.Gpus = append(m.Gpus, b.Mediated.Labels(m.GetUuid())...)
		slices.Sort(m.Gpus)
	}
	return out, err
}

// Isolated judges a card. A mediated GPU has no hardware that could reach anything.
func (b Both) Isolated(ctx context.Context, gpu string) (*gpuctlv1.IsolationResponse, error) {
	if !b.Mediated.Has(gpu) {
		return b.CardKeeper.Isolated(ctx, gpu)
	}
	return &gpuctlv1.IsolationResponse{
		Gpu: gpu, Verdict: "yes", Source: "gpuctl",
		Summary: "it is a software GPU in a process of the host: each access of a VM is checked, and no device reaches memory",
	}, nil
}

// Attach gives a card or a part of a mediated GPU to a VM.
func (b Both) Attach(ctx context.Context, r *gpuctlv1.AttachRequest, report cards.Report) error {
	if b.Mediated.Has(r.GetGpu()) || r.GetGpu() == "" && b.Mediated.HasProfile(r.GetProfile()) {
		return b.Mediated.Attach(ctx, r, report)
	}
	if r.GetWeight() != 0 || r.GetMode() != "" {
		return fmt.Errorf("%w: only parts of mediated GPUs have a weight and a mode", cards.ErrInvalid)
	}
	return b.CardKeeper.Attach(ctx, r, report)
}

// Detach takes one back.
func (b Both) Detach(ctx context.Context, r *gpuctlv1.DetachRequest, report cards.Report) error {
	if b.Mediated.Owns(ctx, r.GetMachine(), r.GetGpu()) {
		return b.Mediated.Detach(ctx, r, report)
	}
	return b.CardKeeper.Detach(ctx, r, report)
}

// Reset resets a card.
func (b Both) Reset(ctx context.Context, r *gpuctlv1.ResetRequest, report cards.Report) error {
	if b.Mediated.Has(r.GetGpu()) {
		return fmt.Errorf("gpu %s: %w: its parts are scrubbed when they are taken back; there is nothing else to reset", r.GetGpu(), cards.ErrRefused)
	}
	return b.CardKeeper.Reset(ctx, r, report)
}

// Resize sets the number of a card's virtual functions.
func (b Both) Resize(ctx context.Context, r *gpuctlv1.ResizeRequest, report cards.Report) error {
	if b.Mediated.Has(r.GetGpu()) {
		return fmt.Errorf("gpu %s: %w: how many VMs can have a part is in the configuration (mmio.gpus)", r.GetGpu(), cards.ErrRefused)
	}
	return b.CardKeeper.Resize(ctx, r, report)
}
