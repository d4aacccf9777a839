package executor

import (
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// Commands that need one call of the vendor's library. Each finds the objects that the
// request names, and records what the device will write.

func (s *session) readBufferRect(x *cmd, m *wire.ReadBufferRect) (cl.Status, error) {
	p, st, err := s.staged(x, m.Mode, m.StageOff, m.StageLen, m.Mem, m.Region)
	if err != nil || st != cl.Success {
		return st, err
	}
	o, r, ok := pos(m.Origin, m.Region)
	if !ok {
		return cl.InvalidValue, nil
	}
	s.shows(x, remote.Range(m.StageOff, r[0]*r[1]*r[2]))
	x.track()
	return cl.EnqueueReadBufferRect(x.q.vendor, x.mem.vendor, false, &o, &[3]uint64{}, &r, m.RowPitch, m.SlicePitch, r[0], r[0]*r[1], p, x.wait, x.out), nil
}

func (s *session) writeBufferRect(x *cmd, m *wire.WriteBufferRect) (cl.Status, error) {
	p, st, err := s.staged(x, m.Mode, m.StageOff, m.StageLen, m.Mem, m.Region)
	if err != nil || st != cl.Success {
		return st, err
	}
	o, r, ok := pos(m.Origin, m.Region)
	if !ok {
		return cl.InvalidValue, nil
	}
	x.track()
	x.mem.touch(0, x.mem.size)
	return cl.EnqueueWriteBufferRect(x.q.vendor, x.mem.vendor, false, &o, &[3]uint64{}, &r, m.RowPitch, m.SlicePitch, r[0], r[0]*r[1], p, x.wait, x.out), nil
}

func (s *session) copyBuffer(x *cmd, m *wire.CopyBuffer) (cl.Status, error) {
	src, dst := lookup[mem](s, m.Src), lookup[mem](s, m.Dst)
	if src == nil || dst == nil {
		return cl.InvalidMemObject, nil
	}
	dst.touch(m.DstOff, m.Size)
	return cl.EnqueueCopyBuffer(x.q.vendor, src.vendor, dst.vendor, m.SrcOff, m.DstOff, m.Size, x.wait, x.out), nil
}

func (s *session) copyBufferRect(x *cmd, m *wire.CopyBufferRect) (cl.Status, error) {
	src, dst := lookup[mem](s, m.Src), lookup[mem](s, m.Dst)
	if src == nil || dst == nil {
		return cl.InvalidMemObject, nil
	}
	so, r, ok := pos(m.SrcOrigin, m.Region)
	do, _, ok2 := pos(m.DstOrigin, m.Region)
	if !ok || !ok2 {
		return cl.InvalidValue, nil
	}
	dst.touch(0, dst.size)
	return cl.EnqueueCopyBufferRect(x.q.vendor, src.vendor, dst.vendor, &so, &do, &r, m.SrcRowPitch, m.SrcSlicePitch, m.DstRowPitch, m.DstSlicePitch, x.wait, x.out), nil
}

func (s *session) fillBuffer(x *cmd, m *wire.FillBuffer) (cl.Status, error) {
	d := lookup[mem](s, m.Mem)
	if d == nil {
		return cl.InvalidMemObject, nil
	}
	if len(m.Pattern) == 0 {
		return cl.InvalidValue, nil
	}
	d.touch(m.Offset, m.Size)
	return cl.EnqueueFillBuffer(x.q.vendor, d.vendor, unsafe.Pointer(unsafe.SliceData(m.Pattern)), uint64(len(m.Pattern)), m.Offset, m.Size, x.wait, x.out), nil
}

func (s *session) readImage(x *cmd, m *wire.ReadImage) (cl.Status, error) {
	p, st, err := s.staged(x, m.Mode, m.StageOff, m.StageLen, m.Image, m.Region)
	if err != nil || st != cl.Success {
		return st, err
	}
	o, r, ok := pos(m.Origin, m.Region)
	if !ok {
		return cl.InvalidValue, nil
	}
	s.shows(x, remote.Range(m.StageOff, x.mem.elem*r[0]*r[1]*r[2]))
	x.track()
	return cl.EnqueueReadImage(x.q.vendor, x.mem.vendor, false, &o, &r, 0, 0, p, x.wait, x.out), nil
}

func (s *session) writeImage(x *cmd, m *wire.WriteImage) (cl.Status, error) {
	p, st, err := s.staged(x, m.Mode, m.StageOff, m.StageLen, m.Image, m.Region)
	if err != nil || st != cl.Success {
		return st, err
	}
	o, r, ok := pos(m.Origin, m.Region)
	if !ok {
		return cl.InvalidValue, nil
	}
	x.track()
	x.mem.touch(0, x.mem.size)
	return cl.EnqueueWriteImage(x.q.vendor, x.mem.vendor, false, &o, &r, 0, 0, p, x.wait, x.out), nil
}

func (s *session) copyImage(x *cmd, m *wire.CopyImage) (cl.Status, error) {
	src, dst := lookup[mem](s, m.Src), lookup[mem](s, m.Dst)
	if src == nil || dst == nil {
		return cl.InvalidMemObject, nil
	}
	so, r, ok := pos(m.SrcOrigin, m.Region)
	do, _, ok2 := pos(m.DstOrigin, m.Region)
	if !ok || !ok2 {
		return cl.InvalidValue, nil
	}
	dst.touch(0, dst.size)
	return cl.EnqueueCopyImage(x.q.vendor, src.vendor, dst.vendor, &so, &do, &r, x.wait, x.out), nil
}

func (s *session) fillImage(x *cmd, m *wire.FillImage) (cl.Status, error) {
	d := lookup[mem](s, m.Image)
	o, r, ok := pos(m.Origin, m.Region)
	if d == nil {
		return cl.InvalidMemObject, nil
	}
	if !ok || len(m.Color) != 16 {
		return cl.InvalidValue, nil
	}
	d.touch(0, d.size)
	color := [16]byte(m.Color)
	return cl.EnqueueFillImage(x.q.vendor, d.vendor, &color, &o, &r, x.wait, x.out), nil
}

func (s *session) copyImageToBuffer(x *cmd, m *wire.CopyImageToBuffer) (cl.Status, error) {
	src, dst := lookup[mem](s, m.Src), lookup[mem](s, m.Dst)
	o, r, ok := pos(m.Origin, m.Region)
	if src == nil || dst == nil {
		return cl.InvalidMemObject, nil
	}
	if !ok {
		return cl.InvalidValue, nil
	}
	dst.touch(m.DstOff, min(r[0]*r[1]*r[2]*src.elem, dst.size))
	return cl.EnqueueCopyImageToBuffer(x.q.vendor, src.vendor, dst.vendor, &o, &r, m.DstOff, x.wait, x.out), nil
}

func (s *session) copyBufferToImage(x *cmd, m *wire.CopyBufferToImage) (cl.Status, error) {
	src, dst := lookup[mem](s, m.Src), lookup[mem](s, m.Dst)
	o, r, ok := pos(m.Origin, m.Region)
	if src == nil || dst == nil {
		return cl.InvalidMemObject, nil
	}
	if !ok {
		return cl.InvalidValue, nil
	}
	dst.touch(0, dst.size)
	return cl.EnqueueCopyBufferToImage(x.q.vendor, src.vendor, dst.vendor, m.SrcOff, &o, &r, x.wait, x.out), nil
}

func (s *session) migrate(x *cmd, m *wire.Migrate) (cl.Status, error) {
	var ms []cl.Mem
	for _, id := range m.Mems {
		o := lookup[mem](s, id)
		if o == nil {
			return cl.InvalidMemObject, nil
		}
		ms = append(ms, o.vendor)
	}
	return cl.EnqueueMigrateMemObjects(x.q.vendor, ms, m.Flags, x.wait, x.out), nil
}
