package replica

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// fsm applies Raft's entries to the state.
type fsm struct {
	state   *state.Store
	log     *slog.Logger
	skipped atomic.Uint64

	mu       sync.Mutex
	applied  uint64        // index of the last command
	moved    chan struct{} // closed when applied changes
	stop     error         // why no further entry is applied
	stopped  chan struct{}
	restored error                                      // why the last snapshot could not be restored
	waiting  map[string]map[chan *clusterv1.Result]bool // channels that wait for a command's result, by command id
}

var (
	_ raft.BatchingFSM = (*fsm)(nil)
	_ raft.FSMSnapshot = (*image)(nil)
)

func newFSM(log *slog.Logger) *fsm {
	return &fsm{state: state.New(), log: log, moved: make(chan struct{}), stopped: make(chan struct{}), waiting: map[string]map[chan *clusterv1.Result]bool{}}
}

// Apply implements raft.FSM.
func (f *fsm) Apply(l *raft.Log) any {
	return f.ApplyBatch([]*raft.Log{l})[0]
}

// ApplyBatch implements raft.BatchingFSM. For each command it returns a *clusterv1.Result
// or an error.
func (f *fsm) ApplyBatch(logs []*raft.Log) []any {
	out := make([]any, len(logs))
	for i, l := range logs {
		if l.Type != raft.LogCommand {
			continue
		}
		r, err := f.apply(l)
		if err != nil {
			out[i] = err
			continue
		}
		out[i] = r
		f.advance(l.Index)
	}
	return out
}

func (f *fsm) apply(l *raft.Log) (*clusterv1.Result, error) {
	if err := f.err(); err != nil {
		return nil, err
	}
	c, err := state.Decode(l.Data)
	if err == nil {
		r := f.state.Apply(l.Index, c)
		f.answer(c.GetId(), r)
		return r, nil
	}
	var unknown *state.ErrUnknownCommand
	if errors.As(err, &unknown) && unknown.Policy == clusterv1.UnknownPolicy_UNKNOWN_POLICY_SKIP {
		f.skipped.Add(1)
		f.log.Warn("an entry was skipped: this build does not know it", "index", l.Index, "protocol", unknown.Version, "err", err)
		return &clusterv1.Result{Outcome: clusterv1.Outcome_OUTCOME_INVALID, Index: l.Index, Message: err.Error()}, nil
	}
	advice := "its log is damaged: remove the host from the cluster and join it anew"
	if unknown != nil {
		advice = fmt.Sprintf("upgrade hostd on this host to one of protocol %d or higher", unknown.Version)
	}
	err = fmt.Errorf("%w at entry %d: %w; %s", ErrStopped, l.Index, err, advice)
	f.log.Error("stopped", "index", l.Index, "err", err)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stop = err
	close(f.stopped)
	return nil, err
}

// expect returns a channel that receives the result of a command when it is applied on
// this host, and a function to call when nobody waits any more. Raft's own futures are
// not used, because Raft forgets some of them when it shuts down.
func (f *fsm) expect(id string) (<-chan *clusterv1.Result, func()) {
	ch := make(chan *clusterv1.Result, 1)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.waiting[id] == nil {
		f.waiting[id] = map[chan *clusterv1.Result]bool{}
	}
	f.waiting[id][ch] = true
	return ch, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if delete(f.waiting[id], ch); len(f.waiting[id]) == 0 {
			delete(f.waiting, id)
		}
	}
}

func (f *fsm) answer(id string, r *clusterv1.Result) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for ch := range f.waiting[id] {
		ch <- r
	}
	delete(f.waiting, id)
}

func (f *fsm) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stop
}

func (f *fsm) advance(index uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.applied = max(f.applied, index)
	close(f.moved)
	f.moved = make(chan struct{})
}

func (f *fsm) index() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.applied
}

// wait waits until a command is applied.
func (f *fsm) wait(ctx context.Context, index uint64) error {
	for {
		f.mu.Lock()
		at, moved, err := f.applied, f.moved, f.stop
		f.mu.Unlock()
		if at >= index {
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case <-moved:
		case <-f.stopped:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// A snapshot begins with this text and the index of the last command. The state does not
// know that index if the command was skipped.
const imageMagic = "gpuctlS1"

type image struct {
	view    *state.View
	applied uint64
}

// Snapshot implements raft.FSM. A node that has stopped takes no snapshot, because Raft
// counts entries as applied that were not.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stop != nil {
		return nil, f.stop
	}
	return &image{view: f.state.View(), applied: f.applied}, nil
}

// Persist implements raft.FSMSnapshot.
func (i *image) Persist(sink raft.SnapshotSink) error {
	err := i.write(sink)
	if err == nil {
		err = sink.Close()
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write snapshot %s: %w", sink.ID(), err), sink.Cancel())
	}
	return nil
}

func (i *image) write(w io.Writer) error {
	if _, err := w.Write(binary.BigEndian.AppendUint64([]byte(imageMagic), i.applied)); err != nil {
		return err
	}
	return i.view.Persist(w)
}

// Release implements raft.FSMSnapshot.
func (i *image) Release() {}

// Restore implements raft.FSM. If the snapshot cannot be read, nothing changes.
func (f *fsm) Restore(r io.ReadCloser) error {
	err := f.restore(r)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.restored = err
	return err
}

func (f *fsm) restore(r io.Reader) error {
	if err := f.err(); err != nil {
		return err
	}
	var head [len(imageMagic) + 8]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return fmt.Errorf("read snapshot: its head: %w", err)
	}
	if !bytes.HasPrefix(head[:], []byte(imageMagic)) {
		return fmt.Errorf("read snapshot: it begins with %q, not %q: it is damaged, or of another version", head[:len(imageMagic)], imageMagic)
	}
	if err := f.state.Restore(r); err != nil {
		return err
	}
	f.mu.Lock()
	f.applied = 0
	f.mu.Unlock()
	f.advance(binary.BigEndian.Uint64(head[len(imageMagic):]))
	return nil
}
