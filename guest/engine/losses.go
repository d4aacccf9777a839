package engine

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/excerpt"
)

const (
	mostLosses     = 2000
	mostLossesFile = 8 << 20 // bytes; more than twice the entries can have
	lostCommand    = 60
	lostReason     = 200
)

// Losses remembers which sessions an engine has lost, also when their applications have ended
// and over restarts of gpuguest. An application that is told of the loss mostly ends at once,
// and its session with it; a migration that asks later must not take that for a normal end.
// The oldest are forgotten first. It is safe for concurrent use.
type Losses struct {
	dir, name string

	mu    sync.Mutex
	all   []*gpuctlv1.LostSession
	lines int  // in the file
	torn  bool // its last line is not complete: the next one is written with all others
}

// OpenLosses reads the losses that a file of a run folder has, if there is one.
func OpenLosses(dir, name string) (*Losses, error) {
	l := &Losses{dir: dir, name: name}
	b, err := beneath.ReadFile(dir, name, mostLossesFile)
	if errors.Is(err, fs.ErrNotExist) {
		return l, nil
	}
	if err != nil {
		return nil, fmt.Errorf("lost sessions: %w", err)
	}
	for line := range bytes.Lines(b) {
		l.lines++
		one := &gpuctlv1.LostSession{}
		if protojson.Unmarshal(line, one) == nil && one.GetId() != "" { // otherwise gpuguest has ended while it wrote it
			l.all = append(l.all, one)
		}
	}
	l.torn = len(b) > 0 && b[len(b)-1] != '\n'
	l.trim()
	return l, nil
}

// trim forgets the oldest.
func (l *Losses) trim() {
	if n := len(l.all) - mostLosses; n > 0 {
		l.all = slices.Delete(l.all, 0, n)
	}
}

func (l *Losses) rewrite() error {
	var b []byte
	for _, one := range l.all {
		line, err := protojson.Marshal(one)
		if err != nil {
			return err
		}
		b = append(append(b, line...), '\n')
	}
	if err := beneath.Replace(l.dir, l.name, b, 0o600); err != nil {
		return fmt.Errorf("lost sessions: %w", err)
	}
	l.lines, l.torn = len(l.all), false
	return nil
}

// Add remembers that a session is lost, and why. The first reason stays. With an error, it is
// remembered until gpuguest ends.
func (l *Losses) Add(s *gpuctlv1.Session, why string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.index(s.GetId()) >= 0 {
		return nil
	}
	one := &gpuctlv1.LostSession{
		Id: s.GetId(), Claim: excerpt.Line(s.GetClaim(), lostCommand), Command: excerpt.Line(s.GetCommand(), lostCommand), Reason: excerpt.Line(why, lostReason), LostUnixMs: time.Now().UnixMilli(),
	}
	l.all = append(l.all, one)
	l.trim()
	if l.torn || l.lines >= 2*mostLosses {
		return l.rewrite()
	}
	line, err := protojson.Marshal(one)
	if err != nil {
		return err
	}
	f, err := beneath.OpenFile(l.dir, l.name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("lost sessions: %w", err)
	}
	_, err = f.Write(append(line, '\n'))
	if err = errors.Join(err, f.Close()); err != nil {
		l.torn = true // by a full disk
		return fmt.Errorf("lost sessions: %w", err)
	}
	l.lines++
	return nil
}

// Has reports whether a session was lost. No other session must get its id.
func (l *Losses) Has(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.index(id) >= 0
}

func (l *Losses) index(id string) int {
	return slices.IndexFunc(l.all, func(o *gpuctlv1.LostSession) bool { return o.GetId() == id })
}

// All returns them, oldest first.
func (l *Losses) All() []*gpuctlv1.LostSession {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]*gpuctlv1.LostSession, 0, len(l.all))
	for _, one := range l.all {
		out = append(out, proto.CloneOf(one))
	}
	return out
}
