package platform

import (
	"context"
	"errors"
	"log/slog"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/isolation"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/reset"
)

// judge converts the isolation report to the API's form.
type judge struct{ source isolation.Source }

func (j judge) Report(ctx context.Context, card *pci.Card) (*gpuctlv1.IsolationResponse, error) {
	r, err := isolation.Examine(ctx, card, j.source)
	if err != nil {
		return nil, err
	}
	word := func(v isolation.Verdict) string {
		text, _ := v.MarshalText() // MarshalText of a verdict never fails
		return string(text)
	}
	out := &gpuctlv1.IsolationResponse{Gpu: card.Address.String(), Verdict: word(r.Verdict), Summary: r.Verdict.String(), Source: r.Source}
	for _, a := range r.Together {
		out.Together = append(out.Together, a.String())
	}
	for _, reason := range r.Reasons {
		out.Findings = append(out.Findings, &gpuctlv1.IsolationFinding{
			Code: string(reason.Code), Severity: map[isolation.Verdict]string{isolation.No: "refuse", isolation.Care: "care", isolation.Yes: "note"}[reason.Verdict],
			Message: reason.Text, Advice: reason.Do,
		})
	}
	return out, nil
}

// resetter resets a card with the methods that the catalogue has for its model.
type resetter struct {
	*reset.Resetter
	catalog *catalog.Catalog
	log     *slog.Logger
}

func (r resetter) Reset(ctx context.Context, card *pci.Card) (string, error) {
	main := card.Main()
	if main == nil {
		return "", errors.New("the card has lost its main function")
	}
	entry, _ := r.catalog.Lookup(main)
	result, err := r.Resetter.Reset(ctx, card, entry.Avoid())
	r.log.Info("card reset", "card", card.Address, "result", result.String(), "err", err)
	return string(result.By), err
}
