package session

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// With Config.Verify, a session goes to another executor only if that has what the former one had: both read
// all contents back from their devices, while the application stands still. Otherwise the operation is undone.

const digestTimeout = 10 * time.Minute

func (e *executor) digest(ctx context.Context) (*gpuctlv1.DigestResponse, error) {
	ctx, cancel := e.bound(ctx, digestTimeout)
	defer cancel()
	resp, err := e.graphs.Digest(ctx, connect.NewRequest(&gpuctlv1.DigestRequest{}))
	if err != nil {
		return nil, e.wrap("digest", err)
	}
	return resp.Msg, nil
}

// remember keeps what the frozen source has, if that is to be verified.
func (op *operation) remember(ctx context.Context) (err error) {
	op.s.digest = nil
	if op.s.m.cfg.Verify {
		op.s.digest, err = op.source.digest(ctx)
	}
	return err
}

// verify compares what the target has with what is remembered. After a restart of gpuguest nothing is.
func (op *operation) verify(ctx context.Context) error {
	if !op.s.m.cfg.Verify || op.s.digest == nil {
		return nil
	}
	got, err := op.target.digest(ctx)
	if err != nil {
		return err
	}
	return differ(op.s.digest, got)
}

// differ returns an error that names the first object that two digests say different things of.
func differ(want, got *gpuctlv1.DigestResponse) error {
	has := map[uint32]*gpuctlv1.ObjectDigest{}
	for _, o := range got.GetObjects() {
		has[o.GetId()] = o
	}
	if len(has) != len(want.GetObjects()) {
		return fmt.Errorf("the target has %d memory objects, and the source %d", len(has), len(want.GetObjects()))
	}
	for _, o := range want.GetObjects() {
		t := has[o.GetId()]
		if t.GetBytes() != o.GetBytes() || len(t.GetSums()) != len(o.GetSums()) {
			return fmt.Errorf("memory object %d has %d bytes on the target, and %d on the source", o.GetId(), t.GetBytes(), o.GetBytes())
		}
		var wrong []int
		for i := range o.GetSums() {
			if t.GetSums()[i] != o.GetSums()[i] {
				wrong = append(wrong, i)
			}
		}
		if len(wrong) > 0 {
			return fmt.Errorf("memory object %d of %d bytes differs on the target, in these of its %d parts of 16 MiB: %v", o.GetId(), o.GetBytes(), len(o.GetSums()), wrong)
		}
	}
	return nil
}
