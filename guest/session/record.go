package session

import (
	"cmp"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/compiled"
	"github.com/gpuctl/gpuctl/guest/statestream"
	"github.com/gpuctl/gpuctl/internal/beneath"
)

// recordVersion is increased when a gpuguest could misread an older record.
const recordVersion = 1

const (
	recordName = "session.json"
	graphName  = "graph.bin"
	mostRecord = 1 << 20 // bytes
	mostGraph  = 1 << 30
)

// record is the content of session.json: everything that a new gpuguest needs.
type record struct {
	Version     int              `json:"version"`
	ID          string           `json:"id"`
	UID         uint32           `json:"uid,omitempty"` // the application's user
	Claim       string           `json:"claim"`
	PID         int              `json:"pid"`
	Start       uint64           `json:"start"`
	Command     string           `json:"command"`
	StartedMS   int64            `json:"started_ms"`
	Device      json.RawMessage  `json:"device,omitempty"`
	Memory      [3]inode         `json:"memory"`
	Generation  uint32           `json:"generation"` // the last one given to an executor
	Current     executorRecord   `json:"current"`    // the executor that runs the session, or ran it before the suspend
	Connected   bool             `json:"connected"`  // the application has got its answer
	SuspendedTo string           `json:"suspended_to,omitempty"`
	Away        *awayRecord      `json:"away,omitempty"`       // the state that is to come back
	FileOwner   *fileOwner       `json:"file_owner,omitempty"` // owner of the file that it is suspended to; nil: its executors' user
	Op          *opRecord        `json:"op,omitempty"`
	Lost        string           `json:"lost,omitempty"` // why the session is lost: it never goes on, also from a state that is still there
	CacheSecret []byte           `json:"cache_secret,omitempty"`
	Program     compiled.Program `json:"program,omitzero"`
	Owner       string           `json:"owner,omitempty"` // whose share of its GPU the session uses
	Weight      uint32           `json:"weight,omitempty"`
}

// cacheKey returns the key with which executors for a runtime's devices sign the programs
// that they have built. No executor learns the key of those for other devices.
func (r *record) cacheKey(rt *gpuctlv1.Runtime) []byte {
	if len(r.CacheSecret) == 0 { // the record of an older gpuguest, which had none
		return nil
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(rt)
	if err != nil {
		return nil
	}
	h := hmac.New(sha256.New, r.CacheSecret)
	h.Write(b)
	return h.Sum(nil)
}

// newSecret returns random bytes.
func newSecret() []byte {
	b := make([]byte, sha256.Size)
	_, _ = rand.Read(b) // never fails
	return b
}

type executorRecord struct {
	Generation uint32          `json:"generation"`
	PID        int             `json:"pid"`
	Start      uint64          `json:"start"`
	Target     json.RawMessage `json:"target,omitempty"`
}

// fileOwner is the user and group whose rights are used to create, read and delete a
// session's file.
type fileOwner struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

// awayRecord is the mark of a state that is kept on the host.
type awayRecord struct {
	ID     string `json:"id"`
	Size   uint64 `json:"size"`
	Digest []byte `json:"digest"`
}

func newAwayRecord(m statestream.Mark) *awayRecord { return &awayRecord{m.ID, m.Size, m.Digest[:]} }

func (a *awayRecord) proto() *gpuctlv1.StateMark {
	if a == nil {
		return nil
	}
	return &gpuctlv1.StateMark{Id: a.ID, Size: a.Size, Digest: a.Digest}
}

// opRecord is the operation in progress.
type opRecord struct {
	Kind  string          `json:"kind"`
	Step  string          `json:"step"`
	Other *executorRecord `json:"other,omitempty"` // the target before the commit, the source after it
	Head  *uint64         `json:"head,omitempty"`  // head of the ring while frozen
	File  string          `json:"file,omitempty"`  // file that is being written
	// Written is that file, when it was made: another one may have its name.
	Written *inode `json:"written,omitempty"`
}

func (r *record) device() *gpuctlv1.VirtualDevice {
	d := &gpuctlv1.VirtualDevice{}
	_ = protojson.Unmarshal(r.Device, d) // written by marshal
	return d
}

func (e *executorRecord) target() *gpuctlv1.Target {
	t := &gpuctlv1.Target{}
	_ = protojson.Unmarshal(e.Target, t)
	return t
}

func marshal(m proto.Message) json.RawMessage {
	b, err := protojson.Marshal(m)
	if err != nil {
		return json.RawMessage("{}") // strings that are not UTF-8; Connect accepts none
	}
	return b
}

func readRecord(dir string) (*record, error) {
	b, err := beneath.ReadFile(dir, recordName, mostRecord)
	if err != nil {
		return nil, err
	}
	r := &record{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, recordName), err)
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("%s: version %d is not %d", dir, r.Version, recordVersion)
	}
	return r, nil
}

func (r *record) write(dir string) error {
	b, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return fmt.Errorf("encode session %s: %w", r.ID, err)
	}
	return replaceFile(dir, recordName, b)
}

// replaceFile writes a file so that readers find either the old or the new content. The
// file is not synced: after a crash of the kernel there are no applications to continue.
func replaceFile(dir, name string, b []byte) error { return beneath.Replace(dir, name, b, 0o600) }

func renameNew(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) { // the file system can't
		if err = unix.Lstat(to, &unix.Stat_t{}); errors.Is(err, fs.ErrNotExist) {
			return os.Rename(from, to)
		}
		err = cmp.Or(err, error(unix.EEXIST))
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}

// syncRename makes a finished file durable and then renames it, to a name that nothing has.
func syncRename(tmp, path string) error {
	f, err := os.Open(tmp) //nolint:forbidigo // only to sync what has been written
	if err != nil {
		return err
	}
	err = errors.Join(f.Sync(), f.Close())
	if err != nil {
		return fmt.Errorf("sync %s: %w", tmp, err)
	}
	if err := renameNew(tmp, path); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(path)) //nolint:forbidigo // the same
	if errors.Is(err, fs.ErrPermission) {
		return nil // the user may create files in the folder, but not read it; the file system writes the name later
	}
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
