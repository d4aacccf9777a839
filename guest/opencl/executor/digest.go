package executor

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
)

// Digest reads every object back from the device, so that whoever swaps a session can see whether the
// target has what the source has. A frozen session and a prepared executor change nothing meanwhile.
func (c *controller) Digest(ctx context.Context, _ *connect.Request[gpuctlv1.DigestRequest]) (*connect.Response[gpuctlv1.DigestResponse], error) {
	c.op.Lock()
	defer c.op.Unlock()
	s := c.s
	defer s.does("contents are being read")()
	if !s.isFrozen() && (s.active.Load() || !s.prepared) {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("digest of contents that change: %w", ErrState))
	}
	out, err := s.digest(ctx)
	if err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(out), nil
}

func (s *session) digest(ctx context.Context) (out *gpuctlv1.DigestResponse, err error) {
	if s.windowSize == 0 { // a source's stays open for its target
		defer func() {
			s.mu.Lock()
			s.closeWindow()
			s.mu.Unlock()
		}()
	}
	if err := s.openWindow(windowChunk); err != nil {
		return nil, err
	}
	var ps []piece
	s.mu.Lock()
	s.each(func(id uint32, _ uint64, o any) {
		m, ok := o.(*mem)
		if !ok || m.parent != nil || m.vendor == 0 || m.isMapped() {
			return
		}
		written := slices.Clone(m.dirty)
		m.markAll()
		for _, p := range m.cut(dirtyChunk) {
			p.ID = id
			ps = append(ps, p)
		}
		copy(m.dirty, written)
	})
	s.mu.Unlock()
	slices.SortStableFunc(ps, func(a, b piece) int { return int(int64(a.ID) - int64(b.ID)) })
	out = &gpuctlv1.DigestResponse{}
	for i := range ps {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		sum, err := s.sum(&ps[i])
		if err != nil {
			return nil, err
		}
		n := len(out.Objects)
		if n == 0 || out.Objects[n-1].Id != ps[i].ID {
			out.Objects = append(out.Objects, &gpuctlv1.ObjectDigest{Id: ps[i].ID})
			n++
		}
		o := out.Objects[n-1]
		o.Sums = append(o.Sums, sum)
		o.Bytes += ps[i].bytes()
	}
	return out, nil
}

func (s *session) sum(p *piece) (uint32, error) {
	table := crc32.MakeTable(crc32.Castagnoli)
	if p.m.unified {
		return crc32.Checksum(s.arenaBytes(p.m.arena+p.Off, p.N), table), nil
	}
	if p.bytes() > s.windowSize {
		return 0, fmt.Errorf("object %d: a row of %d bytes: %w", p.ID, p.bytes(), errors.ErrUnsupported)
	}
	s.mu.Lock()
	q, st := s.xfer.queue(p.m.ctx)
	s.mu.Unlock()
	if st != cl.Success {
		return 0, fmt.Errorf("read object %d: %w", p.ID, st)
	}
	var ev cl.Event
	if st := p.read(q, s.arena.Pointer(s.window), &ev); st != cl.Success {
		return 0, fmt.Errorf("read object %d: %w", p.ID, st)
	}
	if st := await([]cl.Event{ev}); st != cl.Success {
		return 0, fmt.Errorf("read object %d: %w", p.ID, st)
	}
	return crc32.Checksum(s.arenaBytes(s.window, p.bytes()), table), nil
}
