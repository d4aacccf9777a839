package executor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// describe records the kernel's arguments, when they are known to be those of the kernel
// that runs.
func (k *kernel) describe(as []argument) {
	k.text = as
	k.info = make([]argInfo, len(as))
	k.args = make([]arg, len(as))
	for i := range as {
		k.info[i] = as[i].info()
	}
}

func (k *kernel) reply() []byte {
	b := pair(nil, uint32(len(k.info)), 0)
	for _, in := range k.info {
		b = pair(b, in.kind, in.flags)
	}
	return b
}

func (s *session) createKernel(c call, m *wire.CreateKernel) (outcome, error) {
	p := lookup[program](s, m.Program)
	if p == nil {
		return done(cl.InvalidProgram), nil
	}
	if p.vendor == 0 || p.building || !p.executable() {
		return done(cl.InvalidProgramExecutable), nil
	}
	k := &kernel{id: m.ID, prog: p, name: cstring(m.Name)}
	var st cl.Status
	if k.vendor, st = cl.CreateKernel(p.vendor, k.name); st != cl.Success {
		return done(st), nil
	}
	p.kernels++ // no build may begin
	if _, err := argumentsOf(k.vendor); errors.Is(err, errArgInfo) && !p.desc.ready() {
		d := p.desc
		return later(func(func()) {
			as, err := d.arguments(k.vendor, k.name)
			s.mu.Lock()
			defer s.mu.Unlock()
			o, err := s.addKernel(k, as, err)
			if err != nil {
				s.condemn(err)
				return
			}
			s.reply(c.slot, o.status, o.data)
		}), nil
	}
	as, err := p.desc.arguments(k.vendor, k.name)
	return s.addKernel(k, as, err)
}

// addKernel completes createKernel with the kernel's arguments, or with the reason why they
// are not known.
func (s *session) addKernel(k *kernel, as []argument, err error) (outcome, error) {
	p := k.prog
	if err != nil {
		s.log.Error("kernel refused", "program", p.id, "kernel", k.name, "err", err)
		p.kernels--
		cl.ReleaseKernel(k.vendor)
		return done(cl.InvalidKernelDefinition), nil
	}
	k.describe(as)
	if p.told == toldUnknown && len(as) > 0 {
		p.told = toldNo
		if _, err := argumentsOf(k.vendor); err == nil && (!s.quirk.sameCode || asksToTell(&p.content)) {
			p.told = toldYes
		}
	}
	return answer(k.reply()), s.put(k.id, k)
}

// cloneKernel copies a kernel with its arguments. It creates a new kernel of the vendor,
// which every version of OpenCL can do.
func (s *session) cloneKernel(m *wire.CloneKernel) (outcome, error) {
	src := lookup[kernel](s, m.Kernel)
	if src == nil {
		return done(cl.InvalidKernel), nil
	}
	k, st := s.copyKernel(src)
	if st != cl.Success {
		return done(st), nil
	}
	k.id = m.ID
	return answer(k.reply()), s.put(m.ID, k)
}

// named returns the object that an argument of a kind refers to by its id; nil if there is
// none.
func (s *session) named(kind, id uint32) any {
	switch kind {
	case wire.ArgMem, wire.ArgImage:
		if m := lookup[mem](s, id); m != nil {
			return m
		}
	case wire.ArgSampler:
		if x := lookup[sampler](s, id); x != nil {
			return x
		}
	}
	return nil
}

// argGone reports whether the argument's object was released after it was set. The id may
// belong to another object now.
func (s *session) argGone(a *arg) bool {
	switch a.kind {
	case wire.ArgMem, wire.ArgImage:
		if a.object == 0 {
			return false
		}
	case wire.ArgSampler:
	default:
		return false
	}
	return a.to == nil || s.named(a.kind, a.object) != a.to
}

// bindArg sets the recorded argument in the vendor's kernel.
func (s *session) bindArg(k *kernel, i int) cl.Status {
	a := &k.args[i]
	switch a.kind {
	case wire.ArgMem, wire.ArgImage:
		if a.object == 0 {
			return cl.SetKernelArg(k.vendor, uint32(i), uint64(unsafe.Sizeof(uintptr(0))), nil)
		}
		m, ok := a.to.(*mem)
		if !ok {
			return cl.InvalidMemObject
		}
		v := m.vendor
		return cl.SetKernelArg(k.vendor, uint32(i), uint64(unsafe.Sizeof(v)), unsafe.Pointer(&v))
	case wire.ArgSampler:
		x, ok := a.to.(*sampler)
		if !ok {
			return cl.InvalidSampler
		}
		v := x.vendor
		return cl.SetKernelArg(k.vendor, uint32(i), uint64(unsafe.Sizeof(v)), unsafe.Pointer(&v))
	case wire.ArgLocal:
		return cl.SetKernelArg(k.vendor, uint32(i), a.size, nil)
	case wire.ArgPlain:
		if uint64(len(a.value)) < a.size {
			return cl.InvalidArgSize
		}
		return cl.SetKernelArg(k.vendor, uint32(i), a.size, unsafe.Pointer(unsafe.SliceData(a.value)))
	}
	return cl.InvalidArgValue
}

func (s *session) setArg(c call, m *wire.SetArg) (outcome, error) {
	k := lookup[kernel](s, m.Kernel)
	if k == nil {
		return done(cl.InvalidKernel), nil
	}
	if int64(m.Index) >= int64(len(k.args)) {
		return done(cl.InvalidArgIndex), nil
	}
	// The compiler decides of which kind an argument is, and not the client.
	in := k.info[m.Index]
	if m.Kind != in.kind {
		return outcome{}, fmt.Errorf("kernel %s, argument %d: kind %d, not %d: %w", k.name, m.Index, m.Kind, in.kind, errHostile)
	}
	a, old := &k.args[m.Index], k.args[m.Index]
	// The bytes are copied only when the runtime has taken them: a refused argument leaves the one before.
	*a = arg{set: true, kind: m.Kind, size: m.Size, object: m.Object, to: s.named(m.Kind, m.Object), value: m.Value}
	st := s.bindArg(k, int(m.Index))
	if st != cl.Success {
		s.log.Warn("argument refused", "kernel", k.name, "argument", m.Index, "err", st)
		*a = old
		if c.slot == wire.NoSlot {
			k.lose(int(m.Index)) // the application believes that it is set
		}
		return done(st), nil
	}
	if old.refused {
		k.refused--
	}
	a.value = append(old.value[:0], m.Value...)
	switch m.Kind {
	case wire.ArgMem, wire.ArgImage:
		k.stale = true
	case wire.ArgLocal:
		if old.set {
			k.local -= old.size
		}
		k.local += a.size
	}
	return done(st), nil
}

// lose has the kernel refuse to be launched until an argument is set again, as what the vendor's kernel has is not
// what the application has set last.
func (k *kernel) lose(i int) {
	a := &k.args[i]
	if !a.set {
		return
	}
	if a.kind == wire.ArgLocal {
		k.local -= a.size
	}
	*a = arg{refused: true}
	k.refused++
	k.stale = true
}

// written lists the memory objects that a launch with the present arguments may write.
func (s *session) written(k *kernel) []*mem {
	believed := s.believes(k.prog)
	if !k.stale && k.believed == believed {
		return k.writes
	}
	k.writes = k.writes[:0]
	for i := range k.args {
		a, in := &k.args[i], &k.info[i]
		if !a.set || a.object == 0 {
			continue
		}
		switch a.kind {
		case wire.ArgMem:
			if in.flags&argConstSpace != 0 || in.flags&argConst != 0 && believed {
				continue
			}
		case wire.ArgImage:
			if in.flags&argReadOnly != 0 {
				continue
			}
		default:
			continue
		}
		if m, ok := a.to.(*mem); ok {
			k.writes = append(k.writes, m)
		}
	}
	k.stale, k.believed = false, believed
	return k.writes
}

func (s *session) kernelInfo(m *wire.KernelInfo) (outcome, error) {
	k := lookup[kernel](s, m.Kernel)
	if k == nil {
		return done(cl.InvalidKernel), nil
	}
	b, st := cl.GetKernelInfo(k.vendor, m.Param)
	if st == cl.Success && m.Param == cl.KernelAttributes && len(b) == 0 {
		b = []byte{0}
	}
	return outcome{status: st, data: b}, nil
}

func (s *session) kernelArgInfo(m *wire.KernelArgInfo) (outcome, error) {
	k := lookup[kernel](s, m.Kernel)
	if k == nil {
		return done(cl.InvalidKernel), nil
	}
	if int64(m.Index) >= int64(len(k.text)) {
		return done(cl.InvalidArgIndex), nil
	}
	if k.prog.told == toldNo { // the answer of the first runtime does not change
		return done(cl.KernelArgInfoNotAvailable), nil
	}
	a := &k.text[m.Index]
	switch m.Param {
	case cl.KernelArgAddressQualifier:
		return answer(binary.LittleEndian.AppendUint32(nil, a.Space)), nil
	case cl.KernelArgAccessQualifier:
		return answer(binary.LittleEndian.AppendUint32(nil, a.Access)), nil
	case cl.KernelArgTypeQualifier:
		return answer(u64s(a.Qual)), nil
	case cl.KernelArgTypeName:
		return answer(append([]byte(a.Type), 0)), nil
	case cl.KernelArgName:
		return answer(append([]byte(a.Name), 0)), nil
	}
	return done(cl.InvalidValue), nil
}

func (s *session) kernelWgInfo(m *wire.KernelWgInfo) (outcome, error) {
	k, d := lookup[kernel](s, m.Kernel), lookup[device](s, m.Device)
	if k == nil {
		return done(cl.InvalidKernel), nil
	}
	if d == nil {
		return done(cl.InvalidDevice), nil
	}
	b, st := cl.GetKernelWorkGroupInfo(k.vendor, d.vendor, m.Param)
	return outcome{status: st, data: b}, nil
}

func (s *session) kernelSubGroupInfo(m *wire.KernelSubGroupInfo) (outcome, error) {
	k, d := lookup[kernel](s, m.Kernel), lookup[device](s, m.Device)
	if k == nil {
		return done(cl.InvalidKernel), nil
	}
	if d == nil {
		return done(cl.InvalidDevice), nil
	}
	in := binary.LittleEndian.AppendUint64(nil, 0)[:0]
	for _, v := range m.Input {
		in = binary.LittleEndian.AppendUint64(in, v)
	}
	b, st := cl.GetKernelSubGroupInfo(k.vendor, d.vendor, m.Param, in)
	return outcome{status: st, data: b}, nil
}
