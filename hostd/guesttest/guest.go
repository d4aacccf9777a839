package guesttest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
)

const (
	helloMagic = 0x48425847
	helloSize  = 64
	invalid    = -30 // CL_INVALID_VALUE
)

// Guest is the fake. Make one with New.
type Guest struct {
	gpuctlv1connect.UnimplementedGuestServiceHandler // for the RPCs that stream a state out of a VM: the fake has none of them

	// Step, if not nil, is called in every step of every operation.
	Step func(operation, step string) error
	// Offering is called before an offer is taken, if it is set: sessions can still begin by the old one.
	Offering func()
	// Probes are the answers of Probe, by the library's path. Probing any other library
	// is reported as a crash.
	Probes map[string]*gpuctlv1.ProbeResponse

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at each change
	offers   map[string]*gpuctlv1.OfferRequest
	sessions map[string]*gpuctlv1.Session
	lost     []*gpuctlv1.LostSession
	busy     map[string]bool
	leases   map[string]*lease
	next     int

	folders map[string]*gpuctlv1.Session // that are suspended with their processes

	processes []Process      // that use CUDA and are in no session
	swapped   map[int]uint64 // start times of processes that get a pid after the next look
}

var _ gpuctlv1connect.GuestServiceHandler = (*Guest)(nil)

// New returns a guest with two runtimes: PoCL, whose memory follows its
// environment (POCL_MEMORY_LIMIT, POCL_DEVICES), and Oclgrind with 128 MiB.
func New() *Guest {
	return &Guest{
		changed: make(chan struct{}), offers: map[string]*gpuctlv1.OfferRequest{}, sessions: map[string]*gpuctlv1.Session{},
		busy: map[string]bool{},
	}
}

// Handler serves GuestService.
func (g *Guest) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(gpuctlv1connect.NewGuestServiceHandler(g))
	return mux
}

// Holders returns the sessions that are on a GPU now, by GPU.
func (g *Guest) Holders() map[string][]string {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := map[string][]string{}
	for id, s := range g.sessions {
		if s.GetState() == gpuctlv1.SessionState_SESSION_STATE_RUNNING || s.GetState() == gpuctlv1.SessionState_SESSION_STATE_SWAPPING {
			out[s.GetTarget().GetGpu()] = append(out[s.GetTarget().GetGpu()], id)
		}
	}
	return out
}

// set replaces a session. g.mu is held.
func (g *Guest) set(s *gpuctlv1.Session) {
	g.sessions[s.GetId()] = s
	close(g.changed)
	g.changed = make(chan struct{})
}

// Begin starts a session, as an application with this token does. memory is in bytes.
func (g *Guest) Begin(token string, pid int, command string, memory uint64) (string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	offer := g.offers[token]
	if offer == nil {
		return "", errors.New("no such offer")
	}
	if memory > offer.GetTarget().GetLimits().GetGlobalMemory() {
		return "", errors.New("out of memory")
	}
	if offer.GetTarget().GetRuntime() == nil {
		return "", errors.New("the offer names no runtime")
	}
	return g.begin(&gpuctlv1.Session{
		Claim: offer.GetClaim(), Pid: uint32(pid), Command: command, State: gpuctlv1.SessionState_SESSION_STATE_RUNNING,
		Target: offer.GetTarget(), Device: offer.GetDevice(), Generation: 1, StartedUnixMs: time.Now().UnixMilli(),
		Usage: &gpuctlv1.Usage{Memory: memory, LargestAlloc: memory}, Engine: "portable",
	}), nil
}

// End ends a session, as it ends with its application.
func (g *Guest) End(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := g.sessions[id]; s != nil && s.GetState() != gpuctlv1.SessionState_SESSION_STATE_ENDED {
		s = proto.CloneOf(s)
		s.State = gpuctlv1.SessionState_SESSION_STATE_ENDED
		g.set(s)
	}
}

// Warm implements GuestService. There is nothing to load.
func (g *Guest) Warm(context.Context, *connect.Request[gpuctlv1.WarmRequest]) (*connect.Response[gpuctlv1.WarmResponse], error) {
	return connect.NewResponse(&gpuctlv1.WarmResponse{}), nil
}

// Serve accepts applications until the listener is closed.
func (g *Guest) Serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go g.serve(c)
	}
}

func (g *Guest) serve(c net.Conn) {
	defer c.Close()
	hello := make([]byte, helloSize)
	if _, err := io.ReadFull(c, hello); err != nil {
		return
	}
	switch binary.LittleEndian.Uint32(hello) {
	case helloMagic:
	case cudaMagic:
		g.serveCUDA(c, hello)
		return
	default:
		return
	}
	pid := int(binary.LittleEndian.Uint32(hello[8:]))
	command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	id, err := g.Begin(string(bytes.TrimRight(hello[16:], "\x00")), pid, strings.TrimSpace(string(bytes.ReplaceAll(command, []byte{0}, []byte{' '}))), 64<<20)
	status, text := int32(0), id
	if err != nil {
		status, text = invalid, err.Error()
	}
	answer := binary.LittleEndian.AppendUint32(nil, uint32(status))
	answer = binary.LittleEndian.AppendUint32(answer, uint32(len(text)))
	if _, err := c.Write(append(answer, text...)); err != nil || id == "" {
		g.End(id)
		return
	}
	_, _ = io.Copy(io.Discard, c)
	g.End(id)
}

// Connect begins a session at an application socket and returns its id. The
// session ends when the connection is closed.
func Connect(socket, token string) (net.Conn, string, error) {
	c, err := net.Dial("unix", socket)
	if err != nil {
		return nil, "", err
	}
	hello := make([]byte, helloSize)
	binary.LittleEndian.PutUint32(hello, helloMagic)
	binary.LittleEndian.PutUint32(hello[4:], 1)
	binary.LittleEndian.PutUint32(hello[8:], uint32(os.Getpid()))
	copy(hello[16:], token)
	head := make([]byte, 8)
	if _, err = c.Write(hello); err == nil {
		_, err = io.ReadFull(c, head)
	}
	text := make([]byte, min(1024, binary.LittleEndian.Uint32(head[4:])))
	if err == nil {
		_, err = io.ReadFull(c, text)
	}
	if err == nil && binary.LittleEndian.Uint32(head) != 0 {
		err = errors.New(string(text))
	}
	if err != nil {
		_ = c.Close()
		return nil, "", err
	}
	return c, string(text), nil
}

func precondition(format string, args ...any) error {
	return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf(format, args...))
}

// Offer implements GuestService.
func (g *Guest) Offer(_ context.Context, r *connect.Request[gpuctlv1.OfferRequest]) (*connect.Response[gpuctlv1.OfferResponse], error) {
	m := r.Msg
	if m.GetToken() == "" || len(m.GetToken()) > 48 || m.GetClaim() == "" || m.GetTarget().GetGpu() == "" ||
		len(m.GetTarget().GetDriver()) == 0 && m.GetTarget().GetRuntime().GetRemote() == nil &&
			(m.GetTarget().GetRuntime().GetLibrary() == "" || len(m.GetTarget().GetRuntime().GetDevices()) == 0) {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("incomplete offer"))
	}
	if g.Offering != nil {
		g.Offering()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.offers[m.GetToken()] = m
	return connect.NewResponse(&gpuctlv1.OfferResponse{}), nil
}

// Withdraw implements GuestService.
func (g *Guest) Withdraw(_ context.Context, r *connect.Request[gpuctlv1.WithdrawRequest]) (*connect.Response[gpuctlv1.WithdrawResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.offers, r.Msg.GetToken())
	return connect.NewResponse(&gpuctlv1.WithdrawResponse{}), nil
}

// ListSessions implements GuestService.
func (g *Guest) ListSessions(context.Context, *connect.Request[gpuctlv1.ListSessionsRequest]) (*connect.Response[gpuctlv1.ListSessionsResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	res := &gpuctlv1.ListSessionsResponse{}
	for _, s := range g.sessions {
		if s.GetState() != gpuctlv1.SessionState_SESSION_STATE_ENDED {
			res.Sessions = append(res.Sessions, s)
		}
	}
	res.Lost = slices.Clone(g.lost)
	return connect.NewResponse(res), nil
}

// WatchSessions implements GuestService.
func (g *Guest) WatchSessions(ctx context.Context, _ *connect.Request[gpuctlv1.WatchSessionsRequest], stream *connect.ServerStream[gpuctlv1.Session]) error {
	sent := map[string]*gpuctlv1.Session{}
	for {
		g.mu.Lock()
		changed := g.changed
		var news []*gpuctlv1.Session
		for id, s := range g.sessions {
			if sent[id] != s {
				sent[id] = s
				news = append(news, s)
			}
		}
		g.mu.Unlock()
		for _, s := range news {
			if err := stream.Send(s); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

func reasons(s *gpuctlv1.Session, t *gpuctlv1.Target) []*gpuctlv1.Reason {
	if s.GetEngine() == "driver" {
		return driverReasons(s, t)
	}
	var out []*gpuctlv1.Reason
	if need, have := s.GetUsage().GetMemory(), t.GetLimits().GetGlobalMemory(); need > have {
		out = append(out, &gpuctlv1.Reason{Code: "memory", Message: fmt.Sprintf("uses %d bytes, the GPU has %d", need, have)})
	}
	if need, have := s.GetUsage().GetLargestAlloc(), t.GetLimits().GetMaxAlloc(); need > have {
		out = append(out, &gpuctlv1.Reason{Code: "max_alloc", Message: fmt.Sprintf("uses a buffer of %d bytes, the GPU allows %d", need, have)})
	}
	return out
}

// Plan implements GuestService.
func (g *Guest) Plan(_ context.Context, r *connect.Request[gpuctlv1.PlanRequest]) (*connect.Response[gpuctlv1.PlanResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.Msg.GetFolder() != "" {
		return g.planFolder(r.Msg)
	}
	s := g.sessions[r.Msg.GetSession()]
	if s == nil {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no such session"))
	}
	if r.Msg.GetRehearse() {
		return connect.NewResponse(&gpuctlv1.PlanResponse{Steps: steps("rehearse"), Bytes: s.GetUsage().GetMemory(), PredictedNs: 1e9, PredictedStopNs: 1e9}), nil
	}
	return connect.NewResponse(&gpuctlv1.PlanResponse{
		Reasons: reasons(s, r.Msg.GetTarget()), Steps: steps("swap"), Bytes: s.GetUsage().GetMemory(), PredictedNs: 1e9, PredictedStopNs: 12e6,
	}), nil
}

func steps(operation string) []string {
	switch operation {
	case "suspend":
		return []string{"freeze", "save", "commit"}
	case "store":
		return []string{"lock", "checkpoint", "dump", "seal", "end"}
	case "revive":
		return []string{"make", "restore", "unlock"}
	case "rehearse":
		return []string{"lock", "checkpoint", "restore", "unlock"}
	case "resume":
		return []string{"prepare", "load", "commit"}
	}
	return []string{"prepare", "precopy", "freeze", "copy", "commit"}
}

// ErrLose is returned by Step for a session that is lost: nobody knows on which of its GPUs
// it still is.
var ErrLose = errors.New("the driver does not give the process back")

// operate runs an operation's steps and then commits it.
func (g *Guest) operate(ctx context.Context, stream *connect.ServerStream[gpuctlv1.Progress], kind, id, failAt string, target *gpuctlv1.Target,
	from gpuctlv1.SessionState, commit func(*gpuctlv1.Session),
) error {
	g.mu.Lock()
	s := g.sessions[id]
	switch {
	case s == nil:
		g.mu.Unlock()
		return connect.NewError(connect.CodeNotFound, errors.New("no such session"))
	case s.GetState() != from || g.busy[id]:
		g.mu.Unlock()
		return precondition("session %s is %s", id, s.GetState())
	}
	if target != nil {
		if why := reasons(s, target); len(why) > 0 {
			g.mu.Unlock()
			return stream.Send(&gpuctlv1.Progress{Result: &gpuctlv1.SwapResult{Session: s, Refused: true, Reasons: why}})
		}
	}
	g.busy[id] = true
	before := s
	s = proto.CloneOf(s)
	s.State = gpuctlv1.SessionState_SESSION_STATE_SWAPPING
	g.set(s)
	g.mu.Unlock()
	err := func() error {
		all := steps(kind)
		for i, step := range all {
			if g.Step != nil {
				if err := g.Step(kind, step); err != nil {
					return err
				}
			}
			if step == failAt {
				return fmt.Errorf("step %s: injected fault", step)
			}
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("step %s: %w", step, err)
			}
			_ = stream.Send(&gpuctlv1.Progress{Step: step, StepIndex: uint32(i), Steps: uint32(len(all)), BytesDone: 1, BytesTotal: s.GetUsage().GetMemory()})
		}
		return nil
	}()
	g.mu.Lock()
	delete(g.busy, id)
	result := &gpuctlv1.SwapResult{TotalNs: 1e9, StoppedNs: 12e6, BytesPrecopied: 60 << 20, BytesFrozen: 4 << 20, Rehearsed: kind == "rehearse"}
	switch {
	case g.sessions[id].GetState() == gpuctlv1.SessionState_SESSION_STATE_ENDED:
		result = &gpuctlv1.SwapResult{Session: g.sessions[id], RolledBack: true, Error: "the application ended"}
	case errors.Is(err, ErrLose):
		s = proto.CloneOf(before)
		s.State, s.Message = gpuctlv1.SessionState_SESSION_STATE_LOST, err.Error()
		g.lost = append(g.lost, &gpuctlv1.LostSession{Id: id, Claim: s.GetClaim(), Reason: err.Error()})
		g.set(s)
		result = &gpuctlv1.SwapResult{Session: s, Error: err.Error()}
	case err != nil:
		g.set(proto.CloneOf(before))
		result = &gpuctlv1.SwapResult{Session: before, RolledBack: true, Error: err.Error()}
	default:
		s = proto.CloneOf(s)
		s.Generation++
		commit(s)
		g.set(s)
		result.Session = s
	}
	g.mu.Unlock()
	return stream.Send(&gpuctlv1.Progress{Result: result})
}

// Swap implements GuestService.
func (g *Guest) Swap(ctx context.Context, r *connect.Request[gpuctlv1.SwapRequest], stream *connect.ServerStream[gpuctlv1.Progress]) error {
	if r.Msg.GetRehearse() {
		return g.operate(ctx, stream, "rehearse", r.Msg.GetSession(), r.Msg.GetFailAt(), nil, gpuctlv1.SessionState_SESSION_STATE_RUNNING, func(s *gpuctlv1.Session) {
			s.State = gpuctlv1.SessionState_SESSION_STATE_RUNNING
		})
	}
	return g.operate(ctx, stream, "swap", r.Msg.GetSession(), r.Msg.GetFailAt(), r.Msg.GetTarget(), gpuctlv1.SessionState_SESSION_STATE_RUNNING, func(s *gpuctlv1.Session) {
		s.State = gpuctlv1.SessionState_SESSION_STATE_RUNNING
		moveTo(s, r.Msg.GetTarget())
	})
}

// Suspend implements GuestService.
func (g *Guest) Suspend(ctx context.Context, r *connect.Request[gpuctlv1.SuspendRequest], stream *connect.ServerStream[gpuctlv1.Progress]) error {
	if r.Msg.GetWithProcess() {
		return g.store(ctx, r.Msg, stream)
	}
	return g.operate(ctx, stream, "suspend", r.Msg.GetSession(), r.Msg.GetFailAt(), nil, gpuctlv1.SessionState_SESSION_STATE_RUNNING, func(s *gpuctlv1.Session) {
		s.State, s.SuspendedTo = gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, r.Msg.GetFile()
		if s.SuspendedTo == "" {
			s.SuspendedTo = "memory"
		}
	})
}

// Resume implements GuestService.
func (g *Guest) Resume(ctx context.Context, r *connect.Request[gpuctlv1.ResumeRequest], stream *connect.ServerStream[gpuctlv1.Progress]) error {
	if r.Msg.GetFolder() != "" {
		return g.revive(ctx, r.Msg, stream)
	}
	return g.operate(ctx, stream, "resume", r.Msg.GetSession(), r.Msg.GetFailAt(), r.Msg.GetTarget(), gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, func(s *gpuctlv1.Session) {
		s.State, s.SuspendedTo = gpuctlv1.SessionState_SESSION_STATE_RUNNING, ""
		moveTo(s, r.Msg.GetTarget())
	})
}

// Probe implements GuestService.
func (g *Guest) Probe(_ context.Context, r *connect.Request[gpuctlv1.ProbeRequest]) (*connect.Response[gpuctlv1.ProbeResponse], error) {
	lib, env := r.Msg.GetRuntime().GetLibrary(), r.Msg.GetRuntime().GetEnv()
	if g.Probes != nil {
		if p := g.Probes[lib]; p != nil {
			return connect.NewResponse(p), nil
		}
		return nil, connect.NewError(connect.CodeInternal, errors.New("the library crashed (signal 11)"))
	}
	device := func(i int, name, kind string, memory uint64) *gpuctlv1.ProbedDevice {
		return &gpuctlv1.ProbedDevice{Index: uint32(i), Name: name, Vendor: "fake", Type: kind, Limits: &gpuctlv1.Limits{
			GlobalMemory: memory, MaxAlloc: memory / 4, ComputeUnits: 2, MaxWorkGroupSize: 1024, LocalMemory: 1 << 15, Version: "OpenCL 3.0",
		}}
	}
	switch {
	case strings.Contains(lib, "pocl"):
		gib, _ := strconv.ParseUint(env["POCL_MEMORY_LIMIT"], 10, 32)
		kinds := strings.Fields(env["POCL_DEVICES"])
		if len(kinds) == 0 {
			kinds = []string{"pthread"}
		}
		p := &gpuctlv1.ProbeResponse{Platform: "Portable Computing Language", Vendor: "The pocl project", Driver: "3.1"}
		for i, kind := range kinds {
			p.Devices = append(p.Devices, device(i, kind+"-fake", "cpu", gib<<30))
		}
		return connect.NewResponse(p), nil
	case strings.Contains(lib, "oclgrind"):
		return connect.NewResponse(&gpuctlv1.ProbeResponse{Platform: "Oclgrind", Driver: "21.10", Devices: []*gpuctlv1.ProbedDevice{device(0, "Oclgrind Simulator", "gpu", 128<<20)}}), nil
	}
	return nil, connect.NewError(connect.CodeInternal, errors.New("the library crashed (signal 11)"))
}

// Offered returns the tokens that are offered, sorted.
func (g *Guest) Offered() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []string
	for t := range g.offers {
		out = append(out, t)
	}
	slices.Sort(out)
	return out
}
