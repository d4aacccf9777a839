package session

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/compiled"
	"github.com/gpuctl/gpuctl/guest/statestream"
	"github.com/gpuctl/gpuctl/internal/beneath"
)

// recordVersion is bumped when a gpuguest could misread an older record.
const recordVersion = 1

const (
	recordName = "session.json"
	graphName  = "graph.bin"
	mostRecord = 1 << 20 // bytes
	mostGraph  = 1 << 30
)

// record is a session as session.json has it: all that a new gpuguest needs.
type record struct {
	Version     int              `json:"version"`
	ID          string           `json:"id"`
	Claim       string           `json:"claim"`
	PID         int              `json:"pid"`
	Start       uint64           `json:"start"`
	Command     string           `json:"command"`
	StartedMS   int64            `json:"started_ms"`
	Device      json.RawMessage  `json:"device,omitempty"`
	Memory      [3]inode         `json:"memory"`
	Generation  uint32           `json:"generation"` // last one given out
	Current     executorRecord   `json:"current"`    // runs the session, or ran it before the suspend
	Connected   bool             `json:"connected"`  // the application has its answer
	SuspendedTo string           `json:"suspended_to,omitempty"`
	Away        *awayRecord      `json:"away,omitempty"`       // what is to come back
	FileOwner   *fileOwner       `json:"file_owner,omitempty"` // of the file it is suspended to; nil: its executors' user
	Op          *opRecord        `json:"op,omitempty"`
	CacheSecret []byte           `json:"cache_secret,omitempty"`
	Program     compiled.Program `json:"program,omitzero"`
}

// cacheKey is what executors for a runtime's devices sign built programs with.
// None learns what those for other devices sign with.
func (r *record) cacheKey(rt *gpuctlv1.Runtime) []byte {
	if len(r.CacheSecret) == 0 { // of a gpuguest that kept none
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

// newSecret is random.
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

// fileOwner is who makes, reads and removes a session's file.
type fileOwner struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

// awayRecord is the mark of a state that is out of the VM.
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

// opRecord is the operation in flight.
type opRecord struct {
	Kind  string          `json:"kind"`
	Step  string          `json:"step"`
	Other *executorRecord `json:"other,omitempty"` // the target before the commit, the source after it
	Head  *uint64         `json:"head,omitempty"`  // of the ring while frozen
	File  string          `json:"file,omitempty"`  // being written
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
		return json.RawMessage("{}") // strings that are not UTF-8; Connect lets none in
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

// replaceFile writes a file so that readers find the old or the new content.
// It is not synced: applications do not outlive the kernel either.
func replaceFile(dir, name string, b []byte) error { return beneath.Replace(dir, name, b, 0o600) }

// syncRename makes a finished file durable and gives it its name.
func syncRename(tmp, path string) error {
	f, err := os.Open(tmp) //nolint:forbidigo // only to sync what has been written
	if err != nil {
		return err
	}
	err = errors.Join(f.Sync(), f.Close())
	if err != nil {
		return fmt.Errorf("sync %s: %w", tmp, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(path)) //nolint:forbidigo // the same
	if errors.Is(err, fs.ErrPermission) {
		return nil // a folder that only takes files in; its file system keeps the name in time
	}
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
