package bind

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

const (
	journalName    = "bindings.json"
	journalVersion = 1
	maxJournal     = 4 << 20 // bytes
	maxRecords     = 1 << 14
	maxName        = 64   // of a driver
	maxOverride    = 4094 // the kernel's limit
)

// Errors of journals.
var (
	ErrJournal     = errors.New("bad journal")
	ErrJournalBusy = errors.New("another process has the journal")
)

// Phase is the state of a function.
type Phase string

// Phases of a record.
const (
	Taking    Phase = "taking"    // being bound to a driver; to be undone
	Held      Phase = "held"      // bound to it
	Returning Phase = "returning" // being returned; to be finished
)

// Record is a function's entry in the journal. It exists from before the first change
// until the function was returned.
type Record struct {
	Function pci.Address `json:"function"`
	Vendor   uint16      `json:"vendor"`
	Device   uint16      `json:"device"`
	Native   string      `json:"native,omitempty"`   // former driver; empty: none
	Override string      `json:"override,omitempty"` // former override
	Slot     bool        `json:"slot,omitempty"`     // it was in pciback's list of slots
	Phase    Phase       `json:"phase"`
	Driver   string      `json:"driver"`           // driver for which it is taken
	Before   string      `json:"before,omitempty"` // when taking: the driver for which it was taken before
	Boot     string      `json:"boot"`             // boot id of the kernel that was changed
}

// Journal has the records of a host, in one file that is replaced as a whole. Only one
// process can have it open.
type Journal struct {
	dir  string
	lock *os.File
	step func(what string) error // for tests, which must not sync
	sync func(*os.File) error

	mu      sync.Mutex
	records map[pci.Address]Record
}

// OpenJournal opens the journal in a folder, which it makes if it does not exist. It
// returns ErrJournalBusy while another process has it open. A process that was killed has
// it open until the kernel returns from its last write. It returns ErrJournal if the file
// was not written by this version; then nothing is deleted.
func OpenJournal(dir string) (*Journal, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the journal's folder: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the journal: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = ErrJournalBusy
		}
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	j := &Journal{dir: dir, lock: lock, step: func(string) error { return nil }, sync: (*os.File).Sync}
	if j.records, err = readJournal(filepath.Join(dir, journalName)); err != nil {
		lock.Close()
		return nil, err
	}
	return j, nil
}

// Close unlocks the journal.
func (j *Journal) Close() error { return j.lock.Close() }

// Records returns all records, sorted by function.
func (j *Journal) Records() []Record {
	j.mu.Lock()
	defer j.mu.Unlock()
	return sorted(j.records)
}

// Record returns the record of a function.
func (j *Journal) Record(a pci.Address) (Record, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	r, ok := j.records[a]
	return r, ok
}

func sorted(records map[pci.Address]Record) []Record {
	return slices.SortedFunc(maps.Values(records), func(a, b Record) int { return a.Function.Compare(b.Function) })
}

// update replaces and removes records, all at once. If it returns nil, the change is on
// disk. Otherwise nothing has changed, or reading the journal will show the change.
func (j *Journal) update(put []Record, remove ...pci.Address) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	next := maps.Clone(j.records)
	for _, r := range put {
		next[r.Function] = r
	}
	for _, a := range remove {
		delete(next, a)
	}
	if err := j.write(sorted(next)); err != nil {
		return fmt.Errorf("write the journal in %s: %w", j.dir, err)
	}
	j.records = next
	return nil
}

type journalFile struct {
	Version int      `json:"version"`
	Records []Record `json:"records"`
}

func (j *Journal) write(records []Record) error {
	if err := j.step("journal"); err != nil {
		return err
	}
	if records == nil {
		records = []Record{} // an empty list, not null
	}
	data, err := json.MarshalIndent(journalFile{journalVersion, records}, "", " ")
	if err != nil {
		return err
	}
	temp := filepath.Join(j.dir, journalName+".new")
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	if err := cmp.Or(err, j.sync(f), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(temp, filepath.Join(j.dir, journalName)); err != nil {
		return err
	}
	dir, err := os.Open(j.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	return j.sync(dir)
}

func readJournal(path string) (map[pci.Address]Record, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[pci.Address]Record{}, nil
	} else if err != nil {
		return nil, fmt.Errorf("open the journal: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxJournal+1))
	if err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	records, err := parseJournal(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; it says which driver each taken device had: repair it, or return the devices by hand and remove it", path, err)
	}
	return records, nil
}

// parseJournal checks everything that is used in a path or written to the kernel.
func parseJournal(data []byte) (map[pci.Address]Record, error) {
	if len(data) > maxJournal {
		return nil, fmt.Errorf("%w: more than %d bytes", ErrJournal, maxJournal)
	}
	var f journalFile
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrJournal, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: something follows the records", ErrJournal)
	}
	if f.Version != journalVersion {
		return nil, fmt.Errorf("%w: version %d, and this is version %d", ErrJournal, f.Version, journalVersion)
	}
	if len(f.Records) > maxRecords {
		return nil, fmt.Errorf("%w: %d records", ErrJournal, len(f.Records))
	}
	records := make(map[pci.Address]Record, len(f.Records))
	for _, r := range f.Records {
		if err := r.check(); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrJournal, r.Function, err)
		}
		if _, twice := records[r.Function]; twice {
			return nil, fmt.Errorf("%w: %s is there twice", ErrJournal, r.Function)
		}
		records[r.Function] = r
	}
	return records, nil
}

func (r Record) check() error {
	switch {
	case r.Function.Device > 0x1f || r.Function.Function > 7:
		return pci.ErrAddress
	case r.Phase != Taking && r.Phase != Held && r.Phase != Returning:
		return fmt.Errorf("phase %.40q", r.Phase)
	case !validName(r.Driver):
		return fmt.Errorf("driver %.40q", r.Driver)
	case r.Native != "" && !validName(r.Native):
		return fmt.Errorf("native driver %.40q", r.Native)
	case r.Before != "" && (!validName(r.Before) || r.Phase != Taking):
		return fmt.Errorf("driver before %.40q", r.Before)
	case len(r.Override) > maxOverride || strings.ContainsAny(r.Override, "\n\x00"):
		return fmt.Errorf("override %.40q", r.Override)
	case len(r.Boot) > maxName:
		return fmt.Errorf("boot %.40q", r.Boot)
	}
	return nil
}

// validName reports whether a name can be that of a folder in sys/bus/pci/drivers.
func validName(s string) bool {
	if s == "" || len(s) > maxName || s == "." || s == ".." {
		return false
	}
	for _, c := range []byte(s) {
		if c <= ' ' && c != ' ' || c >= 0x7f || c == '/' {
			return false
		}
	}
	return true
}
