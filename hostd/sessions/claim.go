package sessions

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/cost"
	"github.com/gpuctl/gpuctl/hostd/telemetry/trace"
)

// claim is what an application has asked for, and what it has got.
type claim struct {
	ID      string            `json:"id"`
	Token   string            `json:"token"`
	Expr    string            `json:"expr,omitempty"`
	Min     uint64            `json:"min,omitempty"`    // bytes; if it is not 0, the claim may share its GPU
	Prefer  uint64            `json:"prefer,omitempty"` // bytes
	Count   int               `json:"count"`
	Name    string            `json:"name,omitempty"` // name of the virtual device
	Type    string            `json:"type,omitempty"`
	Engine  string            `json:"engine,omitempty"`  // that the application needs; empty: any
	Memory  uint64            `json:"memory,omitempty"`  // memory of the virtual device, bytes
	GPUs    []string          `json:"gpus,omitempty"`    // GPUs on which the claim's next session starts
	Offered []string          `json:"offered,omitempty"` // GPUs that gpuguest may still give to the next session
	Held    map[string]uint64 `json:"held,omitempty"`    // amount by GPU, bytes; 0: the whole GPU
	Holder  holder            `json:"holder"`
	Created int64             `json:"created"`          // Unix time, ms
	Remote  string            `json:"remote,omitempty"` // never, allowed or only; empty: never
	Lease   string            `json:"lease,omitempty"`  // lease that is offered for the next session
	Stays   bool              `json:"stays,omitempty"`  // its sessions do not come home by themselves
	Wait    bool              `json:"-"`                // it may wait in the cluster's queue
	Owner   string            `json:"owner,omitempty"`  // whose share of a GPU that several use
	Weight  uint32            `json:"weight,omitempty"`
	VM      *forVM            `json:"vm,omitempty"` // for whom it is; nil: sessions of this host
	// Released: no new session may use the claim. The claim ends with its last session.
	Released bool `json:"released,omitempty"`

	next     []string   // what gpuguest offers since the time since, if that is not zero:
	since    time.Time  // Offered stays until a list shows what began by the offer before
	placed   int        // changes with GPUs
	stuck    string     // why the offer could not be withdrawn, as was logged; empty: nothing was; under offering
	offering sync.Mutex // held while gpuguest is told what it offers; locked before the host's
}

// place changes on which GPUs the claim's next session starts. What is still being offered from
// before is outdated with that.
func (c *claim) place(gpus []string) {
	c.GPUs = gpus
	c.placed++
}

// holder is the process that a claim belongs to. The start time distinguishes it from a
// later process with the same id.
type holder struct {
	PID   int    `json:"pid,omitempty"`
	Start uint64 `json:"start,omitempty"` // clock ticks since boot
}

// newHolder describes a running process.
func newHolder(proc fs.FS, pid int) (holder, error) {
	start, err := startTime(proc, pid)
	if err != nil {
		return holder{}, err
	}
	return holder{pid, start}, nil
}

func (p holder) alive(proc fs.FS) bool {
	start, err := startTime(proc, p.PID)
	return err == nil && start == p.Start
}

// gone reports whether the process has ended. If it can't be looked at, as for lack of descriptors,
// that is not known.
func (p holder) gone(proc fs.FS) bool {
	start, err := startTime(proc, p.PID)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
	}
	return start != p.Start
}

// startTime reads field 22 of /proc/PID/stat (proc_pid_stat(5)): the process's start
// time, in clock ticks since boot. Field 2, the name, may contain blanks and parentheses.
func startTime(proc fs.FS, pid int) (uint64, error) {
	data, err := fs.ReadFile(proc, strconv.Itoa(pid)+"/stat")
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	text := string(data)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	// With other threads, only the first one has ended, and the process goes on.
	ended := len(fields) >= 20 && (fields[0] == "Z" || fields[0] == "X") && (fields[17] == "0" || fields[17] == "1")
	if len(fields) < 20 || ended {
		return 0, fmt.Errorf("process %d is over: %w", pid, fs.ErrNotExist)
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("process %d: start time: %w", pid, err)
	}
	return start, nil
}

// amount returns how much of a GPU the claim takes, in bytes. room is the memory that is
// available to it there. 0 means the whole GPU: the claim did not state how much it
// needs.
func (c *claim) amount(room uint64) uint64 {
	if c.Min == 0 {
		return 0
	}
	return min(c.want(), room)
}

// want returns how much memory the claim prefers to have, in bytes. 0: it did not state
// any.
func (c *claim) want() uint64 { return max(c.Min, c.Prefer) }

func (c *claim) proto() *gpuctlv1.Claim {
	return &gpuctlv1.Claim{
		Id: c.ID, Gpus: c.GPUs, Expr: c.Expr, MinMemory: c.Min, PreferMemory: c.Prefer, Count: uint32(c.Count),
		Device: c.device(), HolderPid: uint32(c.Holder.PID), CreatedUnixMs: c.Created, Remote: cmp.Or(c.Remote, remoteNever), Stays: c.Stays,
		Owner: c.Owner, Weight: c.Weight,
	}
}

func (c *claim) device() *gpuctlv1.VirtualDevice {
	return &gpuctlv1.VirtualDevice{Name: c.Name, Type: c.Type, GlobalMemory: c.Memory}
}

// operation is a swap, suspend or resume that is in progress.
type operation struct {
	Session string   `json:"session"`
	Claim   string   `json:"claim"`
	Kind    string   `json:"kind"`
	GPUs    []string `json:"gpus,omitempty"`  // reserved GPUs: the operation's target
	From    []string `json:"from,omitempty"`  // where the session was: its executor there may not have ended before the operation is over
	Lease   string   `json:"lease,omitempty"` // lease of the target, if that is on another host

	// Folder is that from which the session's processes are made again.
	Folder string `json:"folder,omitempty"`
	// Into is the folder to which the session's processes are written: they end with that.
	Into string `json:"into,omitempty"`

	// Record is the operation's entry in the cluster. If hostd is restarted, the next one ends it.
	Record record `json:"record,omitzero"`

	// doubt is set while the outcome is unknown: the stream broke, or hostd was restarted
	// during the operation. The target stays reserved until gpuguest reports the
	// session's state.
	doubt bool
	since time.Time // of the doubt; zero: before hostd was started
	made  bool      // the session of a folder is there again
	trace *trace.Operation
	here  cost.Here // what gpuguest has predicted for a swap on this host
	began time.Time
}

// record is a long operation's entry in the cluster, as the journal has it.
type record struct{ *clusterv1.Migration }

// MarshalJSON implements json.Marshaler.
func (r record) MarshalJSON() ([]byte, error) { return protojson.Marshal(r.Migration) }

// UnmarshalJSON implements json.Unmarshaler.
func (r *record) UnmarshalJSON(b []byte) error {
	r.Migration = &clusterv1.Migration{}
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(b, r.Migration)
}

// journal is the content of state.json.
type journal struct {
	Version    int          `json:"version"`
	Revision   int          `json:"revision,omitempty"` // 0: it lacks what complete fills in
	Claims     []*claim     `json:"claims"`
	Operations []*operation `json:"operations"`
	Borrowed   []*borrowed  `json:"borrowed,omitempty"`
	Lent       []*lent      `json:"lent,omitempty"`
	// Names are those of the runtimes' cards, by their PCI addresses.
	Names map[string]string `json:"names,omitempty"`
}

const (
	journalVersion  = 1 // others are not read
	journalRevision = 1
)

func readJournal(path string) (journal, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return journal{Version: journalVersion}, nil
	}
	if err != nil {
		return journal{}, fmt.Errorf("state: %w", err)
	}
	var j journal
	if err := json.Unmarshal(data, &j); err != nil {
		return journal{}, fmt.Errorf("state %s: %w", path, err)
	}
	if j.Version != journalVersion {
		return journal{}, fmt.Errorf("state %s: version %d is not known", path, j.Version)
	}
	if slices.Contains(j.Claims, nil) || slices.Contains(j.Operations, nil) || slices.Contains(j.Borrowed, nil) || slices.Contains(j.Lent, nil) {
		return journal{}, fmt.Errorf("state %s: a claim, operation or lease is null; without the file, hostd begins with none", path)
	}
	if j.Revision == 0 {
		j.complete()
	}
	return j, nil
}

// complete fills in what an older hostd did not write: what its claims have is offered, and where
// sessions were is in the records of their operations.
func (j journal) complete() {
	for _, c := range j.Claims {
		if c.Token != "" && !c.Released && c.Offered == nil {
			c.Offered = slices.Clone(c.GPUs)
		}
	}
	for _, op := range j.Operations {
		if op.Kind != "resume" && op.From == nil {
			op.From = splitIDs(op.Record.GetFrom())
		}
	}
}

func (j journal) encode() ([]byte, error) {
	slices.SortFunc(j.Claims, func(a, b *claim) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(j.Operations, func(a, b *operation) int { return cmp.Compare(a.Session, b.Session) })
	slices.SortFunc(j.Borrowed, func(a, b *borrowed) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(j.Lent, func(a, b *lent) int { return cmp.Compare(a.ID, b.ID) })
	data, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	return data, nil
}
