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
		for _, p := range m.cut(dirtyChunk, slices.Repeat([]bool{true}, len(m.dirty))) {
			p.ID = id
			ps = append(ps, p)
		}
	})
	s.mu.Unlock()
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

// sum reads a piece into the window.
func (s *session) sum(p *piece) (uint32, error) {
	if p.bytes() > s.windowSize {
		return 0, fmt.Errorf("object %d: a row of %d bytes: %w", p.ID, p.bytes(), errors.ErrUnsupported)
	}
	p.ptr = s.arena.Pointer(s.window)
	evs, err := s.fetchPieces([]piece{*p})
	if st := await(evs); err == nil && st != cl.Success {
		err = fmt.Errorf("read object %d: %w", p.ID, st)
	}
	if err != nil {
		return 0, err
	}
	return crc32.Checksum(s.arenaBytes(s.window, p.bytes()), crc32.MakeTable(crc32.Castagnoli)), nil
}
