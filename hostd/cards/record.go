package cards

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/vgpu"
)

// phase is the state of an assigned card. A free card has no record.
type phase string

const (
	reserved    phase = "reserved"    // a migration has claimed it; the card is unchanged
	cutting     phase = "cutting"     // its slice is being created; the undo deletes the slice
	taking      phase = "taking"      // it is being bound to the hypervisor's driver; the undo returns it
	ready       phase = "ready"       // bound; its VM starts soon, or gets the card soon
	attaching   phase = "attaching"   // the hypervisor decides whether the VM has it
	attached    phase = "attached"    // the VM has it
	detaching   phase = "detaching"   // the hypervisor decides whether the VM has it
	resetting   phase = "resetting"   // being reset; repeated after a crash
	returning   phase = "returning"   // being returned to its drivers; repeated after a crash
	quarantined phase = "quarantined" // until a reset succeeds
)

// phases maps the record's phases to the API's.
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

// cardAssignment is the record of a card, or a slice, that is assigned to a VM, or is in
// quarantine.
type cardAssignment struct {
	Card       pci.Address   `json:"card"`
	Functions  []pci.Address `json:"functions"` // the main function first; for a slice: its function or its parent's
	Slice      *slice        `json:"slice,omitempty"`
	GPU        string        `json:"gpu"` // the card's name when it was taken
	Phase      phase         `json:"phase"`
	UUID       string        `json:"machine,omitempty"`
	Name       string        `json:"machineName,omitempty"`
	Claim      string        `json:"claim,omitempty"`
	Persistent bool          `json:"persistent,omitempty"`
	Starting   bool          `json:"starting,omitempty"` // the VM asked for it when it started
	Migration  string        `json:"migration,omitempty"`
	// Guest is where a VM that migrates had the main function of its card before that. It
	// gets this one there.
	Guest   *pci.Address `json:"guestAddress,omitempty"`
	Message string       `json:"message,omitempty"`
	// Away is true of a card that is in quarantine only because it was not on the bus. It is
	// reset when it is there again.
	Away  bool  `json:"away,omitempty"`
	Since int64 `json:"since"` // Unix milliseconds

	// Not stored:
	rev uint64    // number of the change
	at  time.Time // as Since, by a clock that nobody sets, and never in the future
}

// vm returns the VM's name, for messages.
func (a *cardAssignment) vm() string {
	if a.Name == "" {
		return a.UUID
	}
	return a.Name
}

// claim returns the assignment's claim in the cluster's form.
func (a *cardAssignment) claim() *clusterv1.Claim {
	c := &clusterv1.Claim{
		Id: a.Claim, Holder: "vm " + a.vm(), Count: 1, Unmet: clusterv1.Unmet_UNMET_REFUSE,
		Labels: map[string]string{LabelVM: a.UUID},
	}
	if a.Slice != nil {
		c.Profile = a.Slice.Profile
	}
	return c
}

// LabelVM is the label of a claim of a card, or of a part of one, that contains the VM's UUID.
const LabelVM = "gpuctl.machine"

const (
	recordVersion = 1
	maxRecord     = 4 << 20
)

type record struct {
	Version     int               `json:"version"`
	Assignments []*cardAssignment `json:"holds"`
	// Resets has the method of each card's last reset, including free cards.
	Resets map[pci.Address]string `json:"resets,omitempty"`
}

// readRecord reads the record. Without a file, the record is empty.
func readRecord(path string) (record, error) {
	data, err := beneath.ReadFile(filepath.Dir(path), filepath.Base(path), maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, nil
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
	for _, a := range r.Assignments {
		switch {
		case a == nil || phases()[a.Phase] == gpuctlv1.CardPhase_CARD_PHASE_UNSPECIFIED:
			return record{}, errors.New("an entry makes no sense")
		case a.Slice != nil:
			if err := a.checkSlice(); err != nil {
				return record{}, err
			}
			if ids[a.Slice.ID] {
				return record{}, fmt.Errorf("slice %s is in it twice", a.Slice.ID)
			}
			ids[a.Slice.ID] = true
			if a.Slice.Kind == vgpu.Mdev {
				continue // several mediated devices have the same parent
			}
		case a.Phase == cutting || len(a.Functions) == 0 || a.Functions[0] != a.Card:
			return record{}, errors.New("an entry makes no sense")
		}
		for _, f := range a.Functions {
			if seen[f] {
				return record{}, fmt.Errorf("function %s is in it twice", f)
			}
			seen[f] = true
		}
	}
	return r, nil
}

// writeRecord replaces the file. When it has returned nil, the record survives a crash of
// the host.
func writeRecord(path string, r record) error {
	r.Version = recordVersion
	slices.SortFunc(r.Assignments, func(a, b *cardAssignment) int {
		return cmp.Or(a.Card.Compare(b.Card), strings.Compare(a.key(), b.key()))
	})
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return durable.Replace(path, append(data, '\n'), 0o600)
}
