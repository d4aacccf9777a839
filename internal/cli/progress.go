package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/size"
)

// updateView is one line of -o json: the running step or, at the end, the result.
type updateView struct {
	Session    string          `json:"session"`
	GPUs       []string        `json:"gpus"`
	Model      string          `json:"model,omitempty"`
	Step       string          `json:"step,omitempty"`
	StepIndex  uint32          `json:"step_index"` // from 0
	Steps      uint32          `json:"steps,omitempty"`
	BytesDone  uint64          `json:"bytes_done"`
	BytesTotal uint64          `json:"bytes_total"`
	Message    string          `json:"message,omitempty"`
	Result     *resultView     `json:"result,omitempty"`
	Rejected   []candidateView `json:"rejected,omitempty"`
}

type resultView struct {
	StoppedNs      int64        `json:"stopped_ns"`
	TotalNs        int64        `json:"total_ns"`
	BytesPrecopied uint64       `json:"bytes_precopied"`
	BytesFrozen    uint64       `json:"bytes_frozen"`
	Steps          []stepView   `json:"steps"`
	Refused        bool         `json:"refused"`
	RolledBack     bool         `json:"rolled_back"`
	Held           bool         `json:"held"`  // it has failed and is not undone yet
	Ended          bool         `json:"ended"` // the application has ended
	Error          string       `json:"error,omitempty"`
	Rehearsed      bool         `json:"rehearsed"`
	BytesStraight  uint64       `json:"bytes_straight,omitempty"` // of the bytes copied: between two remote GPUs, not through this host
	Detour         string       `json:"detour,omitempty"`         // why not
	Session        *sessionView `json:"session,omitempty"`
}

type stepView struct {
	Step       string `json:"step"`
	StartNs    int64  `json:"start_ns"`
	DurationNs int64  `json:"duration_ns"`
}

func viewResult(r *gpuctlv1.SwapResult) resultView {
	v := resultView{
		StoppedNs: r.GetStoppedNs(), TotalNs: r.GetTotalNs(), BytesPrecopied: r.GetBytesPrecopied(), BytesFrozen: r.GetBytesFrozen(),
		Steps: []stepView{}, Refused: r.GetRefused(), RolledBack: r.GetRolledBack(), Held: r.GetHeld(), Ended: r.GetEnded(), Error: r.GetError(),
		Rehearsed: r.GetRehearsed(), BytesStraight: r.GetBytesStraight(), Detour: r.GetDetour(),
	}
	for _, s := range r.GetSteps() {
		v.Steps = append(v.Steps, stepView{s.GetStep(), s.GetStartNs(), s.GetDurationNs()})
	}
	if s := r.GetSession(); s != nil {
		v.Session = new(viewSession(s))
	}
	return v
}

// summary returns the result of an operation in one line.
func summary(r *gpuctlv1.SwapResult) string {
	switch {
	case r.GetRefused():
		return "refused, nothing was touched"
	case r.GetRolledBack():
		return "rolled back: " + r.GetError()
	case r.GetHeld():
		return "held: " + r.GetError()
	case r.GetEnded():
		return r.GetError()
	case r.GetError() != "":
		return "failed: " + r.GetError()
	}
	text := "downtime " + duration(r.GetStoppedNs())
	if r.GetStoppedNs() == 0 { // a resume: the application was frozen before it began
		text = "took " + duration(r.GetTotalNs())
	}
	if copied := r.GetBytesPrecopied() + r.GetBytesFrozen(); copied > 0 {
		text += fmt.Sprintf(", copied %s (%s before the stop)", size.Format(copied), size.Format(r.GetBytesPrecopied()))
	}
	if n := r.GetBytesStraight(); n > 0 {
		text += fmt.Sprintf(", %s straight between the two hosts", size.Format(n))
	}
	if why := r.GetDetour(); why != "" {
		text += ", through this host: " + why
	}
	return text
}

// opens is a call whose stream says how far an operation of a session is.
type opens[Req any] func(context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[gpuctlv1.OperationUpdate], error)

// follow begins an operation, and shows it until it ends.
func follow[Req any](ctx context.Context, a *app, what string, begin opens[Req], req *Req) error {
	return followTo(ctx, a, what, "no GPU can serve it; it goes on as it was", "it goes on as it was", begin, req)
}

// followTo does the same. refused and rolledBack say how the session is then.
func followTo[Req any](ctx context.Context, a *app, what, refused, rolledBack string, begin opens[Req], req *Req) error {
	ctx, stop := interruptible(ctx)
	defer stop()
	stream, err := begin(ctx, connect.NewRequest(req))
	if err != nil {
		return left(ctx, what, nil, err)
	}
	defer stream.Close()
	seen, last, err := a.followOne(stream)
	switch {
	case last != nil:
		return a.judge(what, refused, rolledBack, last)
	case err != nil || ctx.Err() != nil:
		return left(ctx, what, seen, err)
	}
	return errors.New("hostd went away; gpuctl sessions says where the session is")
}

// left returns why an operation is not followed any more, and what becomes of it. seen is what
// was heard of it last; nil: nothing was.
func left(ctx context.Context, what string, seen *gpuctlv1.OperationUpdate, err error) error {
	id := clean(seen.GetSession())
	var stream *connect.Error
	switch {
	case ctx.Err() != nil && seen == nil:
		return fmt.Errorf("interrupted; gpuctl sessions says whether the %s has begun", what)
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted; the %s of session %s goes on: gpuctl describe session %s says how it ends", what, id, id)
	case seen == nil || !errors.As(err, &stream): // of the output, or refused
		return err
	}
	err = explain(err)
	return cmdutil.WithCode(fmt.Errorf("%w; gpuctl describe session %s says how the %s ends", err, id, what), cmdutil.Code(err))
}

// followOne shows the next operation of a stream until it ends. It returns what was heard of it
// last, and the same as last if that is its end.
func (a *app) followOne(stream *connect.ServerStreamForClient[gpuctlv1.OperationUpdate]) (seen, last *gpuctlv1.OperationUpdate, err error) {
	show := a.newProgress()
	defer show.end()
	for stream.Receive() {
		seen = stream.Msg()
		if a.structured() {
			if err := a.printLine(viewUpdate(seen)); err != nil {
				return seen, nil, err
			}
		}
		if seen.GetProgress().GetResult() != nil {
			return seen, seen, nil
		}
		show.update(seen.GetProgress())
	}
	return seen, nil, stream.Err()
}

// judge prints how an operation has ended, or returns it as an error. Executors and VMs write
// parts of it.
func (a *app) judge(what, refused, rolledBack string, last *gpuctlv1.OperationUpdate) error {
	r := last.GetProgress().GetResult()
	failed := func(format string, args ...any) error {
		return errors.New(line(fmt.Sprintf("%s of session %s", what, last.GetSession()) + fmt.Sprintf(format, args...)))
	}
	switch {
	case r.GetRefused():
		return a.refuse(fmt.Sprintf("%s of session %s refused: %s", what, last.GetSession(), refused), last.GetRejected())
	case r.GetRolledBack():
		return failed(" failed and was rolled back, %s: %s", rolledBack, r.GetError())
	case r.GetHeld():
		return failed(" failed and is held, the application may be frozen: %s; gpuguest goes on trying, and gpuctl sessions says when the session runs", r.GetError())
	case r.GetEnded():
		return failed(": %s", r.GetError())
	case r.GetError() != "":
		return failed(" failed: %s", r.GetError())
	case a.structured():
		return nil
	}
	where := ""
	if r.GetRehearsed() {
		where = " can be moved, and is where it was"
	} else if len(last.GetGpus()) > 0 {
		where = fmt.Sprintf(" is on %s (%s)", strings.Join(last.GetGpus(), ","), last.GetModel())
	} else if to := r.GetSession().GetSuspendedTo(); to != "" {
		where = " is suspended to " + to
	}
	return a.say(line(fmt.Sprintf("session %s%s: %s", last.GetSession(), where, summary(r))))
}

func viewUpdate(u *gpuctlv1.OperationUpdate) updateView {
	p := u.GetProgress()
	v := updateView{
		Session: u.GetSession(), GPUs: append([]string{}, u.GetGpus()...), Model: u.GetModel(), Step: p.GetStep(), StepIndex: p.GetStepIndex(),
		Steps: p.GetSteps(), BytesDone: p.GetBytesDone(), BytesTotal: p.GetBytesTotal(), Message: p.GetMessage(),
	}
	if r := p.GetResult(); r != nil {
		v.Result = new(viewResult(r))
		v.Rejected = viewCandidates(u.GetRejected())
	}
	return v
}

// printLine writes one JSON line, or one YAML document.
func (a *app) printLine(v any) error {
	if a.output == "yaml" {
		if _, err := io.WriteString(a.Out, "---\n"); err != nil {
			return err
		}
		return a.print(v)
	}
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	_, err = a.Out.Write(append(data, '\n'))
	return err
}

// progress draws a bar on a terminal, and prints lines otherwise.
type progress struct {
	w       io.Writer
	columns int // width of the terminal; 0: no terminal
	color   bool
	step    string
	since   time.Time // beginning of the step
	drawn   time.Time
	dirty   bool // a bar is on the present line
}

func (a *app) newProgress() *progress {
	p := &progress{w: a.Err}
	if columns, ok := terminal(a.Err); ok && a.getenv("TERM") != "dumb" {
		p.columns = columns
		p.color = a.getenv("NO_COLOR") == ""
	}
	if a.structured() {
		p.w, p.columns = io.Discard, 0
	}
	return p
}

const (
	redraw = 50 * time.Millisecond
	repeat = 10 * time.Second // interval of messages about what is waited for, if there is no terminal
)

func (p *progress) update(u *gpuctlv1.Progress) {
	now := time.Now()
	fresh := u.GetStep() != p.step
	if fresh {
		p.step, p.since = u.GetStep(), now
	}
	if p.columns == 0 {
		if fresh {
			fmt.Fprintf(p.w, "[%d/%d] %s%s\n", u.GetStepIndex()+1, u.GetSteps(), clean(u.GetStep()), note(u))
			p.drawn = now
		} else if u.GetMessage() != "" && now.Sub(p.drawn) >= repeat {
			fmt.Fprintf(p.w, "      %s\n", clean(u.GetMessage()))
			p.drawn = now
		}
		return
	}
	if !fresh && now.Sub(p.drawn) < redraw {
		return
	}
	p.drawn, p.dirty = now, true
	text := fmt.Sprintf("[%d/%d] %-10s ", u.GetStepIndex()+1, u.GetSteps(), clean(u.GetStep()))
	if total := u.GetBytesTotal(); total > 0 {
		done := min(u.GetBytesDone(), total)
		text += bar(float64(done)/float64(total), 24, p.color) + fmt.Sprintf(" %s of %s", size.Format(done), size.Format(total))
		if spent := now.Sub(p.since); done > 0 && done < total && spent > 200*time.Millisecond {
			left := time.Duration(float64(spent) * float64(total-done) / float64(done))
			text += fmt.Sprintf(", %s left", duration(int64(left)))
		}
	} else {
		text += bar(float64(u.GetStepIndex())/float64(max(1, u.GetSteps())), 24, p.color)
	}
	if m := u.GetMessage(); m != "" && len(text)+len(m)+2 < p.columns {
		text += ", " + clean(m)
	}
	fmt.Fprintf(p.w, "\r\x1b[K%s", text)
}

func note(u *gpuctlv1.Progress) string {
	var parts []string
	if u.GetBytesTotal() > 0 {
		parts = append(parts, size.Format(u.GetBytesTotal()))
	}
	if u.GetMessage() != "" {
		parts = append(parts, clean(u.GetMessage()))
	}
	if len(parts) == 0 {
		return ""
	}
	return " (" + strings.Join(parts, ", ") + ")"
}

func bar(part float64, cells int, color bool) string {
	full := int(min(1, max(0, part)) * float64(cells))
	done, rest := strings.Repeat("█", full), strings.Repeat("░", cells-full)
	if color {
		return "\x1b[32m" + done + "\x1b[90m" + rest + "\x1b[0m"
	}
	return done + rest
}

func (p *progress) end() {
	if p.dirty {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}

// refusedClaim prints why a claim got no GPU.
func (a *app) refusedClaim(rejected []*gpuctlv1.Candidate) error {
	if a.structured() {
		if err := a.print(struct {
			Rejected []candidateView `json:"rejected"`
		}{viewCandidates(rejected)}); err != nil {
			return cmdutil.WithCode(err, cmdutil.Refused)
		}
	}
	return a.refuse("no GPU meets the claim", rejected)
}
