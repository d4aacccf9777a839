package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/internal/excerpt"
)

// Time limits that no healthy executor reaches. A driver that does not answer must not
// block an application that is frozen because of it.
const (
	startTimeout    = 3 * time.Minute // until an executor serves; a slow VM compiles first
	describeTimeout = 2 * time.Second
	discardTimeout  = time.Second
	quickTimeout    = 30 * time.Second // calls that touch the device but move no data
	stallTimeout    = 2 * time.Minute  // without progress of an executor that lives, while the application is frozen
	buildTimeout    = 10 * time.Minute // the same, while the application runs
	silentTimeout   = 30 * time.Second // for an executor in a long call; it lives if it sends a pulse every second
	pulseEvery      = time.Second
	longWait        = 2 * time.Second // from then on the wait is reported to those who watch
	retireTimeout   = 5 * time.Second
	readyPoll       = time.Millisecond // at first
)

// executor is a running executor as the manager sees it.
type executor struct {
	gen          uint32
	target       *gpuctlv1.Target
	importSocket string
	proc         Process
	fileSocket   string
	turnSocket   string
	api          gpuctlv1connect.ExecutorServiceClient
	graphs       gpuctlv1connect.ExecutorServiceClient // for answers with an object graph
	http         *http.Client
	silent       time.Duration // silentTimeout
}

// Limits of an executor's answers. Code that the application ran may have taken over the
// executor's runtime.
const (
	maxAnswerHeader = 64 << 10
	maxMessage      = 256 << 10 // the largest is a chunk of a state
	maxGraph        = 64 << 20  // a session's objects, with the sources of its programs
	maxUsage        = 4 << 10
	maxSaid         = 4 << 10 // of an error's text
)

func newExecutor(gen uint32, target *gpuctlv1.Target, proc Process, socket, importSocket string) *executor {
	e := &executor{gen: gen, target: target, importSocket: importSocket, proc: proc, silent: silentTimeout}
	e.fileSocket, e.turnSocket = fileSocket(socket, gen), turnSocket(socket, gen)
	e.http = &http.Client{Transport: &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return e.dial(ctx, socket) },
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxAnswerHeader,
	}}
	client := func(most int) gpuctlv1connect.ExecutorServiceClient {
		// An executor's streams end in this process, so they are not compressed.
		return gpuctlv1connect.NewExecutorServiceClient(e.http, "http://executor",
			connect.WithAcceptCompression("gzip", nil, nil), connect.WithReadMaxBytes(most))
	}
	e.api, e.graphs = client(maxMessage), client(maxGraph)
	return e
}

// fileSocket returns the socket for files, in the folder of the socket of the same
// generation.
func fileSocket(socket string, gen uint32) string {
	return filepath.Join(filepath.Dir(socket), fmt.Sprintf("f%d", gen))
}

// dial connects to a socket in the executor's folder. The executor chooses what is in that
// folder: a link could lead to another process's socket. So the peer is checked.
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

// give passes an open file to the executor, for requests that name it.
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
	return executorRecord{Generation: e.gen, PID: e.proc.PID(), Start: e.proc.Start(), Target: marshal(withoutSecrets(e.target))}
}

// withoutSecrets returns a target as it may be kept and shown: a running carrier has its
// token and its key.
func withoutSecrets(t *gpuctlv1.Target) *gpuctlv1.Target {
	if t.GetRuntime().GetRemote() == nil {
		return t
	}
	t = proto.CloneOf(t)
	r := t.Runtime.Remote
	r.Token, r.PrivateKey, r.Fetch = nil, nil, ""
	return t
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
	case <-time.After(50 * time.Millisecond): // the connection breaks before the end of the process is seen
		return fmt.Errorf("executor %d: %s: %w", e.gen, what, err)
	}
	return fmt.Errorf("executor %d: %s: it has ended: %s", e.gen, what, e.proc.Exit())
}

// saidError is an error that an executor returned; its text is only the executor's message.
type saidError struct{ err *connect.Error }

func (e *saidError) Error() string { return excerpt.Of(e.err.Message(), maxSaid) }

func (e *saidError) Unwrap() error { return e.err }

// bound returns a context that ends with the timeout, or when the executor ends.
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

// ready waits until the executor serves, and describes it. It also returns when the
// executor has ended.
func (e *executor) ready(ctx context.Context) (*gpuctlv1.DescribeResponse, error) {
	ctx, cancel := e.bound(ctx, startTimeout)
	defer cancel()
	for began := time.Now(); ; {
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
		case <-time.After(max(readyPoll, time.Since(began)/16)): // a slow machine has better things to do
		}
	}
}

func (e *executor) describe(ctx context.Context) (*gpuctlv1.DescribeResponse, error) {
	return e.describeWithin(ctx, describeTimeout)
}

// describeWithin is describe for an executor that may be busy: some runtimes do not answer
// while a kernel runs.
func (e *executor) describeWithin(ctx context.Context, patience time.Duration) (*gpuctlv1.DescribeResponse, error) {
	ctx, cancel := e.bound(ctx, patience)
	defer cancel()
	resp, err := e.api.Describe(ctx, connect.NewRequest(&gpuctlv1.DescribeRequest{}))
	if err != nil {
		return nil, e.wrap("describe", err)
	}
	return e.description(resp.Msg)
}

// describeBusy is describeWithin for an operation. An error says what the executor waits for.
func (e *executor) describeBusy(ctx context.Context, patience time.Duration, to listener) (*gpuctlv1.DescribeResponse, error) {
	l := e.long(ctx, "describe", patience, to.waits)
	defer l.end()
	resp, err := e.api.Describe(l.ctx, connect.NewRequest(&gpuctlv1.DescribeRequest{}))
	if err == nil {
		return e.description(resp.Msg)
	}
	err = l.fail(err)
	if stall := (*stallError)(nil); errors.As(err, &stall) && !stall.hangs {
		err = fmt.Errorf("%w: its application keeps it busy; repeat this later, or with a longer --freeze-timeout", err)
	}
	return nil, err
}

// description checks what an executor reports about itself, because its usage is stored and
// passed on.
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

// errNotFrozen means that an executor has refused to freeze, and continues to run. After
// any other error, it is unknown whether it is frozen.
var errNotFrozen = errors.New("not frozen")

// freeze returns the graph of the frozen session. If commands block the freeze, it returns
// an error. number is which freeze it is: one that comes after its thaw is refused.
func (e *executor) freeze(ctx context.Context, number uint64, timeout time.Duration, to listener) (*gpuctlv1.SnapshotResponse, error) {
	l := e.long(ctx, "freeze", timeout+quickTimeout, to.waits)
	defer l.end()
	resp, err := e.graphs.Freeze(l.ctx, connect.NewRequest(&gpuctlv1.FreezeRequest{TimeoutMs: timeout.Milliseconds(), Freeze: number}))
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

// thaw lets a frozen executor continue; it does nothing if the executor is not frozen. The
// number of the freeze keeps a late request from undoing a later freeze.
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

// discard makes an executor that is not frozen give back what an export has used. It does
// not wait for an executor that is slow: if its export was given up, it empties the state
// memory itself.
func (e *executor) discard(ctx context.Context) error {
	ctx, cancel := e.bound(ctx, discardTimeout)
	defer cancel()
	_, err := e.api.Discard(ctx, connect.NewRequest(&gpuctlv1.DiscardRequest{}))
	return e.wrap("discard", err)
}

func (e *executor) activate(ctx context.Context) error {
	ctx, cancel := e.bound(ctx, quickTimeout)
	defer cancel()
	_, err := e.api.Activate(ctx, connect.NewRequest(&gpuctlv1.ActivateRequest{}))
	return e.wrap("activate", err)
}

// kill ends the executor with SIGKILL and waits until it has ended.
func (e *executor) kill() {
	e.proc.Kill()
	select {
	case <-e.proc.Done():
	case <-time.After(retireTimeout): // a driver may delay the end of the process
	}
	e.http.CloseIdleConnections()
}

// retire asks the executor to end, and kills it if it does not.
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

// long is a call without a limit for its whole duration. It is cancelled if it makes no
// progress for the time still, or if there is neither progress nor a pulse for e.silent.
type long struct {
	e      *executor
	what   string
	ctx    context.Context // ends with a stall, or with the executor
	cancel context.CancelCauseFunc
	still  time.Duration
	stall  *time.Timer   // fires without progress
	silent *time.Timer   // fires without progress and without a pulse
	over   chan struct{} // closed when nobody reads the pulse any more

	mu    sync.Mutex
	waits string // what it waits for, as the executor said last
}

// long begins such a call. waits is called with what the executor waits for, and again when
// that changes or continues.
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
		select { // most calls for which an application stands still are over before
		case <-l.ctx.Done():
		case <-time.After(min(pulseEvery, e.silent/4, still/4)):
			l.listen(waits)
		}
	}()
	return l
}

// listen reads the executor's pulse. An executor of an earlier version has no pulse, so for
// it the timer for silence is stopped.
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
		text, lasts := excerpt.Of(st.Msg().GetWaitsFor(), maxSaid), time.Duration(st.Msg().GetForNs())
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

// stallError means that an executor has made no progress for the given time.
type stallError struct {
	after time.Duration
	waits string
	hangs bool // it sends no pulse either
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

// stream runs one long call and reports its progress. A stall ends the call.
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
		last.Message = excerpt.Of(last.Message, maxSaid)
		to.progress(last)
	}
	if err := st.Err(); err != nil {
		return l.fail(err)
	}
	if r := last.GetResult(); r != nil {
		if len(r.Reasons) > 0 || r.Refused {
			return &engine.RefusedError{Reasons: r.Reasons}
		}
		if r.Error != "" {
			return e.wrap(what, errors.New(r.Error))
		}
	}
	return nil
}

// prepare makes the session's objects. If an executor can't make them while the application
// runs, it refuses the session.
func (e *executor) prepare(ctx context.Context, req *gpuctlv1.PrepareRequest, to listener) error {
	err := e.stream(ctx, "prepare", to.patience(req.Final), func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.Progress], error) {
		return e.api.Prepare(ctx, connect.NewRequest(req))
	}, to)
	var ce *connect.Error
	if !req.Final && errors.As(err, &ce) && ce.Code() == connect.CodeFailedPrecondition {
		return &engine.RefusedError{Reasons: reasonsIn(ce)}
	}
	return err
}

// reasonsIn returns the reasons in an executor's refusal. If it contains none, its message
// is the reason.
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
		rs = append(rs, &gpuctlv1.Reason{Code: "objects", Message: excerpt.Of(ce.Message(), maxSaid)})
	}
	return rs
}

// export returns how many bytes were sent.
func (e *executor) export(ctx context.Context, req *gpuctlv1.ExportRequest, to listener) (sent, error) {
	count := &counter{listener: to}
	err := e.stream(ctx, "export", to.patience(req.Final), func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.Progress], error) {
		return e.api.Export(ctx, connect.NewRequest(req))
	}, count)
	return count.sent, err
}

// endFetch ends what a target fetches from another host. Without an error, nothing that came
// this way is written any more.
func (e *executor) endFetch(ctx context.Context) error {
	ctx, cancel := e.bound(ctx, quickTimeout)
	defer cancel()
	_, err := e.api.EndFetch(ctx, connect.NewRequest(&gpuctlv1.EndFetchRequest{}))
	return e.wrap("end the fetch", err)
}

func (e *executor) load(ctx context.Context, req *gpuctlv1.LoadRequest, to listener) error {
	return e.stream(ctx, "load", to.patience(true), func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.Progress], error) {
		return e.api.Load(ctx, connect.NewRequest(req))
	}, to)
}

// listener is notified about a long call, and sets its time limit.
type listener interface {
	progress(p *gpuctlv1.Progress)
	// waits is called with what the executor waits for. It may run concurrently with
	// progress.
	waits(text string)
	// patience returns how long an executor that lives may make no progress.
	patience(frozen bool) time.Duration
}

// sent is how many bytes an export has sent, and how many of them straight to another host.
type sent struct{ bytes, straight uint64 }

// counter is a listener that records how many bytes were done.
type counter struct {
	listener
	sent
}

func (c *counter) progress(p *gpuctlv1.Progress) {
	c.bytes, c.straight = max(c.bytes, p.BytesDone), max(c.straight, min(p.BytesStraight, p.BytesDone))
	c.listener.progress(p)
}

// send makes the executor stream its contents. If take returns an error, the stream ends,
// and that error is returned unchanged.
func (e *executor) send(ctx context.Context, to listener, take func(*gpuctlv1.StateChunk) error) error {
	l := e.long(ctx, "send", to.patience(true), to.waits)
	defer l.end()
	st, err := e.api.Send(l.ctx, connect.NewRequest(&gpuctlv1.SendRequest{}))
	if err != nil {
		return l.fail(err)
	}
	defer func() { l.cancel(nil); _ = st.Close() }() // do not wait for unread chunks
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

// receive makes the executor load the chunks that give returns. The last of them has a
// mark.
func (e *executor) receive(ctx context.Context, to listener, give func() (*gpuctlv1.StateChunk, error)) error {
	l := e.long(ctx, "receive", to.patience(true), to.waits)
	defer l.end()
	st := e.api.Receive(l.ctx)
	for end := false; !end; {
		chunk, err := give()
		if err != nil {
			l.cancel(nil) // not a normal end: the chunks are incomplete
			_, _ = st.CloseAndReceive()
			return err
		}
		l.goesOn()
		end = chunk.GetMark() != nil
		if st.Send(chunk) != nil {
			break // the executor's answer has the reason
		}
	}
	if _, err := st.CloseAndReceive(); err != nil {
		return l.fail(err)
	}
	return nil
}
