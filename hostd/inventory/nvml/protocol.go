package nvml

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Version of the protocol. Client and helper are installed together; another
// version means that they were not.
const Version = 1

// Largest messages.
const (
	MaxRequest  = 4 << 10
	MaxResponse = 4 << 20
)

// ErrProtocol says that what came is no message of this protocol.
var ErrProtocol = errors.New("not a message of hostd-nvml")

// Op is what a request is for.
type Op string

// What the helper does.
const (
	List    Op = "list"    // everything of every GPU
	Facts   Op = "facts"   // what changes often
	Release Op = "release" // let go of the driver, answer, and end
)

// Request asks the helper for something.
type Request struct {
	Version int    `json:"version"`
	Number  uint64 `json:"number"`
	Op      Op     `json:"op"`
}

// Status is how a request went.
type Status string

// How requests go.
const (
	OK       Status = "ok"
	NoDriver Status = "no_driver" // the library or the driver is not there
	Failed   Status = "failed"
)

// Response is the helper's answer.
type Response struct {
	Version int    `json:"version"`
	Number  uint64 `json:"number"`
	Status  Status `json:"status"`
	Message string `json:"message,omitempty"` // why it is not OK
	Driver  string `json:"driver,omitempty"`  // version
	CUDA    string `json:"cuda,omitempty"`    // highest version that the driver serves
	GPUs    []GPU  `json:"gpus,omitempty"`
}

// GPU is what NVML says of one. Numbers that it does not have are nil.
type GPU struct {
	UUID       string   `json:"uuid,omitempty"`
	Name       string   `json:"name,omitempty"`
	Serial     string   `json:"serial,omitempty"`
	PCIAddress string   `json:"pci_address"` // 0000:65:00.0
	NUMANode   *int     `json:"numa_node,omitempty"`
	Memory     *uint64  `json:"memory,omitempty"` // bytes
	UsedMemory *uint64  `json:"used_memory,omitempty"`
	Link       *Link    `json:"link,omitempty"`
	MIG        *MIG     `json:"mig,omitempty"` // nil: cannot be sliced
	ECC        *ECC     `json:"ecc,omitempty"`
	Xids       []Xid    `json:"xids,omitempty"`   // since the helper started, those that speak of the card
	Errors     []string `json:"errors,omitempty"` // calls that failed though the GPU has what they ask for

	Lost          bool `json:"lost,omitempty"`           // fallen off the bus
	ResetRequired bool `json:"reset_required,omitempty"` // until then it computes nothing

	Processes         []Process `json:"processes,omitempty"`
	Utilization       *uint32   `json:"utilization,omitempty"`        // percent
	MemoryUtilization *uint32   `json:"memory_utilization,omitempty"` // percent
	Temperature       *int32    `json:"temperature,omitempty"`        // °C
	Power             *uint32   `json:"power,omitempty"`              // mW
	PowerLimit        *uint32   `json:"power_limit,omitempty"`        // mW
}

// Link is the PCI Express link.
type Link struct {
	Generation    int `json:"generation,omitempty"`
	MaxGeneration int `json:"max_generation,omitempty"`
	Width         int `json:"width,omitempty"`
	MaxWidth      int `json:"max_width,omitempty"`
}

// MIG is how a GPU is cut into slices.
type MIG struct {
	Enabled   bool          `json:"enabled"`
	Pending   bool          `json:"pending"` // what it will be after a reset
	Instances []MIGInstance `json:"instances,omitempty"`
	Profiles  []MIGProfile  `json:"profiles,omitempty"`
}

// MIGInstance is a slice that exists.
type MIGInstance struct {
	UUID    string `json:"uuid"`
	Name    string `json:"name,omitempty"`
	Memory  uint64 `json:"memory,omitempty"` // bytes
	GPU     int    `json:"gpu"`              // instance ids
	Compute int    `json:"compute"`
}

// MIGProfile is a kind of slice that the GPU can be cut into.
type MIGProfile struct {
	ID     uint32 `json:"id"`
	Name   string `json:"name"`
	Memory uint64 `json:"memory"` // bytes
	Max    uint32 `json:"max"`    // of them on the whole GPU
}

// ECC is the health of the memory.
type ECC struct {
	Enabled          bool    `json:"enabled"`
	Uncorrected      *uint64 `json:"uncorrected,omitempty"` // since the driver was loaded
	RemapFailed      bool    `json:"remap_failed,omitempty"`
	RemapPending     bool    `json:"remap_pending,omitempty"`
	RetiredPending   bool    `json:"retired_pending,omitempty"`
	RemappedRows     *int    `json:"remapped_rows,omitempty"`
	UncorrectedRemap *int    `json:"uncorrected_remap,omitempty"`
}

// Xid is a kind of error that the driver has reported.
type Xid struct {
	Code  uint64 `json:"code"`
	Count int    `json:"count"`
}

// Process uses a GPU.
type Process struct {
	PID    uint32  `json:"pid"`
	Name   string  `json:"name,omitempty"`
	Memory *uint64 `json:"memory,omitempty"` // bytes; nil: the driver does not say
}

// WriteMessage writes one message, in one piece.
func WriteMessage(w io.Writer, m any, limit int) error {
	body, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	if len(body) > limit {
		return fmt.Errorf("%w: %d bytes, more than %d", ErrProtocol, len(body), limit)
	}
	frame := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body)))
	_, err = w.Write(append(frame, body...))
	return err
}

// ReadMessage reads one. At the end of the stream it returns io.EOF, within a
// message io.ErrUnexpectedEOF.
func ReadMessage(r io.Reader, m any, limit int) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(head[:])
	if int64(size) > int64(limit) {
		return fmt.Errorf("%w: %d bytes, more than %d", ErrProtocol, size, limit)
	}
	// Memory follows what comes, not what was announced.
	var body bytes.Buffer
	if n, err := io.CopyN(&body, r, int64(size)); err != nil {
		if errors.Is(err, io.EOF) || n < int64(size) && err == nil {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	if err := json.Unmarshal(body.Bytes(), m); err != nil {
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	return nil
}

// GetGPUs are the GPUs of an answer; of none, none.
func (r *Response) GetGPUs() []GPU {
	if r == nil {
		return nil
	}
	return r.GPUs
}
