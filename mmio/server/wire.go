package server

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/pciconf"
	"github.com/gpuctl/gpuctl/mmio/xen"
)

// maxMessage is the longest message, in bytes. A status of the most parts has half of it.
const maxMessage = 1 << 20

// MaxParts is the most parts of one GPU.
const MaxParts = 64

// Errors that cross the socket.
var (
	ErrExists   = errors.New("the VM has that part already")
	ErrNotFound = errors.New("no such part")
	ErrRefused  = errors.New("refused")
	// ErrAgain means that another operation on the part has not ended: ask again.
	ErrAgain = errors.New("busy")
	// ErrEarly means that the domain is still being made: ask again.
	ErrEarly = xen.ErrEarly
	// ErrGiven means that another host has the part's contents now.
	ErrGiven = errors.New("it was given to another host")
	// ErrState means that contents are not those that the part awaits, or damaged.
	ErrState = mediate.ErrState
	// ErrNoServer means that no process has the GPU.
	ErrNoServer = errors.New("no process has the GPU")
)

// Part is a part of the GPU for a domain.
type Part struct {
	ID     string `json:"id"`
	Name   string `json:"name"` // of the VM, for events
	Domain uint16 `json:"domain"`
	Slot   uint8  `json:"slot"` // on PCI bus 0 of the domain
	Memory uint64 `json:"memory"`
	Weight int    `json:"weight"`
	Mode   string `json:"mode"`
	// Guest is where the memory of the domain ends, in bytes.
	Guest uint64 `json:"guest"`
	// Owner is whose the part is: the VM's UUID. Only a state with the same owner is restored.
	Owner string `json:"owner,omitempty"`
	// Await is set if the part's contents come from another host. Accesses wait until they are
	// there. Config is the configuration space that the VM has had there, so that Xen knows
	// which accesses these are.
	Await  bool   `json:"await,omitempty"`
	Config []byte `json:"config,omitempty"`
}

// State is what becomes of a part's accesses and commands.
type State string

// The states of a part. A part that is not Awaiting begins as Served.
const (
	Served   State = "served"   // all of it works
	Awaiting State = "awaiting" // its contents are not there yet: accesses wait
	Parked   State = "parked"   // accesses are answered, and no command runs: the VM is about to move
	Sealed   State = "sealed"   // accesses wait, and nothing of its contents changes
	Given    State = "given"    // as Sealed, for good: another host has it
)

// Counts is what was counted while a VM's driver was in a phase.
type Counts struct {
	Exits      uint64 `json:"exits"`
	Scans      uint64 `json:"scans"`
	Hypercalls uint64 `json:"hypercalls"`
	Refused    uint64 `json:"refused"`
	Commands   uint64 `json:"commands"`
}

// Status is what is known of a part.
type Status struct {
	Part
	// Config of a part that is Parked, Sealed or Given is what its function has now.
	State  State             `json:"state"`
	Seal   string            `json:"seal,omitempty"` // of a Sealed part: it tells its contents from those of another time
	Lost   string            `json:"lost,omitempty"` // why it reads as ones; empty: it works
	Phases map[string]Counts `json:"phases,omitempty"`
	// Requests are those that Xen has passed on, Malformed those of them that cannot be.
	Requests  uint64        `json:"requests"`
	Malformed uint64        `json:"malformed"`
	Busy      time.Duration `json:"busy"` // of the GPU's time
}

// request is one line from the daemon, answer one to it.
type request struct {
	Op   string `json:"op"` // attach, detach, list or one of the moves
	Part Part   `json:"part"`
	Seal string `json:"seal,omitempty"`
}

type answer struct {
	Error string   `json:"error,omitempty"`
	Code  string   `json:"code,omitempty"`
	Parts []Status `json:"parts,omitempty"`
}

// codes are the errors that have a meaning on the other side.
func codes() map[string]error {
	return map[string]error{"busy": ErrAgain, "early": ErrEarly, "exists": ErrExists, "not_found": ErrNotFound, "refused": ErrRefused, "given": ErrGiven, "state": ErrState}
}

func failed(err error) answer {
	a := answer{Error: err.Error()}
	for code, e := range codes() {
		if errors.Is(err, e) {
			a.Code = code
		}
	}
	return a
}

// parse reads a request. Errors wrap ErrRefused.
func parse(line []byte) (request, error) {
	var r request
	if err := json.Unmarshal(line, &r); err != nil {
		return r, fmt.Errorf("%w: %w", ErrRefused, err)
	}
	switch r.Op {
	case "list":
		return r, nil
	case "attach", "detach", opPark, opSave, opGive, opRestore, opResume:
	default:
		return r, fmt.Errorf("%w: %.40q is no request", ErrRefused, r.Op)
	}
	if n := len(r.Part.ID); n == 0 || n > 64 || len(r.Part.Name) > 256 {
		return r, fmt.Errorf("%w: a part needs an id of 1 to 64 bytes", ErrRefused)
	}
	if len(r.Part.Owner) > 64 || r.Part.Await != (len(r.Part.Config) == pciconf.Size) {
		return r, fmt.Errorf("%w: a part that awaits its contents needs a configuration space of %d bytes", ErrRefused, pciconf.Size)
	}
	if r.Op == "attach" && (r.Part.Domain == 0 || r.Part.Domain >= 0x7ff0 || r.Part.Slot < 1 || r.Part.Slot > 31) {
		return r, fmt.Errorf("%w: domain %d, slot %d", ErrRefused, r.Part.Domain, r.Part.Slot)
	}
	return r, nil
}

// Client asks the process that has a GPU. Its calls that move a part are in client.go.
type Client struct {
	Socket string
	// Within limits each call; 0: 30 s, which is more than one change of a part may take. The
	// caller may hold locks, and a process that hangs must not hang it.
	Within time.Duration
}

const answerWithin = patience + 10*time.Second

func (c Client) call(ctx context.Context, r request) ([]Status, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(c.Within, answerWithin))
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.Socket)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoServer, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	line, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	var a answer
	if _, err = conn.Write(append(line, '\n')); err == nil {
		in := bufio.NewReaderSize(conn, maxMessage)
		if line, err = in.ReadSlice('\n'); err == nil {
			err = json.Unmarshal(line, &a)
		}
	}
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("ask the process that has the GPU: %w", err)
	}
	return a.Parts, a.err()
}

// Attach gives a domain a part. If it has that part already, the error wraps ErrExists; if the
// domain has not got its vCPUs yet, ErrEarly.
func (c Client) Attach(ctx context.Context, p Part) error {
	_, err := c.call(ctx, request{Op: "attach", Part: p})
	return err
}

// Detach takes a part back. It may be repeated. The domain reads ones where it was.
func (c Client) Detach(ctx context.Context, id string) error {
	_, err := c.call(ctx, request{Op: "detach", Part: Part{ID: id}})
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}

// List returns the parts. Without a process, the error wraps ErrNoServer.
func (c Client) List(ctx context.Context) ([]Status, error) {
	return c.call(ctx, request{Op: "list"})
}
