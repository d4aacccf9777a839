package cards

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/vgpu"
)

// phase is where a card is; a free one has no record.
type phase string

const (
	reserved    phase = "reserved"    // a migration's claim on it; nothing has been done
	cutting     phase = "cutting"     // of a slice: undone by deleting it
	taking      phase = "taking"      // undone by returning it
	ready       phase = "ready"       // bound; its VM is about to start, or to get it
	attaching   phase = "attaching"   // the hypervisor reports whether that has happened
	attached    phase = "attached"    // the VM has it
	detaching   phase = "detaching"   // the hypervisor reports whether that has happened
	resetting   phase = "resetting"   // repeated after a crash
	returning   phase = "returning"   // repeated after a crash
	quarantined phase = "quarantined" // until somebody resets it with success
)

// phases are those of the API.
func phases() map[phase]gpuctlv1.CardPhase {
	return map[phase]gpuctlv1.CardPhase{
		cutting:  gpuctlv1.CardPhase_CARD_PHASE_CUTTING,
		reserved: gpuctlv1.CardPhase_CARD_PHASE_RESERVED,
		taking:   gpuctlv1.CardPhase_CARD_PHASE_TAKING, ready: gpuctlv1.CardPhase_CARD_PHASE_READY,
		attaching: gpuctlv1.CardPhase_CARD_PHASE_ATTACHING, attached: gpuctlv1.CardPhase_CARD_PHASE_ATTACHED,
		detaching: gpuctlv1.CardPhase_CARD_PHASE_DETACHING, resetting: gpuctlv1.CardPhase_CARD_PHASE_RESETTING,
		returning: gpuctlv1.CardPhase_CARD_PHASE_RETURNING, quarantined: gpuctlv1.CardPhase_CARD_PHASE_QUARANTINED,
	}
}

// hold is what the record says of a card.
type hold struct {
	Card       pci.Address   `json:"card"`
	Functions  []pci.Address `json:"functions"` // the main one first; of a slice its function, or its parent
	Slice      *slice        `json:"slice,omitempty"`
	GPU        string        `json:"gpu"` // its name when it was taken
	Phase      phase         `json:"phase"`
	UUID       string        `json:"machine,omitempty"`
	Name       string        `json:"machineName,omitempty"`
	Claim      string        `json:"claim,omitempty"`
	Persistent bool          `json:"persistent,omitempty"`
	Starting   bool          `json:"starting,omitempty"` // the VM's start asked for it
	Migration  string        `json:"migration,omitempty"`
	Message    string        `json:"message,omitempty"`
	Since      int64         `json:"since"` // Unix milliseconds

	rev uint64 // of this hostd's life; differs after every change
}

// machine names the VM in messages.
func (h *hold) machine() string {
	if h.Name == "" {
		return h.UUID
	}
	return h.Name
}

// claim is the hold's claim as the cluster keeps it.
func (h *hold) claim() *clusterv1.Claim {
	c := &clusterv1.Claim{
		Id: h.Claim, Holder: "vm " + h.machine(), Count: 1, Unmet: clusterv1.Unmet_UNMET_REFUSE,
		Labels: map[string]string{labelMachine: h.UUID},
	}
	if h.Slice != nil {
		c.Profile = h.Slice.Profile
	}
	return c
}

// labelMachine on a claim is the UUID of the VM that it is for.
const labelMachine = "gpuctl.machine"

const (
	recordVersion = 1
	maxRecord     = 4 << 20
)

type record struct {
	Version int     `json:"version"`
	Holds   []*hold `json:"holds"`
	// Resets says how each card was reset last, free ones too.
	Resets map[pci.Address]string `json:"resets,omitempty"`
}

// readRecord returns nothing if there is no file.
func readRecord(path string) (record, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, nil
	}
	if err == nil && info.Size() > maxRecord {
		err = fmt.Errorf("it has %d bytes, more than %d", info.Size(), maxRecord)
	}
	var data []byte
	if err == nil {
		data, err = os.ReadFile(path)
	}
	if err != nil {
		return record{}, fmt.Errorf("record of cards %s: %w", path, err)
	}
	r, err := decodeRecord(data)
	if err != nil {
		return record{}, fmt.Errorf("record of cards %s: %w; it says which cards VMs have: restore it, or make sure that no VM has a card and remove it", path, err)
	}
	return r, nil
}

func decodeRecord(data []byte) (record, error) {
	var r record
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(&r); err != nil {
		return record{}, err
	}
	if r.Version != recordVersion {
		return record{}, fmt.Errorf("version %d is not %d: another gpuctl has written it", r.Version, recordVersion)
	}
	seen, ids := map[pci.Address]bool{}, map[string]bool{}
	for _, h := range r.Holds {
		switch {
		case h == nil || phases()[h.Phase] == gpuctlv1.CardPhase_CARD_PHASE_UNSPECIFIED:
			return record{}, errors.New("an entry makes no sense")
		case h.Slice != nil:
			if err := h.checkSlice(); err != nil {
				return record{}, err
			}
			if ids[h.Slice.ID] {
				return record{}, fmt.Errorf("slice %s is in it twice", h.Slice.ID)
			}
			ids[h.Slice.ID] = true
			if h.Slice.Kind == vgpu.Mdev {
				continue // several have one parent
			}
		case h.Phase == cutting || len(h.Functions) == 0 || h.Functions[0] != h.Card:
			return record{}, errors.New("an entry makes no sense")
		}
		for _, f := range h.Functions {
			if seen[f] {
				return record{}, fmt.Errorf("function %s is in it twice", f)
			}
			seen[f] = true
		}
	}
	return r, nil
}

// writeRecord replaces the file; after it returns nil a crash of the machine
// keeps it.
func writeRecord(path string, r record) error {
	r.Version = recordVersion
	slices.SortFunc(r.Holds, func(a, b *hold) int { return cmp.Or(a.Card.Compare(b.Card), strings.Compare(a.key(), b.key())) })
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return durable.Replace(path, append(data, '\n'), 0o600)
}
