package cuda

import (
	"encoding/json"
	"fmt"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/criu"
	"github.com/gpuctl/gpuctl/internal/beneath"
)

const (
	recordVersion = 1
	mostRecord    = 4 << 20 // bytes
	mostMembers   = 1024

	toMemory = "memory" // value of SuspendedTo
)

// record is a session's journal: everything that a new gpuguest needs.
type record struct {
	Version     int             `json:"version"`
	ID          string          `json:"id"`
	Claim       string          `json:"claim,omitempty"`
	PID         int             `json:"pid"` // of the root
	Start       uint64          `json:"start"`
	Command     string          `json:"command"`
	StartedMS   int64           `json:"started_ms"`
	Target      json.RawMessage `json:"target,omitempty"` // as the host named it
	Generation  uint32          `json:"generation"`       // increases with each swap and resume
	SuspendedTo string          `json:"suspended_to,omitempty"`
	Lost        string          `json:"lost,omitempty"`
	Driver      string          `json:"driver,omitempty"` // version of the kernel's driver at the last look
	GPUs        []gpu           `json:"gpus"`             // those that the members use, or used when they were suspended
	Members     []*member       `json:"members"`
	Op          *opRecord       `json:"op,omitempty"`
}

// gpu is what must be known of a GPU when it is gone.
type gpu struct {
	UUID    ask.UUID `json:"uuid"`
	Address string   `json:"address"`
	Chip    uint32   `json:"chip"`
	Name    string   `json:"name"`
	Used    uint64   `json:"used"` // bytes of the session's
}

// member is a process of a session that uses CUDA.
type member struct {
	PID     int    `json:"pid"`
	Parent  int    `json:"parent"`
	Start   uint64 `json:"start"`
	Command string `json:"command"`
	// Uses are the GPUs that the process has memory on, or had when its state was taken.
	Uses []ask.UUID `json:"uses"`
	Used []uint64   `json:"used"` // bytes on each
	// Slots say which of the session's GPUs each is. They stay when the session moves.
	Slots []int `json:"slots"`
	// Shown are the GPUs that the driver showed when the state was taken. A restore on
	// others must name each.
	Shown []ask.UUID `json:"shown,omitempty"`
	// Call is what the driver is being asked.
	Call *callRecord `json:"call,omitempty"`

	state ask.State // as last known, empty if unknown
}

// callRecord is a call of the driver in progress.
type callRecord struct {
	Op     ask.Op     `json:"op"`
	Helper int        `json:"helper"`
	Start  uint64     `json:"start"`
	Uses   []ask.UUID `json:"uses,omitempty"`  // the GPUs that the process has after a restore
	Shown  []ask.UUID `json:"shown,omitempty"` // after a checkpoint
}

// opRecord is the operation in progress.
type opRecord struct {
	Kind      string          `json:"kind"`
	Step      string          `json:"step"`
	Committed bool            `json:"committed,omitempty"`
	Home      [][]ask.UUID    `json:"home"`             // the GPUs that each member had before it
	Dest      [][]ask.UUID    `json:"dest,omitempty"`   // and those that each has after it
	Target    json.RawMessage `json:"target,omitempty"` // that the session has after it
	GPUs      []gpu           `json:"gpus,omitempty"`   // that the session has after it
	Disk      *diskRecord     `json:"disk,omitempty"`   // of an operation with a folder
}

// diskRecord is what a new gpuguest needs to end what criu has begun.
type diskRecord struct {
	Dir  string     `json:"dir"`
	Tree []treeProc `json:"tree"`
	// Token is in the names of what is this operation's: the folder before it has its name,
	// and the manifest of one that is being resumed.
	Token  string  `json:"token"`
	Folder criu.ID `json:"folder,omitzero"` // of a folder that this operation has made
	// Since is when the processes of a folder were begun to be made again, in ticks since
	// boot: what has a pid of the folder and is younger, criu has made.
	Since     uint64 `json:"since,omitempty"`
	CRIU      int    `json:"criu,omitempty"`
	CRIUStart uint64 `json:"criu_start,omitempty"`
}

// treeProc is a process of the session's whole tree.
type treeProc struct {
	PID    int    `json:"pid"`
	Start  uint64 `json:"start"`
	Name   string `json:"name"`
	Layout string `json:"layout,omitempty"` // of one that criu makes again
}

func marshal(m proto.Message) json.RawMessage {
	b, err := protojson.Marshal(m)
	if err != nil {
		return json.RawMessage("{}") // strings that are not UTF-8; Connect accepts none
	}
	return b
}

func targetOf(b json.RawMessage) *gpuctlv1.Target {
	t := &gpuctlv1.Target{}
	if len(b) > 0 {
		_ = protojson.Unmarshal(b, t) // written by marshal
	}
	return t
}

func recordName(id string) string { return filepath.Join("sessions", id+".json") }

func (r *record) write(dir string) error {
	b, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return fmt.Errorf("encode session %s: %w", r.ID, err)
	}
	if len(b) > mostRecord { // nobody could read it
		return fmt.Errorf("session %s: its record would take %d bytes, and %d are the most", r.ID, len(b), mostRecord)
	}
	return beneath.Replace(dir, recordName(r.ID), b, 0o600)
}

func readRecord(dir, id string) (*record, error) {
	b, err := beneath.ReadFile(dir, recordName(id), mostRecord)
	if err != nil {
		return nil, err
	}
	r, err := parseRecord(b)
	if err == nil && r.ID != id {
		err = fmt.Errorf("it is of session %.32q", r.ID)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, recordName(id)), err)
	}
	return r, nil
}

func parseRecord(b []byte) (*record, error) {
	r := &record{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, err
	}
	switch {
	case r.Version != recordVersion:
		return nil, fmt.Errorf("version %d is not %d", r.Version, recordVersion)
	case r.PID <= 1:
		return nil, fmt.Errorf("its first process is %d", r.PID)
	case len(r.Members) == 0 || len(r.Members) > mostMembers:
		return nil, fmt.Errorf("%d members", len(r.Members))
	case r.Op != nil && (len(r.Op.Home) != len(r.Members) || len(r.Op.Dest) > 0 && len(r.Op.Dest) != len(r.Members)):
		return nil, fmt.Errorf("an operation on %d members, there are %d", len(r.Op.Home), len(r.Members))
	}
	if r.Op != nil && r.Op.Disk != nil {
		for _, p := range r.Op.Disk.Tree {
			if p.PID <= 1 || p.Start == 0 && r.Op.Kind != kindRevive {
				return nil, fmt.Errorf("a process of the tree is malformed")
			}
		}
	}
	for _, m := range r.Members {
		if m == nil || m.PID <= 1 || m.Start == 0 || len(m.Uses) != len(m.Used) || len(m.Uses) != len(m.Slots) {
			return nil, fmt.Errorf("a member is malformed")
		}
		for _, slot := range m.Slots {
			if slot < 0 || slot >= len(r.GPUs) {
				return nil, fmt.Errorf("a member has GPU %d of %d", slot, len(r.GPUs))
			}
		}
	}
	return r, nil
}
