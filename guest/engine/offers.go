package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protojson"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/beneath"
)

// OffersName is the file in an engine's folder that keeps what is offered.
const OffersName = "offers.json"

// ErrOfferedAnew means that what a session was to begin by is not offered any more, or anew.
var ErrOfferedAnew = errors.New("the offer was replaced or withdrawn")

// Offers are what is offered, by token. A value is not changed, but replaced.
type Offers map[string]*gpuctlv1.OfferRequest

// ReadOffers reads what is offered from the file in a folder, which has at most so many bytes. Without a
// file it is nothing.
func ReadOffers(dir string, most int64) (Offers, error) {
	name := filepath.Join(dir, OffersName)
	b, err := beneath.ReadFile(dir, OffersName, most)
	if errors.Is(err, fs.ErrNotExist) {
		return Offers{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("offers: %w", err)
	}
	var list []json.RawMessage
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	out := Offers{}
	for _, raw := range list {
		o := &gpuctlv1.OfferRequest{}
		if err := protojson.Unmarshal(raw, o); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		out[o.GetToken()] = o
	}
	return out, nil
}

// Change returns what is offered after a change, when the file in the folder has it. If that can't be
// written, nothing has changed: a withdrawal is tried again.
func (o Offers) Change(dir string, change func(Offers)) (Offers, error) {
	next := maps.Clone(o)
	change(next)
	list := make([]json.RawMessage, 0, len(next))
	for _, x := range next {
		b, err := protojson.Marshal(x)
		if err != nil {
			b = []byte("{}") // strings that are not UTF-8; Connect accepts none
		}
		list = append(list, b)
	}
	b, err := json.Marshal(list)
	if err == nil {
		err = beneath.Replace(dir, OffersName, b, 0o600)
	}
	if err != nil {
		return o, fmt.Errorf("keep offers: %w", err)
	}
	return next, nil
}
