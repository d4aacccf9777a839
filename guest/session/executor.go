package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/handover"
)

// Times that nothing healthy needs. A hanging driver must not hang an
// application that stands still because of it.
const (
	startTimeout    = 3 * time.Minute // until an executor serves; a slow VM compiles first
	describeTimeout = 2 * time.Second
	quickTimeout    = 30 * time.Second // calls that touch the device but move no data
	stallTimeout    = 2 * time.Minute  // without progress of an executor that lives, application standing still
	buildTimeout    = 10 * time.Minute // the same, application running
	silentTimeout   = 30 * time.Second // of an executor in a long call, which lives if it can say so every second
	pulseEvery      = time.Second
	longWait        = 2 * time.Second // is told to who watches
	retireTimeout   = 5 * time.Second
	readyPoll       = time.Millisecond
)

// executor is a running executor as the manager sees it.
type executor struct {
	gen          uint32
	target       *gpuctlv1.Target
	importSocket string
	proc         Process
	fileSocket   string
	api          gpuctlv1connect.ExecutorServiceClient
	graphs       gpuctlv1connect.ExecutorServiceClient // for answers that hold one
	http         *http.Client
	silent       time.Duration // silentTimeout
}

// What an executor may answer. Its runtime may have been taken over by what the
// application made it run.
const (
	maxAnswerHeader = 64 << 10
	maxMessage      = 256 << 10 // a chunk of a state is the largest
	maxGraph        = 64 << 20  // a session's objects, with the sources of its programs
	maxUsage        = 4 << 10
	maxSaid         = 4 << 10 // of an error's text
)

func newExecutor(gen uint32, target *gpuctlv1.Target, proc Process, socket, importSocket string) *executor {
	e := &executor{gen: gen, target: target, importSocket: importSocket, proc: proc, silent: silentTimeout}
	e.fileSocket = fileSocket(socket, gen)
	e.http = &http.Client{Transport: &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return e.dial(ctx, socket) },
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxAnswerHeader,
	}}
	client := func(most int) gpuctlv1connect.ExecutorServiceClient {
		// What an executor streams goes no further than this process.
		return gpuctlv1connect.NewExecutorServiceClient(e.http, "http://executor",
			connect.WithAcceptCompression("gzip", nil, nil), connect.WithReadMaxBytes(most))
	}
	e.api, e.graphs = client(maxMessage), client(maxGraph)
	return e
}

// fileSocket is beside the socket of the same generation.
func fileSocket(socket string, gen uint32) string {
	return filepath.Join(filepath.Dir(socket), fmt.Sprintf("f%d", gen))
}

// dial connects to a socket of the executor's folder. What is there is the
// executor's to choose: a link would lead to somebody else's socket.
func (e *executor) dial(ctx context.Context, socket string) (*net.UnixConn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("socket %s: it is a %s", socket, c.LocalAddr().Network())
	}
	cred, err := handover.Peer(conn)
	if err == nil && !e.proc.Owns(cred) {
		err = fmt.Errorf("socket %s: process %d serves it, which is not executor %d", socket, cred.Pid, e.gen)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// give hands an open file over, for requests that name it.
func (e *executor) give(ctx context.Context, name string, f *os.File) error {
	ctx, cancel := e.bound(ctx, quickTimeout)
	defer cancel()
	conn, err := e.dial(ctx, e.fileSocket)
	if err != nil {
		return e.wrap("hand over", err)
	}
	return e.wrap("hand over", handover.Give(ctx, conn, name, f))
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

func (e *saidError) Error() string { return shorten(e.err.Message()) }

// shorten keeps what an executor said short enough to be told on.
func shorten(text string) string {
	if len(text) > maxSaid {
		text = strings.ToValidUTF8(text[:maxSaid], "") + " …"
	}
	return text
}
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
			return e.description(resp.Msg)
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
	return e.description(resp.Msg)
}

// description checks what an executor says of itself: its usage is kept, and
// told on.
func (e *executor) description(d *gpuctlv1.DescribeResponse) (*gpuctlv1.DescribeResponse, error) {
	if n := proto.Size(d.Usage); n > maxUsage {
		return nil, e.wrap("describe", fmt.Errorf("its usage has %d bytes, and at most %d are allowed", n, maxUsage))
	}
	return d, nil
}

func (e *executor) snapshot(ctx context.Context) (*gpuctlv1.SnapshotResponse, error) {
	ctx, cancel := e.bound(ctx, quickTimeout)
	defer cancel()
	resp, err := e.graphs.Snapshot(ctx, connect.NewRequest(&gpuctlv1.SnapshotRequest{}))
	if err != nil {
		return nil, e.wrap("snapshot", err)
	}
	return resp.Msg, nil
}

// errNotFrozen says that an executor has refused to freeze and goes on. After
// any other error nobody knows.
var errNotFrozen = errors.New("not frozen")

// freeze returns the graph of the frozen session; blockers are an error.
func (e *executor) freeze(ctx context.Context, timeout time.Duration, to listener) (*gpuctlv1.SnapshotResponse, error) {
	l := e.long(ctx, "freeze", timeout+quickTimeout, to.waits)
	defer l.end()
	resp, err := e.graphs.Freeze(l.ctx, connect.NewRequest(&gpuctlv1.FreezeRequest{TimeoutMs: timeout.Milliseconds()}))
	if connect.CodeOf(err) == connect.CodeFailedPrecondition {
		return nil, fmt.Errorf("%w: %w", errNotFrozen, e.wrap("freeze", err))
	}
	if err != nil {
		return nil, l.fail(err)
	}
	if b := resp.Msg.Blockers; len(b) > 0 {
		return nil, fmt.Errorf("the device did not drain within %v because of: %s", timeout, joinWords(b))
	}
	return resp.Msg, nil
}

// thaw lets a frozen executor go on; one that is not frozen is left alone. The
// number of the freeze keeps a request that comes late from undoing another one.
func (e *executor) thaw(ctx context.Context, freeze uint64) error {
	ctx, cancel := e.bound(ctx, quickTimeout)
	defer cancel()
	_, err := e.api.Thaw(ctx, connect.NewRequest(&gpuctlv1.ThawRequest{Freeze: freeze}))
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

// long is a call that may take any time as long as it goes on, or the executor
// says that it lives and there is patience with what it waits for.
type long struct {
	e      *executor
	what   string
	ctx    context.Context // ends with a stall, or with the executor
	cancel context.CancelCauseFunc
	still  time.Duration
	stall  *time.Timer   // no progress
	silent *time.Timer   // not a word either
	over   chan struct{} // closed when nobody listens to the pulse any more

	mu    sync.Mutex
	waits string // for what, as the executor said last
}

// long begins one. waits hears what the executor waits for, and again when that
// changes or lasts.
func (e *executor) long(ctx context.Context, what string, still time.Duration, waits func(string)) *long {
	l := &long{e: e, what: what, still: still, over: make(chan struct{})}
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	l.stall = time.AfterFunc(still, func() { l.cancel(&stallError{after: still, waits: l.waitsFor()}) })
	l.silent = time.AfterFunc(e.silent, func() { l.cancel(&stallError{after: e.silent, hangs: true}) })
	go func() {
		select {
		case <-e.proc.Done():
			l.cancel(errors.New("executor has ended"))
		case <-l.ctx.Done():
		}
	}()
	go func() {
		defer close(l.over)
		l.listen(waits)
	}()
	return l
}

// listen follows the executor's pulse. One that has none, as it is of an earlier
// version, may be silent.
func (l *long) listen(waits func(string)) {
	for l.ctx.Err() == nil {
		err := l.pulse(waits)
		if connect.CodeOf(err) == connect.CodeUnimplemented {
			l.silent.Stop()
			return
		}
		select {
		case <-l.ctx.Done():
		case <-time.After(pulseEvery):
		}
	}
}

func (l *long) pulse(waits func(string)) error {
	st, err := l.e.api.Pulse(l.ctx, connect.NewRequest(&gpuctlv1.PulseRequest{EveryMs: uint32(pulseEvery.Milliseconds())}))
	if err != nil {
		return err
	}
	defer st.Close()
	for st.Receive() {
		l.silent.Reset(l.e.silent)
		text, lasts := shorten(st.Msg().GetWaitsFor()), time.Duration(st.Msg().GetForNs())
		if text != "" {
			text += ", for " + lasts.Round(time.Second).String()
		}
		l.mu.Lock()
		l.waits = text
		l.mu.Unlock()
		if text != "" && lasts >= longWait {
			waits(fmt.Sprintf("executor %d waits: %s", l.e.gen, text))
		}
	}
	return st.Err()
}

func (l *long) waitsFor() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waits
}

// stallError says that an executor has not gone on for so long.
type stallError struct {
	after time.Duration
	waits string
	hangs bool // nobody in it answers
}

func (e *stallError) Error() string {
	switch {
	case e.hangs:
		return fmt.Sprintf("it does not answer: nothing was heard of it for %v", e.after)
	case e.waits != "":
		return fmt.Sprintf("no progress for %v: it waits: %s", e.after, e.waits)
	}
	return fmt.Sprintf("no progress for %v", e.after)
}

func (l *long) goesOn() {
	l.stall.Reset(l.still)
	l.silent.Reset(l.e.silent)
}

func (l *long) end() {
	l.stall.Stop()
	l.silent.Stop()
	l.cancel(nil)
	<-l.over
}

func (l *long) fail(err error) error {
	if cause := context.Cause(l.ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}
	return l.e.wrap(l.what, err)
}

// stream runs one long call and hands on its progress. A stall ends it.
func (e *executor) stream(ctx context.Context, what string, still time.Duration,
	call func(context.Context) (*connect.ServerStreamForClient[gpuctlv1.Progress], error), to listener,
) error {
	l := e.long(ctx, what, still, to.waits)
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
		last.Message = shorten(last.Message)
		to.progress(last)
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
func (e *executor) prepare(ctx context.Context, req *gpuctlv1.PrepareRequest, to listener) error {
	err := e.stream(ctx, "prepare", to.patience(req.Final), func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.Progress], error) {
		return e.api.Prepare(ctx, connect.NewRequest(req))
	}, to)
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
		rs = append(rs, &gpuctlv1.Reason{Code: "objects", Message: shorten(ce.Message())})
	}
	return rs
}

// export returns how many bytes were sent.
func (e *executor) export(ctx context.Context, req *gpuctlv1.ExportRequest, to listener) (uint64, error) {
	count := &counter{listener: to}
	err := e.stream(ctx, "export", to.patience(req.Final), func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.Progress], error) {
		return e.api.Export(ctx, connect.NewRequest(req))
	}, count)
	return count.bytes, err
}

func (e *executor) load(ctx context.Context, req *gpuctlv1.LoadRequest, to listener) error {
	return e.stream(ctx, "load", to.patience(true), func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.Progress], error) {
		return e.api.Load(ctx, connect.NewRequest(req))
	}, to)
}

// listener hears of a long call, and says how long it may take.
type listener interface {
	progress(p *gpuctlv1.Progress)
	// waits says what the executor waits for. It may be called beside progress.
	waits(text string)
	// patience is how long an executor that lives may make no progress.
	patience(frozen bool) time.Duration
}

// counter is a listener that keeps how many bytes were done.
type counter struct {
	listener
	bytes uint64
}

func (c *counter) progress(p *gpuctlv1.Progress) {
	c.bytes = max(c.bytes, p.BytesDone)
	c.listener.progress(p)
}

// send has the executor stream its contents. An error of take ends it, and is
// returned as it is.
func (e *executor) send(ctx context.Context, to listener, take func(*gpuctlv1.StateChunk) error) error {
	l := e.long(ctx, "send", to.patience(true), to.waits)
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
func (e *executor) receive(ctx context.Context, to listener, give func() (*gpuctlv1.StateChunk, error)) error {
	l := e.long(ctx, "receive", to.patience(true), to.waits)
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
