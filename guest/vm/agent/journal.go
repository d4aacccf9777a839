package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"

	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

const (
	journalVersion = 1
	maxJournal     = 1 << 20
	maxReleased    = 256
)

// journal is the file that contains what is released.
type journal struct {
	path string
	data journalData
}

type journalData struct {
	Version   int                     `json:"version"`
	Boot      string                  `json:"boot"`              // boot id; after another boot, nothing is released
	Autoprobe bool                    `json:"autoprobe"`         // drivers_autoprobe before the first release
	Released  map[string]releasedData `json:"released"`          // by address
	Stopped   []string                `json:"stopped,omitempty"` // services that are to be started again
}

type releasedData struct {
	Driver   string `json:"driver,omitempty"`   // before the release
	Override string `json:"override,omitempty"` // before the release
}

func openJournal(dir, boot string) (*journal, error) {
	j := &journal{path: filepath.Join(dir, "released.json")}
	empty := journalData{Version: journalVersion, Boot: boot, Released: map[string]releasedData{}}
	f, err := os.Open(j.path)
	if errors.Is(err, fs.ErrNotExist) {
		j.data = empty
		return j, nil
	} else if err != nil {
		return nil, fmt.Errorf("released devices: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxJournal))
	if err == nil {
		err = json.Unmarshal(b, &j.data)
	}
	if err == nil && j.data.Version != journalVersion {
		err = fmt.Errorf("version %d, this program knows %d", j.data.Version, journalVersion)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w; if no device is released, remove it", j.path, err)
	}
	if j.data.Boot != boot || j.data.Released == nil {
		j.data = empty
	}
	return j, nil
}

func (j *journal) has(a pci.Address) bool {
	_, ok := j.data.Released[a.String()]
	return ok
}

// change replaces the file. If that fails, nothing has changed.
func (j *journal) change(f func(*journalData)) error {
	next := j.data
	next.Released = maps.Clone(j.data.Released)
	f(&next)
	b, err := json.Marshal(next)
	if err == nil {
		err = durable.Replace(j.path, b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("journal what is released: %w", err)
	}
	j.data = next
	return nil
}
