package mediated

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/durable"
)

type phase string

const (
	ready     phase = "ready"
	attaching phase = "attaching"
	attached  phase = "attached"
	detaching phase = "detaching"

	// Of a VM that moves.
	parked   phase = "parked"   // its commands wait here; the VM is here, or has left
	expected phase = "expected" // the VM is to come
	awaiting phase = "awaiting" // the VM's domain has the part, and its accesses wait for the contents
)

func phases() map[phase]gpuctlv1.CardPhase {
	return map[phase]gpuctlv1.CardPhase{
		ready: gpuctlv1.CardPhase_CARD_PHASE_READY, attaching: gpuctlv1.CardPhase_CARD_PHASE_ATTACHING,
		attached: gpuctlv1.CardPhase_CARD_PHASE_ATTACHED, detaching: gpuctlv1.CardPhase_CARD_PHASE_DETACHING,
		parked: gpuctlv1.CardPhase_CARD_PHASE_ATTACHED, expected: gpuctlv1.CardPhase_CARD_PHASE_RESERVED, awaiting: gpuctlv1.CardPhase_CARD_PHASE_ATTACHING,
	}
}

// moves reports whether a phase is one of a VM that moves.
func (p phase) moves() bool { return p == parked || p == expected || p == awaiting }

// assignment is the record of a part that a VM has or is to get. It is never modified: a
// change replaces it.
type assignment struct {
	ID      string `json:"id"`
	GPU     string `json:"gpu"`
	Profile string `json:"profile"`
	Memory  uint64 `json:"memory"` // bytes
	Weight  int    `json:"weight"`
	Mode    string `json:"mode"`
	Slot    uint8  `json:"slot"`
	UUID    string `json:"machine"`
	Name    string `json:"machineName"`
	Claim   string `json:"claim"`
	Phase   phase  `json:"phase"`
	Domain  uint16 `json:"domain,omitempty"` // from attaching on
	Over    bool   `json:"over,omitempty"`   // detaching: it is given back, not kept for the next start
	Message string `json:"message,omitempty"`
	Since   int64  `json:"since"` // Unix milliseconds

	// While its VM moves:
	Migration string `json:"migration,omitempty"`
	Config    []byte `json:"config,omitempty"` // the function's configuration space when it was parked
	Serial    int    `json:"serial,omitempty"` // how often a domain of the VM has come here: part of the part's id
	Old       string `json:"old,omitempty"`    // id of the part of the domain that was here before, which may have the contents
	Anew      bool   `json:"anew,omitempty"`   // the VM is ended, and started anew on another host
	Astray    bool   `json:"astray,omitempty"` // the VM has run here without it, so what it has written there is nowhere
}

// part is the id that the part has in the GPU's process.
func (a *assignment) part() string {
	if a.Serial == 0 {
		return a.ID
	}
	return fmt.Sprintf("%s.%d", a.ID, a.Serial)
}

// comes reports whether the VM is to arrive, and has not been here without the part.
func (a *assignment) comes() bool { return a.Phase == expected && !a.Astray }

// moving reports whether the VM moves.
func (a *assignment) moving() bool { return a.Migration != "" }

func (a *assignment) vm() string { return cmp.Or(a.Name, a.UUID) }

func (a *assignment) claim() *clusterv1.Claim {
	return &clusterv1.Claim{
		Id: a.Claim, Holder: "vm " + a.vm(), Count: 1, Unmet: clusterv1.Unmet_UNMET_REFUSE, Profile: a.Profile,
		Labels: map[string]string{cards.LabelVM: a.UUID},
	}
}

const (
	recordVersion = 1
	maxRecord     = 4 << 20
)

type record struct {
	Version     int           `json:"version"`
	Assignments []*assignment `json:"assignments"`
}

// readRecord reads the record. Without a file, it is empty.
func readRecord(path string) ([]*assignment, error) {
	data, err := beneath.ReadFile(filepath.Dir(path), filepath.Base(path), maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var all []*assignment
	if err == nil {
		all, err = decodeRecord(data)
	}
	if err != nil {
		return nil, fmt.Errorf("record of mediated gpus %s: %w; it says which VMs have a part: restore it, or end these VMs and remove it", path, err)
	}
	return all, nil
}

func decodeRecord(data []byte) ([]*assignment, error) {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, err
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("version %d is not %d: another gpuctl has written it", r.Version, recordVersion)
	}
	ids, slots := map[string]bool{}, map[string]bool{}
	for _, a := range r.Assignments {
		if a == nil || a.ID == "" || a.GPU == "" || a.UUID == "" || a.Claim == "" || a.Memory == 0 || a.Slot < 1 || a.Slot > 31 || phases()[a.Phase] == 0 ||
			(a.Phase == attaching || a.Phase == attached || a.Phase == awaiting || a.Phase == parked) && a.Domain == 0 || !a.moving() && a.Phase.moves() {
			return nil, errors.New("an entry makes no sense")
		}
		slot := fmt.Sprintf("%s %d", a.UUID, a.Slot)
		if ids[a.ID] || slots[slot] {
			return nil, fmt.Errorf("part %s of vm %s is in it twice", a.ID, a.UUID)
		}
		ids[a.ID], slots[slot] = true, true
	}
	return r.Assignments, nil
}

// save writes the record. The caller holds k.mu.
func (k *Keeper) save() error {
	r := record{Version: recordVersion}
	for _, a := range k.parts {
		r.Assignments = append(r.Assignments, a)
	}
	slices.SortFunc(r.Assignments, func(a, b *assignment) int { return cmp.Compare(a.ID, b.ID) })
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	if err := durable.Replace(k.File, append(data, '\n'), 0o600); err != nil {
		return err
	}
	k.list()
	return nil
}

// put records an assignment before the work for it begins. If that fails, the previous
// record stays in force.
func (k *Keeper) put(a assignment) error {
	a.Since = k.Now().UnixMilli()
	k.mu.Lock()
	defer k.mu.Unlock()
	old, had := k.parts[a.ID]
	k.parts[a.ID] = &a
	if err := k.save(); err != nil {
		if delete(k.parts, a.ID); had {
			k.parts[a.ID] = old
		}
		return fmt.Errorf("part of gpu %s for vm %s: not recorded, so nothing is done: %w", a.GPU, a.vm(), err)
	}
	return nil
}

// drop forgets an assignment. The cluster takes its claim back then.
func (k *Keeper) drop(id string) error {
	k.mu.Lock()
	old := k.parts[id]
	delete(k.parts, id)
	err := k.save()
	if err != nil && old != nil {
		k.parts[id] = old
	}
	k.mu.Unlock()
	k.Cluster.Kick()
	return err
}

// of returns copies of the assignments for which f is true, sorted by VM and slot.
func (k *Keeper) of(f func(*assignment) bool) (out []assignment) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, a := range k.parts {
		if f(a) {
			out = append(out, *a)
		}
	}
	slices.SortFunc(out, func(a, b assignment) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Slot, b.Slot))
	})
	return out
}
