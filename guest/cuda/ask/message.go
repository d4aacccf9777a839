package ask

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// Version is that of both messages. Client and helper are of one program, so another version
// is an error.
const Version = 1

// Limits of the messages.
const (
	mostRequest = 64 << 10 // bytes
	mostAnswer  = 1 << 20
	mostText    = 256

	MostGPUs      = 256
	MostProcesses = 4096 // on all GPUs
	// MostTimeout is the longest that a process may be waited for.
	MostTimeout = 24 * time.Hour
)

// Op is what the helper is asked to do.
type Op string

// The operations. All but Devices and Canary are calls of the driver's cuCheckpointProcess
// functions for one process.
const (
	Devices    Op = "devices"    // list GPUs and who computes on them, by NVML; reads the driver's version
	GetState   Op = "state"      // cuCheckpointProcessGetState
	Lock       Op = "lock"       // cuCheckpointProcessLock
	Checkpoint Op = "checkpoint" // cuCheckpointProcessCheckpoint
	Restore    Op = "restore"    // cuCheckpointProcessRestore
	Unlock     Op = "unlock"     // cuCheckpointProcessUnlock
)

// ofProcess reports whether the operation is about one process.
func (o Op) ofProcess() bool {
	switch o {
	case GetState, Lock, Checkpoint, Restore, Unlock:
		return true
	}
	return false
}

// State is a process's state in the driver.
type State string

// The states. The names of the driver are CU_PROCESS_STATE_RUNNING and so on. Driver 615 has
// two more, for states that are stored by other programs.
const (
	Running       State = "running"
	Locked        State = "locked"
	Checkpointed  State = "checkpointed"
	Failed        State = "failed"
	Checkpointing State = "checkpointing"
	Restoring     State = "restoring"
	Unknown       State = "unknown"
)

// UUID is a GPU's, in the form GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx.
type UUID string

// Bytes returns the 16 bytes of the UUID.
func (u UUID) Bytes() (b [16]byte, err error) {
	rest, ok := strings.CutPrefix(string(u), "GPU-")
	text := strings.ReplaceAll(rest, "-", "")
	if !ok || len(rest) != 36 || len(text) != 32 {
		return b, fmt.Errorf("%.64q is no UUID of a GPU", string(u))
	}
	if _, err := hex.Decode(b[:], []byte(text)); err != nil {
		return b, fmt.Errorf("%.64q is no UUID of a GPU: %w", string(u), err)
	}
	return b, nil
}

// NewUUID returns the UUID with these bytes.
func NewUUID(b [16]byte) UUID {
	h := hex.EncodeToString(b[:])
	return UUID("GPU-" + strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-"))
}

// Pair says that what was on the old GPU is to be restored on the new one.
type Pair struct {
	Old UUID `json:"old"`
	New UUID `json:"new"`
}

// Request is what a helper is asked.
type Request struct {
	Version int `json:"version"`
	Op      Op  `json:"op"`
	// PID and Start identify the process. The helper asks the driver only if the process
	// with that pid has started then.
	PID   int    `json:"pid,omitempty"`
	Start uint64 `json:"start,omitempty"`
	// TimeoutMS is how long the driver may wait for the process's kernels before it has
	// locked it.
	TimeoutMS int64  `json:"timeout_ms,omitempty"`
	Pairs     []Pair `json:"pairs,omitempty"`
}

// Check reports what is wrong with a request.
func (r *Request) Check() error {
	switch {
	case r.Version != Version:
		return fmt.Errorf("request of version %d, this is %d: install all of gpuctl from one release", r.Version, Version)
	case r.Op != Devices && !r.Op.ofProcess():
		return fmt.Errorf("unknown request %.40q", string(r.Op))
	case r.Op.ofProcess() && (r.PID <= 1 || r.PID > 1<<22):
		return fmt.Errorf("%d is no pid of an application", r.PID)
	case r.TimeoutMS < 0 || r.TimeoutMS > MostTimeout.Milliseconds():
		return fmt.Errorf("a timeout of %d ms is out of range", r.TimeoutMS)
	case len(r.Pairs) > MostGPUs:
		return fmt.Errorf("%d pairs of GPUs; at most %d", len(r.Pairs), MostGPUs)
	case len(r.Pairs) > 0 && r.Op != Restore:
		return fmt.Errorf("a %s has no pairs of GPUs", r.Op)
	}
	for _, p := range r.Pairs {
		_, oerr := p.Old.Bytes()
		_, nerr := p.New.Bytes()
		if err := errors.Join(oerr, nerr); err != nil {
			return err
		}
	}
	return nil
}

// Answer is what a helper answers.
type Answer struct {
	Version int `json:"version"`
	// Trouble says why the driver was not asked; then nothing else is set but Gone or
	// NoDriver.
	Trouble  string `json:"trouble,omitempty"`
	Gone     bool   `json:"gone,omitempty"`      // the process has ended
	NoDriver bool   `json:"no_driver,omitempty"` // there is no driver, or it has no such function
	// CUDA is the version that the driver's library reports, as 13000 for 13.0.
	CUDA int `json:"cuda,omitempty"`
	// Code is the driver's CUresult; 0 is success. Name is its name.
	Code int    `json:"code,omitempty"`
	Name string `json:"name,omitempty"`
	// State is the process's state after the call, if the driver told it.
	State State `json:"state,omitempty"`
	// TookNS is how long the driver's function took, in ns.
	TookNS int64 `json:"took_ns,omitempty"`
	// Driver is the version of the kernel's driver, as "580.159.04".
	Driver    string    `json:"driver,omitempty"`
	GPUs      []GPU     `json:"gpus,omitempty"`
	Processes []Process `json:"processes,omitempty"`
}

// GPU is one that the driver shows.
type GPU struct {
	UUID       UUID   `json:"uuid"`
	Name       string `json:"name"`
	Minor      int    `json:"minor"`       // number of its node, as in /dev/nvidia0; -1 if unknown
	Address    string `json:"address"`     // on the PCI bus
	Chip       uint32 `json:"chip"`        // PCI device id in the upper, vendor in the lower 16 bits
	Total      uint64 `json:"total"`       // bytes of memory
	Free       uint64 `json:"free"`        // bytes
	MIG        bool   `json:"mig"`         // is divided by MIG
	Persistent bool   `json:"persistent"`  // persistence mode is on
	Lost       bool   `json:"lost"`        // the driver can't tell about it
	NoProcs    bool   `json:"no_procs"`    // the driver can't tell who computes on it
	ComputeMax bool   `json:"exclusive"`   // takes one process only
	Slice      bool   `json:"virtualized"` // is a vGPU
}

// Process computes on a GPU.
type Process struct {
	PID  int    `json:"pid"`
	GPU  UUID   `json:"gpu"`
	Used uint64 `json:"used"` // bytes of its memory; 0 if unknown
	MPS  bool   `json:"mps"`  // through a server of MPS
}

// Check reports what is wrong with an answer.
func (a *Answer) Check() error {
	switch {
	case a.Version != Version:
		return fmt.Errorf("answer of version %d, this is %d", a.Version, Version)
	case len(a.GPUs) > MostGPUs || len(a.Processes) > MostProcesses:
		return fmt.Errorf("answer with %d GPUs and %d processes is too long", len(a.GPUs), len(a.Processes))
	}
	seen := map[UUID]bool{}
	for _, g := range a.GPUs {
		if _, err := g.UUID.Bytes(); err != nil {
			return err
		}
		if seen[g.UUID] {
			return fmt.Errorf("%s is in the answer twice", g.UUID)
		}
		seen[g.UUID] = true
	}
	return nil
}

// ReadRequest reads the one request of a stream.
func ReadRequest(r io.Reader) (*Request, error) {
	req := &Request{}
	if err := read(r, mostRequest, req); err != nil {
		return nil, fmt.Errorf("read request: %w", err)
	}
	return req, req.Check()
}

// WriteAnswer writes the one answer.
func WriteAnswer(w io.Writer, a *Answer) error {
	a.Version = Version
	a.Trouble, a.Name = clip(a.Trouble), clip(a.Name)
	return json.NewEncoder(w).Encode(a)
}

func readAnswer(b []byte) (*Answer, error) {
	a := &Answer{}
	if err := read(strings.NewReader(string(b)), mostAnswer, a); err != nil {
		return nil, fmt.Errorf("read answer: %w", err)
	}
	if err := a.Check(); err != nil {
		return nil, fmt.Errorf("read answer: %w", err)
	}
	return a, nil
}

// read decodes one JSON object of at most that many bytes, and nothing after it.
func read(r io.Reader, most int64, into any) error {
	b, err := io.ReadAll(io.LimitReader(r, most+1))
	switch {
	case err != nil:
		return err
	case len(b) == 0:
		return io.EOF
	case int64(len(b)) > most:
		return fmt.Errorf("it is longer than %d bytes", most)
	}
	return json.Unmarshal(b, into)
}

// clip makes a text of the driver's short and printable.
func clip(s string) string {
	s = strings.ToValidUTF8(s[:min(len(s), mostText)], "")
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}
