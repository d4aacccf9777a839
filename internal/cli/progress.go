package cli

import (
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

// follow shows an operation until it ends.
func (a *app) follow(what string, stream *connect.ServerStreamForClient[gpuctlv1.OperationUpdate]) error {
	return a.followTo(what, "no GPU can serve it; it goes on as it was", "it goes on as it was", stream)
}

// followTo does the same. refused and rolledBack say how the session is then.
func (a *app) followTo(what, refused, rolledBack string, stream *connect.ServerStreamForClient[gpuctlv1.OperationUpdate]) error {
	defer stream.Close()
	last, err := a.followOne(stream)
	switch {
	case err != nil:
		return err
	case last == nil:
		return errors.New("hostd went away; gpuctl sessions says where the session is")
	}
	return a.judge(what, refused, rolledBack, last)
}

// followOne shows the next operation of a stream until it ends, and returns its last message;
// nil: there is no further operation.
func (a *app) followOne(stream *connect.ServerStreamForClient[gpuctlv1.OperationUpdate]) (last *gpuctlv1.OperationUpdate, err error) {
	show := a.newProgress()
	defer show.end()
	for stream.Receive() {
		u := stream.Msg()
		if a.structured() {
			if err := a.printLine(viewUpdate(u)); err != nil {
				return nil, err
			}
		}
		if u.GetProgress().GetResult() != nil {
			return u, nil
		}
		show.update(u.GetProgress())
	}
	return nil, stream.Err()
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
