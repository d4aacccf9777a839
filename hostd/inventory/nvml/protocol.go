package nvml

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Version is the version of the protocol. Client and helper are installed together, so
// another version means that the installation is inconsistent.
const Version = 1

// Sizes of the largest messages in bytes.
const (
	MaxRequest  = 4 << 10
	MaxResponse = 4 << 20
)

// ErrProtocol means that a message does not conform to the protocol.
var ErrProtocol = errors.New("not a message of hostd-nvml")

// Op is the operation that a request asks for.
type Op string

// Operations of the helper.
const (
	List    Op = "list"    // all properties of all GPUs
	Facts   Op = "facts"   // what changes often, of all GPUs
	Release Op = "release" // close the driver, answer, and end
)

// Request is a request to the helper.
type Request struct {
	Version int    `json:"version"`
	Number  uint64 `json:"number"`
	Op      Op     `json:"op"`
}

// Status is the result of a request.
type Status string

// Results of requests.
const (
	OK       Status = "ok"
	NoDriver Status = "no_driver" // the library or the driver is missing
	Failed   Status = "failed"
)

// Response is the helper's answer.
type Response struct {
	Version int    `json:"version"`
	Number  uint64 `json:"number"`
	Status  Status `json:"status"`
	Message string `json:"message,omitempty"` // why Status is not OK
	Driver  string `json:"driver,omitempty"`  // version of the driver
	CUDA    string `json:"cuda,omitempty"`    // highest version of CUDA that the driver supports
	GPUs    []GPU  `json:"gpus,omitempty"`
}

// GPU has what NVML reports about a GPU. Numbers that NVML does not report are nil.
type GPU struct {
	UUID       string   `json:"uuid,omitempty"`
	Name       string   `json:"name,omitempty"`
	Serial     string   `json:"serial,omitempty"`
	PCIAddress string   `json:"pci_address"` // 0000:65:00.0
	NUMANode   *int     `json:"numa_node,omitempty"`
	Memory     *uint64  `json:"memory,omitempty"` // bytes
	UsedMemory *uint64  `json:"used_memory,omitempty"`
	Link       *Link    `json:"link,omitempty"`
	MIG        *MIG     `json:"mig,omitempty"` // nil: the GPU has no MIG
	ECC        *ECC     `json:"ecc,omitempty"`
	Xids       []Xid    `json:"xids,omitempty"`   // errors of the card since the helper was started
	Errors     []string `json:"errors,omitempty"` // calls that failed although the GPU supports them

	Lost          bool `json:"lost,omitempty"`           // not on the bus any more
	ResetRequired bool `json:"reset_required,omitempty"` // the GPU does not work until it is reset

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

// MIG is the configuration of a GPU that can be partitioned (Multi-Instance GPU).
type MIG struct {
	Enabled   bool          `json:"enabled"`
	Pending   bool          `json:"pending"` // Enabled after the next reset
	Instances []MIGInstance `json:"instances,omitempty"`
	Profiles  []MIGProfile  `json:"profiles,omitempty"`
}

// MIGInstance is a MIG device that exists.
type MIGInstance struct {
	UUID    string `json:"uuid"`
	Name    string `json:"name,omitempty"`
	Memory  uint64 `json:"memory,omitempty"` // bytes
	GPU     int    `json:"gpu"`              // ids of the GPU instance and the compute instance
	Compute int    `json:"compute"`
}

// MIGProfile is a profile of GPU instances that the GPU supports.
type MIGProfile struct {
	ID     uint32 `json:"id"`
	Name   string `json:"name"`
	Memory uint64 `json:"memory"` // bytes
	Max    uint32 `json:"max"`    // most instances on the whole GPU
}

// ECC has the counters of memory errors.
type ECC struct {
	Enabled          bool    `json:"enabled"`
	Uncorrected      *uint64 `json:"uncorrected,omitempty"` // since the driver was loaded
	RemapFailed      bool    `json:"remap_failed,omitempty"`
	RemapPending     bool    `json:"remap_pending,omitempty"`
	RetiredPending   bool    `json:"retired_pending,omitempty"`
	RemappedRows     *int    `json:"remapped_rows,omitempty"`
	UncorrectedRemap *int    `json:"uncorrected_remap,omitempty"`
}

// Xid is an error number that the driver has reported, with its count.
type Xid struct {
	Code  uint64 `json:"code"`
	Count int    `json:"count"`
}

// Process is a process that uses a GPU.
type Process struct {
	PID    uint32  `json:"pid"`
	Name   string  `json:"name,omitempty"`
	Memory *uint64 `json:"memory,omitempty"` // bytes; nil: the driver does not report it
}

// WriteMessage writes one message in one call of Write. A message of more than limit
// bytes is an error.
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

// ReadMessage reads one message. At the end of the stream it returns io.EOF, within a
// message io.ErrUnexpectedEOF. A message of more than limit bytes is an error that wraps
// ErrProtocol.
func ReadMessage(r io.Reader, m any, limit int) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(head[:])
	if int64(size) > int64(limit) {
		return fmt.Errorf("%w: %d bytes, more than %d", ErrProtocol, size, limit)
	}
	// The buffer grows with what arrives, not with the announced length.
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

// GetGPUs returns the GPUs of an answer; r may be nil.
func (r *Response) GetGPUs() []GPU {
	if r == nil {
		return nil
	}
	return r.GPUs
}
