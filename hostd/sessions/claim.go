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
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/telemetry/trace"
)

// claim is what an application needs and what it got.
type claim struct {
	ID      string            `json:"id"`
	Token   string            `json:"token"`
	Expr    string            `json:"expr,omitempty"`
	Min     uint64            `json:"min,omitempty"`    // bytes; not 0: may share its GPU
	Prefer  uint64            `json:"prefer,omitempty"` // bytes
	Count   int               `json:"count"`
	Name    string            `json:"name,omitempty"` // of the virtual device
	Type    string            `json:"type,omitempty"`
	Memory  uint64            `json:"memory,omitempty"` // of the virtual device, bytes
	GPUs    []string          `json:"gpus,omitempty"`   // where its next session starts
	Held    map[string]uint64 `json:"held,omitempty"`   // amounts, by GPU
	Holder  holder            `json:"holder"`
	Created int64             `json:"created"` // Unix time, ms
	// Released claims take no new sessions and end with their last one.
	Released bool `json:"released,omitempty"`
}

// holder is the process that a claim belongs to. The start time tells it from
// a later process with the same id.
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

// startTime reads the 22nd field of a process's stat file. The second, its
// name, may hold blanks and parentheses.
func startTime(proc fs.FS, pid int) (uint64, error) {
	data, err := fs.ReadFile(proc, strconv.Itoa(pid)+"/stat")
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	text := string(data)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return 0, fmt.Errorf("process %d is over: %w", pid, fs.ErrNotExist)
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("process %d: start time: %w", pid, err)
	}
	return start, nil
}

// amount is how much of a GPU with that much room the claim takes: all of the
// GPU (0) unless it stated a need.
func (c *claim) amount(room uint64) uint64 {
	if c.Min == 0 {
		return 0
	}
	return min(c.want(), room)
}

// want is what the claim would like to have, in bytes; 0 when it did not say.
func (c *claim) want() uint64 { return max(c.Min, c.Prefer) }

func (c *claim) proto() *gpuctlv1.Claim {
	return &gpuctlv1.Claim{
		Id: c.ID, Gpus: c.GPUs, Expr: c.Expr, MinMemory: c.Min, PreferMemory: c.Prefer, Count: uint32(c.Count),
		Device: c.device(), HolderPid: uint32(c.Holder.PID), CreatedUnixMs: c.Created,
	}
}

func (c *claim) device() *gpuctlv1.VirtualDevice {
	return &gpuctlv1.VirtualDevice{Name: c.Name, Type: c.Type, GlobalMemory: c.Memory}
}

// operation is a swap, suspend or resume in flight.
type operation struct {
	Session string   `json:"session"`
	Claim   string   `json:"claim"`
	Kind    string   `json:"kind"`
	GPUs    []string `json:"gpus,omitempty"` // reserved as its target

	// doubt is set when its outcome is not known: the stream broke, or this
	// hostd was not there. The target stays reserved until the guest says.
	doubt bool
	// record is what the cluster knows of it.
	record *clusterv1.Migration
	trace  *trace.Operation
	began  time.Time
}

// journal is the content of state.json.
type journal struct {
	Version    int          `json:"version"`
	Claims     []*claim     `json:"claims"`
	Operations []*operation `json:"operations"`
}

const journalVersion = 1

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
	if slices.Contains(j.Claims, nil) || slices.Contains(j.Operations, nil) {
		return journal{}, fmt.Errorf("state %s: a claim or operation is null; without the file, hostd begins with none", path)
	}
	return j, nil
}

func (j journal) encode() ([]byte, error) {
	slices.SortFunc(j.Claims, func(a, b *claim) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(j.Operations, func(a, b *operation) int { return cmp.Compare(a.Session, b.Session) })
	data, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	return data, nil
}
