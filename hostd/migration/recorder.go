package migration

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/migrate"
)

// errCommitted means that a migration is committed, or about to be.
var errCommitted = errors.New("it is committed")

// recorder writes the records of a migration that this host drives: those of its driver, and the
// abort of an operator, which the next driver must know, too.
type recorder struct {
	node Node
	turn chan struct{} // held while a record is written

	kept     *clusterv1.Migration // the last record that was written
	aborting bool
}

func newRecorder(node Node, r *clusterv1.Migration) *recorder {
	return &recorder{node: node, turn: make(chan struct{}, 1), kept: proto.CloneOf(r)}
}

// begin waits until no record is being written, and keeps it so until end is called.
func (w *recorder) begin(ctx context.Context) (end func(), err error) {
	select {
	case w.turn <- struct{}{}:
		return func() { <-w.turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Put writes the driver's record.
func (w *recorder) Put(ctx context.Context, r *clusterv1.Migration) (*clusterv1.Migration, error) {
	end, err := w.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	r.Revision = w.kept.GetRevision()
	if w.aborting {
		r.Machine.Aborting = true
	}
	return w.put(ctx, r)
}

func (w *recorder) put(ctx context.Context, r *clusterv1.Migration) (*clusterv1.Migration, error) {
	kept, err := w.node.PutMigration(ctx, r, false)
	if err == nil {
		w.kept = proto.CloneOf(kept)
	}
	return kept, err
}

// abort has the driver undo the migration after the step that runs. An error that wraps
// migrate.ErrUnreachable means that only this process may know of it yet.
func (w *recorder) abort(ctx context.Context) error {
	end, err := w.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	if !w.kept.GetMachine().GetUndoing() && w.kept.GetStep() == migrate.StepCommit || slices.Contains(w.kept.GetDone(), migrate.StepCommit) {
		return errCommitted
	}
	next := proto.CloneOf(w.kept)
	next.Machine.Aborting = true
	if _, err = w.put(ctx, next); err == nil || errors.Is(err, migrate.ErrUnreachable) {
		w.aborting = true
	}
	return err
}

// aborted reports whether abort was called. The driver asks between two records.
func (w *recorder) aborted(ctx context.Context) bool {
	end, err := w.begin(ctx)
	if err != nil {
		return false // the driver stops
	}
	defer end()
	return w.aborting
}
