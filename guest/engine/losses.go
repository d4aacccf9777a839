package engine

import (
	"bytes"
	"encoding/json"
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
// When there are too many, the oldest of the owner with the most is forgotten: nobody must push out what
// others have lost. It is safe for concurrent use.
type Losses struct {
	dir, name string

	mu    sync.Mutex
	all   []loss
	lines int  // in the file
	torn  bool // its last line is not complete: the next one is written with all others
}

// loss is a lost session, and whose it was.
type loss struct {
	*gpuctlv1.LostSession
	owner string
}

// lossLine is a line of the file. An earlier gpuguest has written the session alone.
type lossLine struct {
	Owner string          `json:"owner"`
	Lost  json.RawMessage `json:"lost"`
}

func (o loss) line() ([]byte, error) {
	b, err := protojson.Marshal(o.LostSession)
	if err != nil {
		return nil, err
	}
	if b, err = json.Marshal(lossLine{o.owner, b}); err != nil {
		return nil, err
	}
	return append(b, '\n'), nil
}

func parseLoss(line []byte) (loss, bool) {
	var x lossLine
	if json.Unmarshal(line, &x) != nil || x.Lost == nil {
		x.Lost = line
	}
	o := loss{&gpuctlv1.LostSession{}, x.Owner}
	return o, protojson.Unmarshal(x.Lost, o.LostSession) == nil && o.GetId() != ""
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
		if one, ok := parseLoss(line); ok { // otherwise gpuguest has ended while it wrote it
			l.all = append(l.all, one)
		}
	}
	l.torn = len(b) > 0 && b[len(b)-1] != '\n'
	l.trim()
	return l, nil
}

// trim forgets what is too much.
func (l *Losses) trim() {
	have := map[string]int{}
	for _, o := range l.all {
		have[o.owner]++
	}
	for len(l.all) > mostLosses {
		most := l.all[0].owner // of owners with as many, the one whose is the oldest
		for _, o := range l.all {
			if have[o.owner] > have[most] {
				most = o.owner
			}
		}
		i := slices.IndexFunc(l.all, func(o loss) bool { return o.owner == most })
		l.all = slices.Delete(l.all, i, i+1)
		have[most]--
	}
}

func (l *Losses) rewrite() error {
	var b []byte
	for _, one := range l.all {
		line, err := one.line()
		if err != nil {
			return err
		}
		b = append(b, line...)
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
	one := loss{owner: excerpt.Line(s.GetOwner(), lostCommand), LostSession: &gpuctlv1.LostSession{
		Id: s.GetId(), Claim: excerpt.Line(s.GetClaim(), lostCommand), Command: excerpt.Line(s.GetCommand(), lostCommand), Reason: excerpt.Line(why, lostReason), LostUnixMs: time.Now().UnixMilli(),
	}}
	l.all = append(l.all, one)
	l.trim()
	if l.torn || l.lines >= 2*mostLosses {
		return l.rewrite()
	}
	line, err := one.line()
	if err != nil {
		return err
	}
	f, err := beneath.OpenFile(l.dir, l.name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("lost sessions: %w", err)
	}
	_, err = f.Write(line)
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
	return slices.IndexFunc(l.all, func(o loss) bool { return o.GetId() == id })
}

// All returns them, oldest first.
func (l *Losses) All() []*gpuctlv1.LostSession {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]*gpuctlv1.LostSession, 0, len(l.all))
	for _, one := range l.all {
		out = append(out, proto.CloneOf(one.LostSession))
	}
	return out
}
