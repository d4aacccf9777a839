package executor

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// requests are reused for decoding, so that frequent calls allocate nothing. A handler that
// keeps a field after its dispatch must copy it.
type requests struct {
	all [256]wire.Request
}

func (r *requests) get(op wire.Op) wire.Request {
	if int(op) >= len(r.all) {
		return nil
	}
	if r.all[op] == nil {
		r.all[op] = wire.New(op)
	}
	return r.all[op]
}

// outcome is the result of a handler: the status and data of the reply; or after, which
// runs without the session's lock and sends the reply; or parked, if there is no reply yet.
type outcome struct {
	status cl.Status
	data   []byte
	after  after
	parked bool
}

// after is the part of a call that waits. When the wait is over, it may call back before it
// replies. Then a worker already reads the ring when the application's next request
// arrives.
type after func(back func())

func done(st cl.Status) outcome  { return outcome{status: st} }
func answer(data []byte) outcome { return outcome{data: data} }
func later(f after) outcome      { return outcome{after: f} }
func held() outcome              { return outcome{parked: true} }
func u64s(v ...uint64) []byte {
	var b []byte
	for _, x := range v {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	return b
}

// dispatch runs one request. An error means that the client has violated the protocol, and
// its session ends.
func (s *session) dispatch(c call) (after, error) {
	m := s.req.get(c.op)
	if m == nil {
		return nil, fmt.Errorf("%s: %w", c.op, wire.ErrUnknownOp)
	}
	if err := m.Decode(c.body); err != nil {
		return nil, err
	}
	o, err := s.run(c, m)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.op, err)
	}
	switch {
	case o.parked:
	case o.after != nil:
		return o.after, nil
	default:
		s.reply(c.slot, o.status, o.data)
	}
	return nil, nil
}

func (s *session) run(c call, m wire.Request) (outcome, error) {
	switch m := m.(type) {
	case *wire.SetArg:
		return s.setArg(c, m)
	case *wire.Ndrange:
		return s.ndrange(c, m)
	case *wire.SessionInfo:
		return answer(s.info), nil
	case *wire.Fetch:
		return s.fetch(m), nil
	case *wire.Release:
		return done(cl.Success), s.release(m.ID, m.Callback)
	case *wire.CreateSubDevices:
		return s.createSubDevices(m)
	case *wire.CreateContext:
		return s.createContext(m)
	case *wire.CreateQueue:
		return s.createQueue(m)
	case *wire.CreateBuffer:
		return s.createBuffer(m)
	case *wire.CreateSubBuffer:
		return s.createSubBuffer(m)
	case *wire.CreateImage:
		return s.createImage(m)
	case *wire.ImageFormats:
		return s.imageFormats(m)
	case *wire.CreateSampler:
		return s.createSampler(m)
	case *wire.CreateProgramSource:
		return s.createProgram(m.ID, m.Context, programSource, m.Mode, m.Source, m.StageOff, m.StageLen)
	case *wire.CreateProgramIL:
		return s.createProgram(m.ID, m.Context, programIL, m.Mode, m.IL, m.StageOff, m.StageLen)
	case *wire.CreateProgramBinary:
		return s.createProgram(m.ID, m.Context, programBinary, m.Mode, m.Binary, m.StageOff, m.StageLen)
	case *wire.BuildProgram:
		return s.build(c, m, inclusion{})
	case *wire.CompileProgram:
		return s.compile(c, m, inclusion{})
	case *wire.BuildWithFiles:
		return s.buildWithFiles(c, m)
	case *wire.CompileWithFiles:
		return s.compileWithFiles(c, m)
	case *wire.LinkProgram:
		return s.linkProgram(c, m)
	case *wire.ProgramInfo:
		return s.programInfo(m)
	case *wire.BuildInfo:
		return s.buildInfo(m)
	case *wire.SpecConstant:
		return s.specConstant(m)
	case *wire.CreateKernel:
		return s.createKernel(c, m)
	case *wire.CloneKernel:
		return s.cloneKernel(m)
	case *wire.KernelInfo:
		return s.kernelInfo(m)
	case *wire.KernelArgInfo:
		return s.kernelArgInfo(m)
	case *wire.KernelWgInfo:
		return s.kernelWgInfo(m)
	case *wire.KernelSubGroupInfo:
		return s.kernelSubGroupInfo(m)
	case *wire.CreateUserEvent:
		return s.createUserEvent(m)
	case *wire.SetUserEvent:
		return s.setUserEvent(m)
	case *wire.WaitEvents:
		return s.waitEvents(c, m)
	case *wire.EventStatus:
		return s.eventStatus(m)
	case *wire.EventProfiling:
		return s.eventProfiling(m)
	case *wire.EventCallback:
		return s.eventCallback(m)
	case *wire.DeviceTimer:
		return s.deviceTimer(m)
	case *wire.Flush:
		return s.flush(m)
	case *wire.Finish:
		return s.finish(c, m)
	}
	return s.command(c, m)
}

func (s *session) fetch(m *wire.Fetch) outcome {
	data, ok := s.replies[m.Token]
	if !ok {
		return done(cl.InvalidValue)
	}
	if m.Offset >= uint64(len(data)) {
		delete(s.replies, m.Token)
		return done(cl.Success)
	}
	rest := data[m.Offset:]
	if len(rest) <= slotData {
		delete(s.replies, m.Token)
	}
	return outcome{data: rest[:min(len(rest), slotData)]}
}

// content returns bytes that the client has sent. They are copied if the client could
// change them during the call.
func (s *session) content(mode uint32, inline []byte, off, n uint64) ([]byte, error) {
	switch mode {
	case wire.DataInline:
		return append([]byte(nil), inline...), nil
	case wire.DataStaged:
		p, ok := s.arenaRange(off, n)
		if !ok {
			return nil, fmt.Errorf("staged data at %#x, %d bytes: %w", off, n, errHostile)
		}
		return append([]byte(nil), unsafe.Slice((*byte)(p), n)...), nil
	}
	return nil, nil
}

// release releases the application's last reference.
func (s *session) release(id, callback uint32) error {
	if id < wire.FirstID || int64(id) >= int64(len(s.objs)) || s.objs[id] == nil {
		return fmt.Errorf("release of id %d: %w", id, errHostile)
	}
	o := s.objs[id]
	s.objs[id] = nil
	switch o := o.(type) {
	case *device:
		s.leaveDevice(o)
	case *clContext:
		s.forsake(o)
		s.bury(o)
		s.leave(o)
	case *queue:
		o.dead = true
		s.ghost(id, o, o.users)
		s.dropQueue(o)
	case *mem:
		o.dead = true
		s.ghost(id, o, o.users)
		o.callback = callback
		s.dropMem(o)
	case *sampler:
		o.dead = true
		s.ghost(id, o, o.users)
		s.dropSampler(o)
	case *program:
		o.dead = true
		// Only kernels of parked launches are left: the library releases a program after the
		// application's kernels.
		s.ghost(id, o, o.kernels)
		s.dropProgram(o)
	case *kernel:
		cl.ReleaseKernel(o.vendor)
		o.prog.kernels--
		s.dropProgram(o.prog)
	case *event:
		o.dead = true
		s.ghost(id, o, o.users)
		s.dropEvent(o)
	}
	return nil
}

// dropQueue gives a queue back that nobody uses. Its commands are waited for in another
// goroutine: they may take long, or be waiting for commands that the application has not
// flushed yet.
func (s *session) dropQueue(q *queue) {
	switch {
	case !q.dead || q.users > 0 || q.vendor == 0:
	case !q.busy():
		s.closeQueue(q)
	default:
		q.users++
		s.spawn(func() {
			q.drain()
			s.mu.Lock()
			defer s.mu.Unlock()
			q.users--
			q.idle = q.seq
			s.settle(q, true)
			s.gateIfIdle()
			s.dropQueue(q)
		})
	}
}

func (s *session) dropProgram(p *program) {
	if !p.dead || p.kernels > 0 {
		return
	}
	delete(s.ghosts, p.ghost)
	s.keepNot(p)       // no executor needs it
	if p.vendor != 0 { // a program that is being linked has none yet
		cl.ReleaseProgram(p.vendor)
	}
}

// dropSampler gives a sampler back when the commands that use it have ended: PoCL does not keep
// it for them, as it should (OpenCL 3.0, clReleaseSampler).
func (s *session) dropSampler(x *sampler) {
	if !x.dead || x.users > 0 || x.vendor == 0 {
		return
	}
	s.samplers = append(s.samplers, x.vendor)
	x.vendor = 0
	if len(s.samplers) == 1 {
		go s.releaseSamplers()
	}
}

// releaseSamplers releases what was dropped, until nothing more is.
func (s *session) releaseSamplers() {
	for n := 0; ; {
		s.mu.Lock()
		for _, v := range s.samplers[:n] {
			cl.ReleaseSampler(v)
		}
		s.samplers = s.samplers[n:]
		n = len(s.samplers)
		marks := []cl.Event(nil)
		if n > 0 {
			marks, _ = s.markers(s.contexts())
		}
		s.mu.Unlock()
		if n == 0 {
			return
		}
		await(marks)
	}
}

func (s *session) dropEvent(e *event) {
	if !e.dead || e.users > 0 {
		return
	}
	if e.vendor != 0 {
		cl.ReleaseEvent(e.vendor)
		e.vendor = 0
	}
	if s.ghosts[e.ghost] == e {
		delete(s.ghosts, e.ghost)
		s.endLeft()
	}
}
