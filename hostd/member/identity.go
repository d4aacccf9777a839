package member

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/gpuctl/gpuctl/internal/durable"
)

// identity is the content of node.json.
type identity struct {
	Version int    `json:"version"`
	Host    string `json:"host"`
	ID      string `json:"id"`
	Address string `json:"address"`
	Cluster string `json:"cluster"`
	// Found is set until the new cluster of this host has its first log entry.
	Found bool `json:"found,omitempty"`
}

const identityVersion = 1

func identityPath(dir string) string { return filepath.Join(dir, "node.json") }

// beginningPath is the file of a membership that is not complete yet.
func beginningPath(dir string) string { return filepath.Join(dir, "beginning.json") }

// readIdentity reads node.json. It returns nil if the host has never been a member.
func readIdentity(dir string) (*identity, error) {
	path := identityPath(dir)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("membership: %w", err)
	}
	id := &identity{}
	if err := json.Unmarshal(data, id); err != nil {
		return nil, fmt.Errorf("membership %s: %w", path, err)
	}
	if id.Version != identityVersion {
		return nil, fmt.Errorf("membership %s: version %d is not known to this hostd (it knows %d)", path, id.Version, identityVersion)
	}
	return id, nil
}

func (id *identity) encode() ([]byte, error) {
	id.Version = identityVersion
	data, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("membership: %w", err)
	}
	return append(data, '\n'), nil
}

func (id *identity) write(dir string) error {
	data, err := id.encode()
	if err != nil {
		return err
	}
	if err := durable.Replace(identityPath(dir), data, 0o600); err != nil {
		return fmt.Errorf("membership: %w", err)
	}
	return nil
}
