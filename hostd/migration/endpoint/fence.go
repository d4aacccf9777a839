package endpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/migrate"
)

// Fence stores the fencing token of each VM's migration. It refuses steps of a driver
// after another one has taken over.
//
// The token of a migration's record is higher than those of all records and drivers
// before it, so one number for each VM is enough. The file survives the process. Fence is
// safe for concurrent use.
type Fence struct {
	path    string
	cluster func() string // id of the cluster that the tokens belong to

	mu   sync.Mutex
	kept fenceFile
}

// fenceFile is the content of the file.
type fenceFile struct {
	Cluster string            `json:"cluster"`
	Tokens  map[string]uint64 `json:"tokens"` // by the VM's UUID
	// Halted has the VMs, by UUID, whose copies ran on this host and on another one, and
	// may have been paused since. They must not be taken for arrivals that never ran.
	Halted map[string]bool `json:"halted,omitempty"`
	// Withdrawn has the token of the last migration, by the VM's UUID, of which a definition
	// that it had left here is gone.
	Withdrawn map[string]uint64 `json:"withdrawn,omitempty"`
	// Autostart has the VMs, by UUID, whose autostart on this host was switched off when a
	// migration stopped them.
	Autostart map[string]bool `json:"autostart,omitempty"`
}

// mostFenced is the number of VMs whose tokens are kept. The lowest tokens are dropped
// first.
const mostFenced = 4096

// OpenFence reads the file. cluster returns the id of the cluster that this host is in
// now. Tokens of another cluster are dropped.
func OpenFence(path string, cluster func() string) (*Fence, error) {
	f := &Fence{path: path, cluster: cluster, kept: fenceFile{Tokens: map[string]uint64{}}}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return f, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &f.kept)
	}
	if err != nil {
		return nil, fmt.Errorf("tokens of migrations in %s: %w", path, err)
	}
	if f.kept.Tokens == nil {
		f.kept.Tokens = map[string]uint64{}
	}
	return f, nil
}

// Admit returns an error that wraps migrate.ErrStale if a driver with a higher token has
// been here. Otherwise it stores the driver's token. A nil Fence admits all.
func (f *Fence) Admit(m *gpuctlv1.SiteMachine) error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	next := f.current()
	seen := next.Tokens[m.GetUuid()]
	switch {
	case m.GetToken() < seen:
		return fmt.Errorf("%w: migration %s of VM %s comes with token %d, and %d was here", migrate.ErrStale, m.GetMigration(), m.GetName(), m.GetToken(), seen)
	case m.GetToken() == seen:
		return nil // an earlier version's driver has no token
	}
	tokens := map[string]uint64{m.GetUuid(): m.GetToken()}
	for uuid, t := range next.Tokens {
		if uuid != m.GetUuid() {
			tokens[uuid] = t
		}
	}
	for len(tokens) > mostFenced {
		delete(tokens, oldest(tokens))
	}
	next.Tokens = tokens
	if err := f.write(next); err != nil { // without it, the token would be lost at a restart
		return fmt.Errorf("the token of migration %s cannot be kept: %w", m.GetMigration(), err)
	}
	return nil
}

// current returns what is kept of the cluster that this host is in now. The caller holds mu.
func (f *Fence) current() fenceFile {
	if id := f.cluster(); id != f.kept.Cluster {
		return fenceFile{Cluster: id, Halted: f.kept.Halted, Autostart: f.kept.Autostart}
	}
	return f.kept
}

// write replaces the file. The caller holds mu.
func (f *Fence) write(next fenceFile) error {
	data, err := json.Marshal(next)
	if err == nil {
		err = durable.Replace(f.path, append(data, '\n'), 0o600)
	}
	if err == nil {
		f.kept = next
	}
	return err
}

// Halt records that a copy of a VM has run on this host while it ran elsewhere, too, or
// that there is no such copy any more.
func (f *Fence) Halt(uuid string, halted bool) error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kept.Halted[uuid] == halted {
		return nil
	}
	next := f.kept
	next.Halted = marked(next.Halted, uuid, halted)
	if err := f.write(next); err != nil {
		if halted { // known at least to this process, and in the file when it can be written again
			f.kept = next
		}
		return fmt.Errorf("that a copy of VM %s has run cannot be kept: %w", uuid, err)
	}
	return nil
}

// marked returns a copy of a set of VMs that has a VM, or does not.
func marked(set map[string]bool, uuid string, on bool) map[string]bool {
	next := map[string]bool{}
	maps.Copy(next, set)
	if delete(next, uuid); on {
		next[uuid] = true
	}
	return next
}

// Halted reports whether a copy of a VM has run on this host while it ran elsewhere, too.
func (f *Fence) Halted(uuid string) bool {
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.kept.Halted[uuid]
}

// Withdraw records that a definition of a VM, which the migration with this token had left on
// this host, is gone.
func (f *Fence) Withdraw(uuid string, token uint64) error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	next := f.current()
	next.Withdrawn = maps.Clone(next.Withdrawn)
	if next.Withdrawn == nil {
		next.Withdrawn = map[string]uint64{}
	}
	next.Withdrawn[uuid] = token
	if err := f.write(next); err != nil {
		return fmt.Errorf("that a definition of VM %s was removed cannot be kept: %w", uuid, err)
	}
	return nil
}

// Withdrawn reports whether Withdraw was called for a VM and this migration, or a later one.
func (f *Fence) Withdrawn(uuid string, token uint64) bool {
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	gone, known := f.current().Withdrawn[uuid]
	return known && gone >= token
}

// Autostart records that a VM's autostart on this host is to be switched on again, or that it is
// not.
func (f *Fence) Autostart(uuid string, again bool) error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kept.Autostart[uuid] == again {
		return nil
	}
	next := f.kept
	next.Autostart = marked(next.Autostart, uuid, again)
	if err := f.write(next); err != nil {
		return fmt.Errorf("that VM %s has an autostart cannot be kept: %w", uuid, err)
	}
	return nil
}

// Autostarts reports whether a VM's autostart on this host is to be switched on again.
func (f *Fence) Autostarts(uuid string) bool {
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.kept.Autostart[uuid]
}

func oldest(tokens map[string]uint64) string {
	all := make([]string, 0, len(tokens))
	for uuid := range tokens {
		all = append(all, uuid)
	}
	return slices.MinFunc(all, func(a, b string) int {
		if tokens[a] < tokens[b] {
			return -1
		}
		return 1
	})
}
