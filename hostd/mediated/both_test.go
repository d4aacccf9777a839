package mediated

import (
	"context"
	"errors"
	"testing"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
)

// cardsOnly counts what reaches the keeper of cards.
type cardsOnly struct{ calls []string }

func (c *cardsOnly) call(name string) error {
	c.calls = append(c.calls, name)
	return nil
}

func (c *cardsOnly) Cards(context.Context) ([]*gpuctlv1.Card, error) {
	return []*gpuctlv1.Card{{Gpu: "0000:65:00.0"}}, c.call("cards")
}

func (c *cardsOnly) List(context.Context) ([]*gpuctlv1.Machine, error) {
	return []*gpuctlv1.Machine{{Uuid: "uuid-web", Name: "web", Gpus: []string{"z"}}}, c.call("list")
}

func (c *cardsOnly) Isolated(context.Context, string) (*gpuctlv1.IsolationResponse, error) {
	return nil, c.call("isolated")
}

func (c *cardsOnly) Attach(context.Context, *gpuctlv1.AttachRequest, cards.Report) error {
	return c.call("attach")
}

func (c *cardsOnly) Detach(context.Context, *gpuctlv1.DetachRequest, cards.Report) error {
	return c.call("detach")
}

func (c *cardsOnly) Reset(context.Context, *gpuctlv1.ResetRequest, cards.Report) error {
	return c.call("reset")
}

func (c *cardsOnly) Resize(context.Context, *gpuctlv1.ResizeRequest, cards.Report) error {
	return c.call("resize")
}

func TestOneSetOfVerbsServesBoth(t *testing.T) {
	w := newWorld(t)
	c := &cardsOnly{}
	b := Both{c, w.k}
	none := func(*gpuctlv1.DeviceUpdate) {}
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	must(b.Attach(ctx, &gpuctlv1.AttachRequest{Machine: "web", Gpu: "h/soft0"}, none))
	must(b.Attach(ctx, &gpuctlv1.AttachRequest{Machine: "db", Profile: "1of2"}, none))
	if len(c.calls) != 0 || len(w.slices()) != 2 {
		t.Errorf("calls %v, parts %v", c.calls, w.slices())
	}
	must(b.Attach(ctx, &gpuctlv1.AttachRequest{Machine: "web", Gpu: "0000:65:00.0"}, none))
	must(b.Attach(ctx, &gpuctlv1.AttachRequest{Machine: "web", Profile: "A40-8Q"}, none))
	must(b.Detach(ctx, &gpuctlv1.DetachRequest{Machine: "web", Gpu: "0000:65:00.0"}, none))
	must(b.Reset(ctx, &gpuctlv1.ResetRequest{Gpu: "0000:65:00.0"}, none))
	must(b.Resize(ctx, &gpuctlv1.ResizeRequest{Gpu: "0000:65:00.0"}, none))
	if len(c.calls) != 5 {
		t.Errorf("the keeper of cards got %v", c.calls)
	}
	for what, err := range map[string]error{
		"weight of a card": b.Attach(ctx, &gpuctlv1.AttachRequest{Machine: "web", Gpu: "0000:65:00.0", Weight: 2}, none),
		"reset":            b.Reset(ctx, &gpuctlv1.ResetRequest{Gpu: "soft0"}, none),
		"resize":           b.Resize(ctx, &gpuctlv1.ResizeRequest{Gpu: "soft0"}, none),
	} {
		if !errors.Is(err, cards.ErrRefused) && !errors.Is(err, cards.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	all, err := b.Cards(ctx)
	if err != nil || len(all) != 2 || !all[1].GetMediated() {
		t.Errorf("cards %v, %v", all, err)
	}
	vms, err := b.List(ctx)
	if err != nil || len(vms[0].GetGpus()) != 2 || vms[0].GetGpus()[0] != "soft0 (1of2)" {
		t.Errorf("VMs %v, %v", vms, err)
	}
	if r, err := b.Isolated(ctx, "soft0"); err != nil || r.GetVerdict() != "yes" {
		t.Errorf("%v, %v", r, err)
	}
	must(b.Detach(ctx, &gpuctlv1.DetachRequest{Machine: "web"}, none))
	if len(w.slices()) != 1 {
		t.Errorf("parts %v", w.slices())
	}
}
