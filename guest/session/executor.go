package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
)

// Times that nothing healthy needs. A hanging driver must not hang an
// application that stands still because of it.
const (
	startTimeout    = 3 * time.Minute // until an executor serves; a slow VM compiles first
	describeTimeout = 2 * time.Second
	quickTimeout    = 30 * time.Second // calls that touch the device but move no data
	stallTimeout    = 60 * time.Second // without a word of progress, application standing still
	buildTimeout    = 10 * time.Minute // without a word of progress, application running
	retireTimeout   = 5 * time.Second
	readyPoll       = time.Millisecond
)

// executor is a running executor as the manager sees it.
type executor struct {
	gen          uint32
	target       *gpuctlv1.Target
	importSocket string
	proc         Process
	api          gpuctlv1connect.ExecutorServiceClient
	http         *http.Client
}

func newExecutor(gen uint32, target *gpuctlv1.Target, proc Process, socket, importSocket string) *executor {
	h := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
		DisableCompression: true,
	}}
	return &executor{
		gen: gen, target: target, importSocket: importSocket, proc: proc, http: h,
		// What an executor streams goes no further than this process.
		api: gpuctlv1connect.NewExecutorServiceClient(h, "http://executor", connect.WithAcceptCompression("gzip", nil, nil)),
	}
}

func (e *executor) dead() bool {
	select {
	case <-e.proc.Done():
		return true
	default:
		return false
	}
}

func (e *executor) record() executorRecord {
	return executorRecord{Generation: e.gen, PID: e.proc.PID(), Start: e.proc.Start(), Target: marshal(e.target)}
}

// wrap names the executor in an error and adds how it ended, if it did.
func (e *executor) wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) && ce.Code() != connect.CodeUnavailable {
		err = &saidError{ce}
	}
	select {
	case <-e.proc.Done():
	case <-time.After(50 * time.Millisecond): // a broken connection precedes the end
		return fmt.Errorf("executor %d: %s: %w", e.gen, what, err)
	}
	return fmt.Errorf("executor %d: %s: it has ended: %s", e.gen, what, e.proc.Exit())
}

// saidError is what an executor said, in its words alone.
type saidError struct{ err *connect.Error }

func (e *saidError) Error() string { return e.err.Message() }
func (e *saidError) Unwrap() error { return e.err }

// bound returns a context that ends with the timeout or the executor.
func (e *executor) bound(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, d)
	go func() {
		select {
		case <-e.proc.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// ready waits until the executor serves, or has ended, and describes it.
func (e *executor) ready(ctx context.Context) (*gpuctlv1.DescribeResponse, error) {
	ctx, cancel := e.bound(ctx, startTimeout)
	defer cancel()
	for {
		resp, err := e.api.Describe(ctx, connect.NewRequest(&gpuctlv1.DescribeRequest{}))
		if err == nil {
			return resp.Msg, nil
		}
		if connect.CodeOf(err) != connect.CodeUnavailable {
			return nil, e.wrap("start", err)
		}
		select {
		case <-ctx.Done():
			return nil, e.wrap("start", err)
		case <-time.After(readyPoll):
		}
	}
}

func (e *executor) describe(ctx context.Context) (*gpuctlv1.DescribeResponse, error) {
	return e.describeWithin(ctx, describeTimeout)
}

// describeWithin is describe of an executor that may be busy: some runtimes
// answer nothing while a kernel runs.
func (e *executor) describeWithin(ctx context.Context, patience time.Duration) (*gpuctlv1.DescribeResponse, error) {
	ctx, cancel := e.bound(ctx, patience)
	defer cancel()
	resp, err := e.api.Describe(ctx, connect.NewRequest(&gpuctlv1.DescribeRequest{}))
	if err != nil {
		return nil, e.wrap("describe", err)
	}
	return resp.Msg, nil
}

func (e *executor) snapshot(ctx context.Context) (*gpuctlv1.SnapshotResponse, error) {
	ctx, cancel := e.bound(ctx, quickTimeout)
	defer cancel()
	resp, err := e.api.Snapshot(ctx, connect.NewRequest(&gpuctlv1.SnapshotRequest{}))
	if err != nil {
		return nil, e.wrap("snapshot", err)
	}
	return resp.Msg, nil
}

// errNotFrozen says that an executor has refused to freeze and goes on. After
// any other error nobody knows.
var errNotFrozen = errors.New("not frozen")

// freeze returns the graph of the frozen session; blockers are an error.
func (e *executor) freeze(ctx context.Context, timeout time.Duration) (*gpuctlv1.SnapshotResponse, error) {
	ctx, cancel := e.bound(ctx, timeout+quickTimeout)
	defer cancel()
	resp, err := e.api.Freeze(ctx, connect.NewRequest(&gpuctlv1.FreezeRequest{TimeoutMs: timeout.Milliseconds()}))
	if connect.CodeOf(err) == connect.CodeFailedPrecondition {
		return nil, fmt.Errorf("%w: %w", errNotFrozen, e.wrap("freeze", err))
	}
	if err != nil {
		return nil, e.wrap("freeze", err)
	}
	if b := resp.Msg.Blockers; len(b) > 0 {
		return nil, fmt.Errorf("the device did not drain within %v because of: %s", timeout, joinWords(b))
	}
	return resp.Msg, nil
}

// thaw lets a frozen executor go on; one that is not frozen is left alone.
func (e *executor) thaw(ctx context.Context) error {
	ctx, cancel := e.bound(ctx, quickTimeout)
	defer cancel()
	_, err := e.api.Thaw(ctx, connect.NewRequest(&gpuctlv1.ThawRequest{}))
	if err == nil {
		return nil
	}
	if d, derr := e.describe(ctx); derr == nil && !d.Frozen {
		return nil
	}
	return e.wrap("thaw", err)
}

func (e *executor) activate(ctx context.Context) error {
	ctx, cancel := e.bound(ctx, quickTimeout)
	defer cancel()
	_, err := e.api.Activate(ctx, connect.NewRequest(&gpuctlv1.ActivateRequest{}))
	return e.wrap("activate", err)
}

// kill ends the executor at once and waits until it is gone.
func (e *executor) kill() {
	e.proc.Kill()
	select {
	case <-e.proc.Done():
	case <-time.After(retireTimeout): // a driver may hold a dying process
	}
	e.http.CloseIdleConnections()
}

// retire asks the executor to end and kills it if it does not.
func (e *executor) retire(ctx context.Context) error {
	ctx, cancel := e.bound(ctx, retireTimeout)
	defer cancel()
	_, err := e.api.Retire(ctx, connect.NewRequest(&gpuctlv1.RetireRequest{}))
	if err == nil {
		select {
		case <-e.proc.Done():
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	gone := e.dead()
	e.kill()
	if err != nil && !gone {
		return e.wrap("retire", err)
	}
	return nil
}

// long is a call that may take any time as long as it goes on.
type long struct {
	e      *executor
	what   string
	ctx    context.Context // ends with a stall, or with the executor
	cancel context.CancelCauseFunc
	timer  *time.Timer
	stall  time.Duration
}

func (e *executor) long(ctx context.Context, what string, stall time.Duration) *long {
	l := &long{e: e, what: what, stall: stall}
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	l.timer = time.AfterFunc(stall, func() { l.cancel(fmt.Errorf("no progress for %v", stall)) })
	go func() {
		select {
		case <-e.proc.Done():
			l.cancel(errors.New("executor has ended"))
		case <-l.ctx.Done():
		}
	}()
	return l
}

func (l *long) goesOn() { l.timer.Reset(l.stall) }

func (l *long) end() {
	l.timer.Stop()
	l.cancel(nil)
}

func (l *long) fail(err error) error {
	if cause := context.Cause(l.ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}
	return l.e.wrap(l.what, err)
}

// stream runs one long call and hands on its progress. A stall ends it.
func (e *executor) stream(ctx context.Context, what string, stall time.Duration,
	call func(context.Context) (*connect.ServerStreamForClient[gpuctlv1.Progress], error),
	sink func(*gpuctlv1.Progress),
) error {
	l := e.long(ctx, what, stall)
	defer l.end()
	st, err := call(l.ctx)
	if err != nil {
		return l.fail(err)
	}
	defer st.Close()
	var last *gpuctlv1.Progress
	for st.Receive() {
		l.goesOn()
		last = st.Msg()
		sink(last)
	}
	if err := st.Err(); err != nil {
		return l.fail(err)
	}
	if r := last.GetResult(); r != nil {
		if len(r.Reasons) > 0 || r.Refused {
			return &refusedError{reasons: r.Reasons}
		}
		if r.Error != "" {
			return e.wrap(what, errors.New(r.Error))
		}
	}
	return nil
}

// prepare makes the session's objects. An executor that can't, while the
// application runs, refuses the session.
func (e *executor) prepare(ctx context.Context, req *gpuctlv1.PrepareRequest, sink func(*gpuctlv1.Progress)) error {
	stall := buildTimeout
	if req.Final {
		stall = stallTimeout
	}
	err := e.stream(ctx, "prepare", stall, func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.Progress], error) {
		return e.api.Prepare(ctx, connect.NewRequest(req))
	}, sink)
	var ce *connect.Error
	if !req.Final && errors.As(err, &ce) && ce.Code() == connect.CodeFailedPrecondition {
		return &refusedError{reasons: reasonsIn(ce)}
	}
	return err
}

// reasonsIn are the reasons that an executor's refusal carries, or is.
func reasonsIn(ce *connect.Error) []*gpuctlv1.Reason {
	var rs []*gpuctlv1.Reason
	for _, d := range ce.Details() {
		if m, err := d.Value(); err == nil {
			if r, ok := m.(*gpuctlv1.Reason); ok {
				rs = append(rs, r)
			}
		}
	}
	if len(rs) == 0 {
		rs = append(rs, &gpuctlv1.Reason{Code: "objects", Message: ce.Message()})
	}
	return rs
}

// export returns how many bytes were sent.
func (e *executor) export(ctx context.Context, req *gpuctlv1.ExportRequest, sink func(*gpuctlv1.Progress)) (uint64, error) {
	var n uint64
	err := e.stream(ctx, "export", stallTimeout, func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.Progress], error) {
		return e.api.Export(ctx, connect.NewRequest(req))
	}, func(p *gpuctlv1.Progress) {
		n = max(n, p.BytesDone)
		sink(p)
	})
	return n, err
}

func (e *executor) load(ctx context.Context, req *gpuctlv1.LoadRequest, sink func(*gpuctlv1.Progress)) error {
	return e.stream(ctx, "load", stallTimeout, func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.Progress], error) {
		return e.api.Load(ctx, connect.NewRequest(req))
	}, sink)
}

// send has the executor stream its contents. An error of take ends it, and is
// returned as it is.
func (e *executor) send(ctx context.Context, take func(*gpuctlv1.StateChunk) error) error {
	l := e.long(ctx, "send", stallTimeout)
	defer l.end()
	st, err := e.api.Send(l.ctx, connect.NewRequest(&gpuctlv1.SendRequest{}))
	if err != nil {
		return l.fail(err)
	}
	defer func() { l.cancel(nil); _ = st.Close() }() // unread chunks must not be waited for
	for st.Receive() {
		l.goesOn()
		if err := take(st.Msg()); err != nil {
			return err
		}
	}
	if err := st.Err(); err != nil {
		return l.fail(err)
	}
	return nil
}

// receive has the executor load the chunks that give returns, the last of which
// has a mark.
func (e *executor) receive(ctx context.Context, give func() (*gpuctlv1.StateChunk, error)) error {
	l := e.long(ctx, "receive", stallTimeout)
	defer l.end()
	st := e.api.Receive(l.ctx)
	for end := false; !end; {
		chunk, err := give()
		if err != nil {
			l.cancel(nil) // not its end: what came is not all
			_, _ = st.CloseAndReceive()
			return err
		}
		l.goesOn()
		end = chunk.GetMark() != nil
		if st.Send(chunk) != nil {
			break // the answer says why
		}
	}
	if _, err := st.CloseAndReceive(); err != nil {
		return l.fail(err)
	}
	return nil
}

// refusedError carries the reasons why a target can't serve.
type refusedError struct{ reasons []*gpuctlv1.Reason }

func (e *refusedError) Error() string {
	var words []string
	for _, r := range e.reasons {
		words = append(words, r.Message)
	}
	if len(words) == 0 {
		return "refused by the target"
	}
	return joinWords(words)
}
