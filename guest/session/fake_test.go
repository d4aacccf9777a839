package session

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/guest/statestream"
)

// fakeLauncher starts executors inside the test. They check the rules of ExecutorService:
// what a real executor could not do fails.
type fakeLauncher struct {
	t *testing.T

	mu       sync.Mutex
	nextPID  int
	live     map[int]*fakeExecutor
	all      []*fakeExecutor
	fail     map[string]error // by method; with the prefix "target.", for executors of later generations than 1
	limits   *gpuctlv1.Limits
	reasons  []*gpuctlv1.Reason // returned by Prepare
	blockers []string           // returned by Freeze
	blocked  chan struct{}      // if not nil: the next Export closes it, and then does not return
	final    bool               // blocked is for the next final Export
	probe    *gpuctlv1.ProbeResponse
	warmed   []string // dirs
	loses    uint32   // generation of an executor whose device has not what it was sent
	clings   uint32   // generation of an executor that ends only when let calls it
	let      chan struct{}
	loads    func() // called while an executor loads
}

var _ Launcher = (*fakeLauncher)(nil)

func newFakeLauncher(t *testing.T) *fakeLauncher {
	l := &fakeLauncher{t: t, nextPID: 1 << 28, live: map[int]*fakeExecutor{}, fail: map[string]error{}}
	t.Cleanup(func() {
		for _, e := range l.all {
			e.Kill()
		}
	})
	return l
}

// fakeExecutor is both the process and the service.
type fakeExecutor struct {
	l     *fakeLauncher
	spec  Spec
	pid   int
	srv   *http.Server
	done  chan struct{}
	once  sync.Once // Kill
	ended sync.Once
	ring  *shm.Ring
	reg   *shm.Region
	state *os.File

	files *net.UnixListener
	asked chan struct{} // a request to discard the state has come

	mu         sync.Mutex
	handedName string
	handed     *os.File
	content    string // content of the session's memory
	prepared   bool
	final      bool // prepared with a frozen session's graph
	complete   bool // it has all contents
	active     bool
	gated      bool // Freeze was tried
	frozen     bool
	thaws      int
	freezes    uint64
	exported   bool
	holds      bool // memory for an export
	fetches    bool // contents have come straight, and may still come
}

var (
	_ Process                                = (*fakeExecutor)(nil)
	_ gpuctlv1connect.ExecutorServiceHandler = (*fakeExecutor)(nil)
)

func (l *fakeLauncher) Launch(_ context.Context, spec Spec, journal func(Process) error) (Process, error) {
	if err := l.failure("Launch", spec.Generation); err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.nextPID++
	e := &fakeExecutor{l: l, spec: spec, pid: l.nextPID, done: make(chan struct{}), asked: make(chan struct{}, 1)}
	l.live[e.pid] = e
	l.all = append(l.all, e)
	loads := l.loads
	l.mu.Unlock()
	if loads != nil {
		loads()
	}
	fd, err := shm.Reopen(int(spec.Memory[0].Fd()))
	if err != nil {
		return nil, err
	}
	if e.reg, err = shm.Open(fd, wire.RingMem); err != nil {
		return nil, err
	}
	state, err := unix.FcntlInt(spec.Memory[2].Fd(), unix.F_DUPFD_CLOEXEC, 0) // as a process of its own has it
	if err != nil {
		return nil, err
	}
	e.state = os.NewFile(uintptr(state), "state")
	if e.ring, err = shm.NewRing(e.reg); err != nil {
		return nil, err
	}
	if err := e.ring.Check(); err != nil {
		return nil, err
	}
	if spec.Generation == 1 {
		e.content = "content of " + spec.Dir
	}
	if err := journal(e); err != nil {
		e.Kill()
		return nil, err
	}
	files, err := net.ListenUnix("unix", &net.UnixAddr{Name: fileSocket(spec.Socket, spec.Generation), Net: "unix"})
	if err != nil {
		return nil, err
	}
	e.files = files
	go func() {
		_ = handover.Serve(files, func(name string, f *os.File) {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.handedName, e.handed = name, f
		})
	}()
	lis, err := net.Listen("unix", spec.Socket)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle(gpuctlv1connect.NewExecutorServiceHandler(e))
	e.srv = &http.Server{Handler: mux}
	go func() { _ = e.srv.Serve(lis) }()
	return e, nil
}

func (l *fakeLauncher) Forget(dir string) error {
	l.Cool(dir)
	return nil
}

func (l *fakeLauncher) Adopt(pid int, start uint64, _ string) (Process, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.live[pid]; e != nil && start == e.Start() {
		return e, nil
	}
	return nil, ErrGone
}

func (l *fakeLauncher) Probe(context.Context, *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error) {
	return l.probe, nil
}

func (l *fakeLauncher) Warm(_ context.Context, spec Spec) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.warmed = append(l.warmed, spec.Dir)
	return nil
}

func (l *fakeLauncher) Cool(dir string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.warmed = slices.DeleteFunc(l.warmed, func(d string) bool { return d == dir })
}

// failure returns the error with which method fails, or nil. Every generation except the first
// is a target.
func (l *fakeLauncher) failure(method string, gen uint32) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if gen > 1 {
		if err := l.fail["target."+method]; err != nil {
			return err
		}
	}
	return l.fail[method]
}

func (l *fakeLauncher) setFailure(method string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fail[method] = err
}

func (l *fakeLauncher) generation(gen uint32) *fakeExecutor {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.all {
		if e.spec.Generation == gen {
			return e
		}
	}
	return nil
}

func (l *fakeLauncher) takeBlock(final bool) chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.final && !final {
		return nil
	}
	c := l.blocked
	l.blocked = nil
	return c
}

// hangExport makes the next Export block. The channel is closed when it does.
func (l *fakeLauncher) hangExport() chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.blocked = make(chan struct{})
	return l.blocked
}

// hangFinal does the same for the next Export of a frozen session.
func (l *fakeLauncher) hangFinal() chan struct{} {
	c := l.hangExport()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.final = true
	return c
}

// running returns the executors that have not ended.
func (l *fakeLauncher) running() (gens []uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.all {
		if l.live[e.pid] != nil {
			gens = append(gens, e.spec.Generation)
		}
	}
	return gens
}

func (e *fakeExecutor) PID() int                { return e.pid }
func (e *fakeExecutor) Start() uint64           { return uint64(e.pid) * 7 }
func (e *fakeExecutor) Done() <-chan struct{}   { return e.done }
func (e *fakeExecutor) Exit() string            { return "was killed" }
func (e *fakeExecutor) Owns(c *unix.Ucred) bool { return int(c.Pid) == os.Getpid() }
func (e *fakeExecutor) Kill() {
	e.once.Do(func() {
		e.l.mu.Lock()
		let := e.l.let
		clings := e.l.clings == e.spec.Generation
		e.l.mu.Unlock()
		if clings { // as a process whose driver does not let go of it: it does nothing, and does not end
			if e.srv != nil {
				_ = e.srv.Close()
			}
			go func() { <-let; e.end() }()
			return
		}
		e.end()
	})
}

// cling makes the executor of a generation not end when it is killed, until the function
// that is returned is called.
func (l *fakeLauncher) cling(gen uint32) (let func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := make(chan struct{})
	l.clings, l.let = gen, c
	let = sync.OnceFunc(func() { close(c) })
	l.t.Cleanup(let)
	return let
}

func (e *fakeExecutor) end() {
	e.ended.Do(func() {
		e.l.mu.Lock()
		delete(e.l.live, e.pid)
		e.l.mu.Unlock()
		if e.srv != nil {
			_ = e.srv.Close()
		}
		if e.files != nil {
			_ = e.files.Close()
		}
		_ = os.Remove(e.spec.Socket)
		close(e.done)
	})
}

func refusal(format string, args ...any) error {
	return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf(format, args...))
}

func (e *fakeExecutor) enter(method string) (func(), error) {
	if err := e.l.failure(method, e.spec.Generation); err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	e.mu.Lock()
	return e.mu.Unlock, nil
}

func (e *fakeExecutor) Describe(context.Context, *connect.Request[gpuctlv1.DescribeRequest]) (*connect.Response[gpuctlv1.DescribeResponse], error) {
	leave, err := e.enter("Describe")
	if err != nil {
		return nil, err
	}
	defer leave()
	limits := e.l.limits
	if limits == nil {
		limits = &gpuctlv1.Limits{}
	}
	return connect.NewResponse(&gpuctlv1.DescribeResponse{
		Usage:      &gpuctlv1.Usage{Memory: 1000, LargestAlloc: 800, LargestWorkGroup: 256, Programs: 1},
		Devices:    []*gpuctlv1.Limits{limits},
		Generation: e.spec.Generation, Frozen: e.frozen, Active: e.active, Freezes: e.freezes,
	}), nil
}

func (e *fakeExecutor) Snapshot(context.Context, *connect.Request[gpuctlv1.SnapshotRequest]) (*connect.Response[gpuctlv1.SnapshotResponse], error) {
	leave, err := e.enter("Snapshot")
	if err != nil {
		return nil, err
	}
	defer leave()
	if !e.active {
		return nil, refusal("snapshot of an executor that runs nothing")
	}
	return connect.NewResponse(&gpuctlv1.SnapshotResponse{Graph: []byte("graph"), Dirty: 100}), nil
}

func (e *fakeExecutor) Prepare(_ context.Context, req *connect.Request[gpuctlv1.PrepareRequest], st *connect.ServerStream[gpuctlv1.Progress]) error {
	leave, err := e.enter("Prepare")
	if err != nil {
		return err
	}
	defer leave()
	if e.active {
		return refusal("prepare of the session's own executor")
	}
	if rs := e.l.reasons; len(rs) > 0 {
		return st.Send(&gpuctlv1.Progress{Result: &gpuctlv1.SwapResult{Refused: true, Reasons: rs}})
	}
	if req.Msg.CheckOnly {
		return nil
	}
	want := "graph"
	if req.Msg.Final {
		want = "frozen graph"
	}
	if string(req.Msg.Graph) != want {
		return refusal("graph %q is not %q", req.Msg.Graph, want)
	}
	e.prepared, e.final = true, req.Msg.Final
	return st.Send(&gpuctlv1.Progress{BytesDone: 1, BytesTotal: 1})
}

func (e *fakeExecutor) Export(ctx context.Context, req *connect.Request[gpuctlv1.ExportRequest], st *connect.ServerStream[gpuctlv1.Progress]) error {
	leave, err := e.enter("Export")
	if err != nil {
		return err
	}
	defer leave()
	if blocked := e.l.takeBlock(req.Msg.Final); blocked != nil {
		if req.Msg.Memory && !req.Msg.Final {
			return e.writeOn(ctx, blocked)
		}
		close(blocked)
		<-ctx.Done()
		return ctx.Err()
	}
	if !e.active {
		return refusal("export of an executor that runs nothing")
	}
	if req.Msg.Final != e.frozen {
		return refusal("final export %v while frozen is %v", req.Msg.Final, e.frozen)
	}
	e.holds = true
	switch {
	case req.Msg.Peer != "":
		var peer *fakeExecutor
		for _, o := range e.l.all {
			if o.spec.ImportSocket == req.Msg.Peer {
				peer = o
			}
		}
		if peer == nil {
			return refusal("no peer at %s", req.Msg.Peer)
		}
		peer.mu.Lock()
		defer peer.mu.Unlock()
		if !peer.prepared || (req.Msg.Final && !peer.final) {
			return refusal("export to a peer that is not prepared")
		}
		if req.Msg.Fetch == "" && peer.fetches {
			return refusal("contents come both ways")
		}
		if req.Msg.Fetch != "" {
			peer.fetches = true
			what := "Straight"
			if req.Msg.Final {
				what = "StraightFinal"
			}
			if err := e.l.failure(what, e.spec.Generation); err != nil {
				return connect.NewError(connect.CodeInternal, err)
			}
			if err := st.Send(&gpuctlv1.Progress{BytesDone: 64, BytesTotal: 64, BytesStraight: 64}); err != nil {
				return err
			}
		}
		peer.exported = peer.exported || req.Msg.All
		peer.content = e.content
		peer.complete = req.Msg.Final && peer.exported
	case req.Msg.File != "":
		if e.handedName != req.Msg.File {
			return refusal("%s was not handed over", req.Msg.File)
		}
		if _, err := e.handed.WriteAt([]byte(e.content), 0); err != nil {
			return connect.NewError(connect.CodeInternal, err)
		}
	case req.Msg.Memory:
		if _, err := e.state.WriteAt([]byte(e.content), 0); err != nil {
			return connect.NewError(connect.CodeInternal, err)
		}
	}
	return st.Send(&gpuctlv1.Progress{BytesDone: 1000, BytesTotal: 1000})
}

// writeOn is an Export to the state memory that is in the middle of a long copy when it is
// given up. It ends when it is told to discard what it has written. If the memory is gone
// before that, the process dies of SIGBUS.
func (e *fakeExecutor) writeOn(ctx context.Context, begun chan struct{}) error {
	if _, err := e.state.WriteAt([]byte(e.content), 0); err != nil {
		return connect.NewError(connect.CodeInternal, err)
	}
	close(begun)
	<-ctx.Done()
	for {
		if fi, err := e.state.Stat(); err != nil || fi.Size() == 0 {
			e.Kill()
			return refusal("killed")
		}
		select {
		case <-e.asked:
			return ctx.Err()
		case <-e.done:
			return refusal("killed")
		default:
			runtime.Gosched()
		}
	}
}

func (e *fakeExecutor) Discard(context.Context, *connect.Request[gpuctlv1.DiscardRequest]) (*connect.Response[gpuctlv1.DiscardResponse], error) {
	select {
	case e.asked <- struct{}{}:
	default:
	}
	leave, err := e.enter("Discard")
	if err != nil {
		return nil, err
	}
	defer leave()
	if e.frozen {
		return nil, refusal("discard of the state of a frozen session")
	}
	e.holds = false
	if err := e.state.Truncate(0); err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&gpuctlv1.DiscardResponse{}), nil
}

func (e *fakeExecutor) Freeze(_ context.Context, req *connect.Request[gpuctlv1.FreezeRequest]) (*connect.Response[gpuctlv1.SnapshotResponse], error) {
	e.mu.Lock()
	if !e.active || e.gated {
		e.mu.Unlock()
		return nil, refusal("freeze: active %v, gated %v", e.active, e.gated)
	}
	if n := req.Msg.GetFreeze(); n != e.freezes+1 {
		e.mu.Unlock()
		return nil, refusal("freeze %d after %d others", n, e.freezes)
	}
	e.mu.Unlock()
	if b := e.l.blockers; len(b) > 0 { // it gives up without being asked
		return nil, refusal("the device is still busy: %v", b)
	}
	leave, err := e.enter("Freeze")
	if err != nil {
		e.mu.Lock()
		e.gated = true // an error of any other kind leaves it unknown whether it is frozen
		e.mu.Unlock()
		return nil, err
	}
	defer leave()
	e.gated, e.frozen = true, true
	e.freezes++
	return connect.NewResponse(&gpuctlv1.SnapshotResponse{Graph: []byte("frozen graph"), Dirty: 100}), nil
}

func (e *fakeExecutor) Thaw(_ context.Context, req *connect.Request[gpuctlv1.ThawRequest]) (*connect.Response[gpuctlv1.ThawResponse], error) {
	leave, err := e.enter("Thaw")
	if err != nil {
		return nil, err
	}
	defer leave()
	if !e.gated {
		return nil, refusal("thaw without freeze")
	}
	if e.ring.Owner() != e.spec.Generation {
		return nil, refusal("thaw of generation %d, owner is %d", e.spec.Generation, e.ring.Owner())
	}
	if n := req.Msg.GetFreeze(); e.frozen && n != 0 && n != e.freezes {
		return nil, refusal("thaw of freeze %d, this is %d", n, e.freezes)
	}
	if !e.frozen && req.Msg.GetFreeze() == e.freezes+1 {
		e.freezes++ // the freeze may still come
	}
	e.gated, e.frozen, e.holds = false, false, false
	e.thaws++
	return connect.NewResponse(&gpuctlv1.ThawResponse{}), nil
}

func (e *fakeExecutor) Load(_ context.Context, req *connect.Request[gpuctlv1.LoadRequest], st *connect.ServerStream[gpuctlv1.Progress]) error {
	leave, err := e.enter("Load")
	if err != nil {
		return err
	}
	defer leave()
	if !e.final {
		return refusal("load before the final prepare")
	}
	if req.Msg.File != "" {
		if e.handedName != req.Msg.File {
			return refusal("%s was not handed over", req.Msg.File)
		}
		b, err := io.ReadAll(e.handed)
		if err != nil {
			return connect.NewError(connect.CodeInternal, err)
		}
		e.content = string(b)
	} else {
		b := make([]byte, 4096)
		n, _ := e.state.ReadAt(b, 0)
		e.content = string(b[:n])
	}
	e.complete = true
	return st.Send(&gpuctlv1.Progress{BytesDone: 1000, BytesTotal: 1000})
}

func (e *fakeExecutor) Send(ctx context.Context, _ *connect.Request[gpuctlv1.SendRequest], st *connect.ServerStream[gpuctlv1.StateChunk]) error {
	leave, err := e.enter("Send")
	if err != nil {
		return err
	}
	defer leave()
	if !e.active || !e.frozen {
		return refusal("send of an executor that is not frozen")
	}
	for _, c := range fakeChunks(e.content) {
		if c.Mark != nil && e.l.takeBlock(true) != nil {
			<-ctx.Done()
			return ctx.Err()
		}
		if c.Mark != nil && e.l.failure("end of Send", e.spec.Generation) != nil {
			return nil // the stream ends without its mark
		}
		if err := st.Send(c); err != nil {
			return err
		}
	}
	return nil
}

// fakeChunks returns a state in many chunks.
func fakeChunks(content string) (all []*gpuctlv1.StateChunk) {
	for part := range slices.Chunk([]byte(content), 4) {
		all = append(all, &gpuctlv1.StateChunk{Data: part})
	}
	sum := sha256.Sum256([]byte(content))
	return append(all, &gpuctlv1.StateChunk{Mark: &gpuctlv1.StateMark{Size: uint64(len(content)), Digest: sum[:]}})
}

func (e *fakeExecutor) Receive(_ context.Context, in *connect.ClientStream[gpuctlv1.StateChunk]) (*connect.Response[gpuctlv1.ReceiveResponse], error) {
	leave, err := e.enter("Receive")
	if err != nil {
		return nil, err
	}
	defer leave()
	if !e.final {
		return nil, refusal("receive before the final prepare")
	}
	b, err := io.ReadAll(statestream.NewReader(func() (*gpuctlv1.StateChunk, error) {
		if !in.Receive() {
			return nil, io.EOF
		}
		return in.Msg(), nil
	}))
	if err != nil {
		return nil, refusal("receive: %v", err)
	}
	e.content, e.complete = string(b), true
	return connect.NewResponse(&gpuctlv1.ReceiveResponse{Bytes: uint64(len(b))}), nil
}

func (e *fakeExecutor) Digest(context.Context, *connect.Request[gpuctlv1.DigestRequest]) (*connect.Response[gpuctlv1.DigestResponse], error) {
	leave, err := e.enter("Digest")
	if err != nil {
		return nil, err
	}
	defer leave()
	if !e.frozen && !(e.complete && !e.active) {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("its contents may change"))
	}
	has := e.content
	if e.spec.Generation == e.l.loses {
		has = strings.Repeat("\x00", len(has))
	}
	return connect.NewResponse(&gpuctlv1.DigestResponse{Objects: []*gpuctlv1.ObjectDigest{
		{Id: 7, Bytes: uint64(len(has)), Sums: []uint32{crc32.ChecksumIEEE([]byte(has))}},
	}}), nil
}

func (e *fakeExecutor) EndFetch(context.Context, *connect.Request[gpuctlv1.EndFetchRequest]) (*connect.Response[gpuctlv1.EndFetchResponse], error) {
	leave, err := e.enter("EndFetch")
	if err != nil {
		return nil, err
	}
	defer leave()
	e.fetches, e.exported = false, false // it is not known what has come
	return connect.NewResponse(&gpuctlv1.EndFetchResponse{}), nil
}

func (e *fakeExecutor) Activate(context.Context, *connect.Request[gpuctlv1.ActivateRequest]) (*connect.Response[gpuctlv1.ActivateResponse], error) {
	leave, err := e.enter("Activate")
	if err != nil {
		return nil, err
	}
	defer leave()
	switch {
	case e.active:
		return nil, refusal("active already")
	case e.ring.Owner() != e.spec.Generation:
		return nil, refusal("the owner is %d, not %d", e.ring.Owner(), e.spec.Generation)
	case e.spec.Generation > 1 && !e.complete:
		return nil, refusal("contents are missing")
	}
	e.active = true
	return connect.NewResponse(&gpuctlv1.ActivateResponse{}), nil
}

func (e *fakeExecutor) Retire(context.Context, *connect.Request[gpuctlv1.RetireRequest]) (*connect.Response[gpuctlv1.RetireResponse], error) {
	leave, err := e.enter("Retire")
	if err != nil {
		return nil, err
	}
	defer leave()
	go func() {
		// Shutdown waits for the reply to be sent.
		_ = e.srv.Shutdown(context.Background())
		e.Kill()
	}()
	return connect.NewResponse(&gpuctlv1.RetireResponse{}), nil
}

var errFake = errors.New("fake failure")

// Pulse is answered during other calls, too.
func (e *fakeExecutor) Pulse(ctx context.Context, _ *connect.Request[gpuctlv1.PulseRequest], st *connect.ServerStream[gpuctlv1.PulseResponse]) error {
	if err := e.l.failure("Pulse", e.spec.Generation); err != nil {
		return err
	}
	if err := st.Send(&gpuctlv1.PulseResponse{WaitsFor: "kernel spin of queue 3 has not ended", ForNs: int64(74 * time.Second)}); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-e.done:
	}
	return nil
}
