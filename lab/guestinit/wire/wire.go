package wire

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"
)

// MaxLine bounds a message, in bytes.
const MaxLine = 1 << 20

// Operations of a Request.
const (
	Ping  = "ping"  // → Status
	List  = "pci"   // → Devices
	Read  = "read"  // Device, BAR, Offset, Width → Value
	Write = "write" // Device, BAR, Offset, Width, Value
	Exec  = "exec"  // Argv, Input, TimeoutSeconds → Exit, Output, Errors
)

// Request is what the host asks.
type Request struct {
	ID     string `json:"id"` // of the caller's choice; no two alike
	Op     string `json:"op"`
	Device string `json:"device,omitempty"` // PCI address in the guest
	BAR    int    `json:"bar,omitempty"`
	Offset int64  `json:"offset,omitempty"` // bytes, a multiple of Width
	Width  int    `json:"width,omitempty"`  // bytes: 1, 2, 4 or 8
	Value  uint64 `json:"value,omitempty"`

	Argv           []string `json:"argv,omitempty"`
	Input          []byte   `json:"input,omitempty"`
	TimeoutSeconds int      `json:"timeout_seconds,omitempty"` // 0: 30
}

// Answer is what the guest says. Reply repeats the request's ID; it has another
// name so that an echo of a request is never taken for an answer.
type Answer struct {
	Reply   string   `json:"reply"`
	Error   string   `json:"error,omitempty"`
	Status  *Status  `json:"status,omitempty"`
	Devices []Device `json:"devices,omitempty"`
	Value   uint64   `json:"value,omitempty"`
	Exit    int      `json:"exit,omitempty"` // -1: ended by a signal or the time-out
	Output  []byte   `json:"output,omitempty"`
	Errors  []byte   `json:"errors,omitempty"`
}

// Status tells guests and their boots apart.
type Status struct {
	BootID        string  `json:"boot_id"`
	UptimeSeconds float64 `json:"uptime_seconds"`
	Kernel        string  `json:"kernel"`
	HangUps       int64   `json:"hang_ups"` // times that the channel was lost, as in a migration
}

// Device is a PCI device as the guest sees it.
type Device struct {
	Address string   `json:"address"`
	ID      string   `json:"id"`     // vendor:device, hexadecimal
	Class   string   `json:"class"`  // 6 hexadecimal digits
	Driver  string   `json:"driver"` // empty: none
	BARs    []uint64 `json:"bars"`   // sizes in bytes; 0: none
}

// Serve reads requests and writes what handle answers, one after the other,
// until reading fails.
func Serve(ctx context.Context, rw io.ReadWriter, handle func(context.Context, *Request) *Answer) error {
	in := NewReader(rw)
	for {
		line, err := in.Line()
		if err != nil {
			return err
		}
		var q Request
		if json.Unmarshal(line, &q) != nil || q.ID == "" || q.Op == "" {
			continue
		}
		a := handle(ctx, &q)
		a.Reply = q.ID
		b, err := json.Marshal(a)
		if err != nil {
			return err
		}
		if _, err := rw.Write(append(b, '\n')); err != nil {
			return err
		}
	}
}

// Reader reads lines of at most MaxLine bytes and drops longer ones.
type Reader struct{ in *bufio.Reader }

// NewReader returns a Reader of r.
func NewReader(r io.Reader) *Reader { return &Reader{bufio.NewReaderSize(r, 64<<10)} }

// Line returns the next line without its end.
func (r *Reader) Line() ([]byte, error) {
	var line []byte
	tooLong := false
	for {
		part, err := r.in.ReadSlice('\n')
		if !tooLong {
			line = append(line, part...)
		}
		if len(line) > MaxLine {
			line, tooLong = nil, true
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case err != nil:
			return nil, err
		case tooLong:
			tooLong = false
			line = nil
			continue
		}
		return line[:len(line)-1], nil
	}
}

// Client asks over one connection, one request at a time.
type Client struct {
	mu sync.Mutex
	rw io.ReadWriter
	in *Reader
}

// NewClient returns a Client that talks over rw.
func NewClient(rw io.ReadWriter) *Client { return &Client{rw: rw, in: NewReader(rw)} }

// Do sends q and returns its answer. Lines that are no answer to it are dropped.
// Deadlines are the connection's.
func (c *Client) Do(q *Request) (*Answer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, err := json.Marshal(q)
	if err != nil {
		return nil, err
	}
	// The newline before it ends what somebody else may have left half-way.
	if _, err := c.rw.Write(append(append([]byte{'\n'}, b...), '\n')); err != nil {
		return nil, err
	}
	for {
		line, err := c.in.Line()
		if err != nil {
			return nil, err
		}
		var a Answer
		if json.Unmarshal(line, &a) == nil && a.Reply == q.ID {
			return &a, nil
		}
	}
}
