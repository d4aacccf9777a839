package chaos

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/test/rig"
)

// Options say how much of what is done.
type Options struct {
	GPUs       []string // where the session may be
	Operations int      // ends after so many, if it is not 0
	Until      time.Time
	Fail, Kill int // of 100 operations: so many fail or are cancelled, and so many are killed
	Suspend    int // of 100 operations of a session that runs, so many suspend it, and the next ones follow at once; 0: 20, with pauses
	Seed       uint64
	Network    bool // the network breaks meanwhile: operations may fail by themselves
	Log        func(format string, args ...any)
}

// Hasty is an Options.Suspend with which a session does little else than being suspended and resumed.
const Hasty = 95

// Result counts what was done.
type Result struct {
	Operations, Done, Failed, Killed int
	Broken                           int           // that failed by themselves, as the network broke
	Worst                            time.Duration // that the application stood still in an operation that was done
}

// ErrLost is returned when the session's state is gone: nothing that is done here may lead to that.
var ErrLost = errors.New("the session is lost")

// settleTimeout is how long a session may take to come to rest after whatever
// was done to it; a machine may be busy.
const settleTimeout = 2 * time.Minute

// The steps at which an operation can fail, and at which its target or gpuguest
// can be killed.
var steps = map[string][]string{
	"swap":    {"check", "start", "prepare", "precopy", "freeze", "transfer", "switch"},
	"suspend": {"check", "precopy", "freeze", "export", "mark"},
	"resume":  {"check", "start", "prepare", "load", "switch"},
}

// actor disturbs one session.
type actor struct {
	Options
	r       *rig.Rig
	client  gpuctlv1connect.HostServiceClient
	random  *rand.Rand
	session string
	states  string // folder of state files
	files   int
	killed  atomic.Int32 // the gpuguest that was killed last
	result  Result
}

// Env is what hostd must have in its environment. With every second seed, swaps are verified: it is seen in each that
// contents are lost, whether the program looks at them or not. Without that, they are quicker.
// They are always verified if this process's environment says so.
func Env(seed uint64) []string {
	env := []string{"GPUCTL_FAULTS=1"}
	if seed%2 == 1 {
		env = append(env, "GPUCTL_VERIFY=1")
	}
	return env
}

// Run disturbs the only session of r, whose hostd must have Env in
// its environment, until the options say that it is enough or ctx ends. The
// session is left running.
func Run(ctx context.Context, r *rig.Rig, o Options) (Result, error) {
	a := &actor{
		Options: o, r: r, random: rand.New(rand.NewPCG(o.Seed, 0)),
		client: gpuctlv1connect.NewHostServiceClient(unixrpc.Client(filepath.Join(r.Dir, "hostd.sock")), "http://hostd"),
	}
	var err error
	if a.session, err = r.Session(ctx); err != nil {
		return a.result, err
	}
	if a.states, err = r.States(); err != nil {
		return a.result, err
	}
	for (o.Operations == 0 || a.result.Operations < o.Operations) && (o.Until.IsZero() || time.Now().Before(o.Until)) {
		if err := a.one(ctx); err != nil {
			return a.result, fmt.Errorf("operation %d: %w", a.result.Operations, err)
		}
		if a.Suspend == 0 && a.random.IntN(3) > 0 { // else the next one at once
			select {
			case <-ctx.Done():
				return a.result, ctx.Err()
			case <-time.After(time.Duration(a.random.IntN(150)) * time.Millisecond):
			}
		}
	}
	return a.result, a.rest(ctx)
}

// one is one operation, and a resumption if the session is suspended after it.
func (a *actor) one(ctx context.Context) error {
	a.result.Operations++
	s, err := a.settled(ctx)
	if err != nil {
		return err
	}
	to := a.GPUs[a.random.IntN(len(a.GPUs))]
	kind := "swap"
	switch {
	case s.GetSuspendedTo() != "":
		kind = "resume"
	case a.random.IntN(100) < cmp.Or(a.Suspend, 20):
		kind = "suspend"
	}
	fault, strike, timeout := a.harm(kind)
	opCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	if strike != nil {
		struck := make(chan struct{})
		after := time.AfterFunc(time.Duration(a.random.IntN(300))*time.Millisecond, func() { strike(cancel); close(struck) })
		defer func() {
			if !after.Stop() {
				<-struck // not in the middle of the next one
			}
		}()
	}
	res, err := a.operate(opCtx, kind, to, fault, timeout)
	for end := time.Now().Add(settleTimeout); connect.CodeOf(err) == connect.CodeFailedPrecondition && time.Now().Before(end); {
		// hostd is not yet done with one that was cancelled or whose gpuguest was killed.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
		now, e := a.settled(ctx)
		if e != nil {
			return e
		}
		if (now.GetSuspendedTo() != "") != (kind == "resume") {
			return nil // what was cancelled before has been done all the same
		}
		res, err = a.operate(opCtx, kind, to, fault, timeout)
	}
	what := time.Now().UTC().Format("15:04:05.000 ") + kind
	if fault != "" {
		what += " with " + fault
	}
	switch {
	case err != nil || res.GetError() != "" || res.GetRefused():
		switch {
		case fault != "" || strike != nil || timeout != 0 || res.GetRefused():
		case a.Network:
			a.result.Broken++
		default:
			return errors.Join(fmt.Errorf("%s to %s, which nothing disturbed: %s", kind, to, res.GetError()), err)
		}
		a.Log("%s to %s: %v %s", what, to, err, res.GetError())
	default:
		a.Log("%s to %s: done", what, to)
		a.result.Done++
		a.result.Worst = max(a.result.Worst, time.Duration(res.GetStoppedNs()))
	}
	return nil
}

// harm draws what happens to an operation: a fault at a step, a strike at some
// moment, or a freeze that has no time.
func (a *actor) harm(kind string) (fault string, strike func(cancel func()), freeze time.Duration) {
	at := steps[kind][a.random.IntN(len(steps[kind]))]
	switch n := a.random.IntN(100); {
	case n < a.Fail:
		a.result.Failed++
		switch a.random.IntN(4) {
		case 0:
			return "", func(cancel func()) { cancel() }, 0
		case 1:
			if kind == "swap" {
				return "", nil, time.Millisecond
			}
		}
		return at, nil, 0
	case n < a.Fail+a.Kill:
		a.result.Killed++
		switch n := a.random.IntN(3); {
		case n == 0 && kind != "suspend" && at != "check" && at != "start":
			return "kill_target@" + at, nil, 0
		case n == 1:
			return "kill_self@" + at, nil, 0
		}
		return "", func(func()) { a.killGuest() }, 0
	}
	return "", nil, 0
}

func (a *actor) killGuest() {
	if peer, err := unixrpc.PeerOf(a.guest()); err == nil {
		a.killed.Store(peer.PID)
		_ = syscall.Kill(int(peer.PID), syscall.SIGKILL)
	}
}

func (a *actor) guest() string { return filepath.Join(a.r.Dir, "guest.sock") }

// guestAnswers reports whether a gpuguest that nobody killed is there.
func (a *actor) guestAnswers() bool {
	peer, err := unixrpc.PeerOf(a.guest())
	return err == nil && peer.PID != a.killed.Load()
}

func (a *actor) operate(ctx context.Context, kind, to, fault string, freeze time.Duration) (*gpuctlv1.SwapResult, error) {
	var stream *connect.ServerStreamForClient[gpuctlv1.OperationUpdate]
	var err error
	switch kind {
	case "swap":
		stream, err = a.client.Swap(ctx, connect.NewRequest(&gpuctlv1.HostSwapRequest{
			Session: a.session, Verb: gpuctlv1.Verb_VERB_MIGRATE, To: to, FailAt: fault, FreezeTimeoutMs: freeze.Milliseconds(),
		}))
	case "suspend":
		req := &gpuctlv1.HostSuspendRequest{Session: a.session, FailAt: fault}
		if a.random.IntN(2) == 0 {
			a.files++
			req.File = filepath.Join(a.states, fmt.Sprintf("state%d", a.files))
		}
		stream, err = a.client.Suspend(ctx, connect.NewRequest(req))
	default:
		stream, err = a.client.Resume(ctx, connect.NewRequest(&gpuctlv1.HostResumeRequest{Session: a.session, To: to, FailAt: fault}))
	}
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	var res *gpuctlv1.SwapResult
	for stream.Receive() {
		if p := stream.Msg().GetProgress(); p.GetResult() != nil {
			res = p.GetResult()
		}
	}
	return res, stream.Err()
}

// settled waits until the session rests, running or suspended, whoever was
// killed, and returns it.
func (a *actor) settled(ctx context.Context) (*gpuctlv1.Session, error) {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	var last string
	for {
		resp, err := a.client.ListSessions(ctx, connect.NewRequest(&gpuctlv1.HostListSessionsRequest{}))
		switch {
		case !a.guestAnswers():
			last = "gpuguest does not answer"
		case err != nil:
			last = err.Error()
		default:
			last = "not listed"
			for _, s := range resp.Msg.GetSessions() {
				if s.GetId() != a.session {
					continue
				}
				last = s.GetState().String() + " " + s.GetMessage()
				switch s.GetState() {
				case gpuctlv1.SessionState_SESSION_STATE_LOST:
					return nil, fmt.Errorf("%w: %s", ErrLost, s.GetMessage())
				case gpuctlv1.SessionState_SESSION_STATE_RUNNING, gpuctlv1.SessionState_SESSION_STATE_SUSPENDED:
					return s, nil
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("session %s does not come to rest: %s: %w", a.session, last, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// rest leaves the session running.
func (a *actor) rest(ctx context.Context) error {
	for end := time.Now().Add(settleTimeout); ; {
		s, err := a.settled(ctx)
		if err != nil || s.GetSuspendedTo() == "" {
			return err
		}
		res, err := a.operate(ctx, "resume", a.GPUs[0], "", 0)
		if (err != nil || res.GetError() != "") && (!a.Network || time.Now().After(end)) {
			return errors.Join(fmt.Errorf("last resumption: %s", res.GetError()), err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Wrong lists the lines of a program's output that tell of a wrong result or an
// error.
func Wrong(output string) (lines []string) {
	for l := range strings.Lines(output) {
		if strings.HasPrefix(l, "BAD") || strings.HasPrefix(l, "ERROR") {
			lines = append(lines, strings.TrimSpace(l))
		}
	}
	return lines
}
