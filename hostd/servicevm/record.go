package servicevm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/durable"
)

const (
	recordVersion = 1
	maxRecord     = 1 << 20
	mostVMs       = 256
	mostBase      = 100 // bytes of a GPU's name that come from the VM's
)

// record is the content of the file: the service VMs of this host.
type record struct {
	Version int         `json:"version"`
	VMs     []*declared `json:"vms"`
}

// declared is a VM of which the operator has said that it serves others.
type declared struct {
	UUID string `json:"uuid"`
	Name string `json:"name"`
	// Ending means that its GPUs are given to nobody any more. It is forgotten when nothing
	// computes there.
	Ending bool     `json:"ending,omitempty"`
	GPUs   []*known `json:"gpus,omitempty"`
}

// known is a card of such a VM, as it was seen last. What leases are to be restored after a
// restart is counted by it, before the VM answers.
type known struct {
	Name    string `json:"name"`    // in the inventory, without the host's
	Address string `json:"address"` // in the VM
	Model   string `json:"model"`
	Memory  uint64 `json:"memory"` // bytes
}

func readRecord(path string) (record, error) {
	if path == "" {
		return record{Version: recordVersion}, nil
	}
	data, err := beneath.ReadFile(filepath.Dir(path), filepath.Base(path), maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return record{Version: recordVersion}, nil
	}
	var r record
	if err == nil {
		r, err = decodeRecord(data)
	}
	if err != nil {
		return record{}, fmt.Errorf("record of service VMs %s: %w; without it, hostd does not know who computes in them: restore it, or end what computes there and remove it", path, err)
	}
	return r, nil
}

func decodeRecord(data []byte) (record, error) {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return record{}, err
	}
	if r.Version != recordVersion {
		return record{}, fmt.Errorf("version %d is not %d: another gpuctl has written it", r.Version, recordVersion)
	}
	names, uuids := map[string]bool{}, map[string]bool{}
	for _, d := range r.VMs {
		if d == nil || d.UUID == "" || uuids[d.UUID] {
			return record{}, errors.New("a VM is in it twice, or without a UUID")
		}
		uuids[d.UUID] = true
		for _, g := range d.GPUs {
			if g == nil || g.Name == "" || names[g.Name] || g.Memory == 0 || g.Memory > mostMemory {
				return record{}, fmt.Errorf("a GPU of VM %s makes no sense", d.Name)
			}
			names[g.Name] = true
		}
	}
	return r, nil
}

func writeRecord(path string, r record) error {
	if path == "" {
		return nil // hostd --dev
	}
	r.Version = recordVersion
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return durable.Replace(path, append(data, '\n'), 0o600)
}

// nameOf returns a name for a GPU of a VM, that no other has. The VM's name may be any text.
func nameOf(machine string, taken map[string]bool) string {
	base := "vm-" + strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-' {
			return r
		}
		return '-'
	}, machine)
	if len(base) > mostBase {
		base = base[:mostBase]
	}
	name := base
	for n := 2; taken[name]; n++ {
		name = fmt.Sprintf("%s-%d", base, n)
	}
	return name
}
