package trace

import (
	"context"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	api "go.opentelemetry.io/otel/trace"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// maxSteps is how many steps of one operation are kept.
const maxSteps = 256

// Op is what an operation is about.
type Op struct {
	ID     string // of its record in the cluster
	Verb   string
	Object string // session or VM
	Claim  string
	From   string
	At     time.Time // its beginning; zero: now
}

// Operation is a trace that grows. A nil one takes everything and keeps
// nothing; none waits for anything.
type Operation struct {
	span   api.Span
	ctx    context.Context // the parent of the steps' spans
	tracer api.Tracer

	mu    sync.Mutex
	steps []span
	ended bool
}

type span struct {
	name       string
	start, end time.Time // end is zero while it runs
}

// Begin starts an operation's trace.
func (t *Tracer) Begin(ctx context.Context, op Op) *Operation {
	if t == nil {
		return nil
	}
	if op.At.IsZero() {
		op.At = time.Now()
	}
	o := &Operation{tracer: t.tracer}
	o.ctx, o.span = t.tracer.Start(context.WithoutCancel(ctx), op.Verb, api.WithTimestamp(op.At), api.WithNewRoot(), api.WithAttributes(
		attribute.String("gpuctl.operation", op.ID), attribute.String("gpuctl.verb", op.Verb), attribute.String("gpuctl.object", op.Object),
		attribute.String("gpuctl.claim", op.Claim), attribute.String("gpuctl.from", op.From),
	))
	return o
}

// TraceID is for the log; empty if there is no trace.
func (o *Operation) TraceID() string {
	if o == nil || !o.span.SpanContext().IsSampled() {
		return ""
	}
	return o.span.SpanContext().TraceID().String()
}

// Step says that a step begins, and so that the one before has ended. Saying
// it again changes nothing.
func (o *Operation) Step(name string, at time.Time) {
	if o == nil || name == "" || !o.span.IsRecording() {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if n := len(o.steps); n > 0 {
		last := &o.steps[n-1]
		if last.end.IsZero() && last.name == name {
			return
		}
		if last.end.IsZero() {
			last.end = at
		}
	}
	if len(o.steps) < maxSteps && !o.ended {
		o.steps = append(o.steps, span{name: name, start: at})
	}
}

// End of an operation: a result, and where the object is now. The steps that
// the result times replace those said by Step that they cover: they are exact,
// and Step hears of them over a stream.
func (o *Operation) End(outcome, to string, r *gpuctlv1.SwapResult, at time.Time) {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return
	}
	o.ended = true
	if !o.span.IsRecording() {
		o.span.End()
		return
	}
	if n := len(o.steps); n > 0 && o.steps[n-1].end.IsZero() {
		o.steps[n-1].end = at
	}
	failed := outcome == "failed" || outcome == "rolled_back"
	steps := merged(o.steps, r, at)
	for i, s := range steps {
		_, child := o.tracer.Start(o.ctx, s.name, api.WithTimestamp(s.start))
		if failed && i == len(steps)-1 {
			child.SetStatus(codes.Error, r.GetError())
		}
		child.End(api.WithTimestamp(s.end))
	}
	o.span.SetAttributes(
		attribute.String("gpuctl.to", to), attribute.String("gpuctl.outcome", outcome),
		attribute.Int64("gpuctl.bytes_precopied", int64(r.GetBytesPrecopied())), attribute.Int64("gpuctl.bytes_frozen", int64(r.GetBytesFrozen())),
		attribute.Float64("gpuctl.stopped_seconds", time.Duration(r.GetStoppedNs()).Seconds()),
	)
	switch {
	case failed || outcome == "refused":
		text := r.GetError()
		if text == "" {
			text = outcome
		}
		o.span.SetStatus(codes.Error, text)
	default:
		o.span.SetStatus(codes.Ok, "")
	}
	o.span.End(api.WithTimestamp(at))
}

// merged are the steps with the times that are known best. What the result
// times is relative to its own beginning. Both that its end was at the latest
// at, and that its first step began at the latest when Step heard of it, bound
// that from above.
func merged(heard []span, r *gpuctlv1.SwapResult, at time.Time) []span {
	timed := r.GetSteps()
	if len(timed) == 0 || r.GetTotalNs() <= 0 {
		return heard
	}
	began := at.Add(-time.Duration(r.GetTotalNs()))
	// Attempts before the one that the result is of stay as they were heard.
	earlier := len(heard)
	for earlier > 0 && heard[earlier-1].start.After(began) {
		earlier--
	}
	for i, s := range slices.Backward(heard) {
		if s.name == timed[0].GetStep() {
			earlier = i
			if first := s.start.Add(-time.Duration(max(timed[0].GetStartNs(), 0))); first.Before(began) {
				began = first
			}
			break
		}
	}
	all := slices.Clone(heard[:earlier])
	if earlier > 0 && all[earlier-1].end.After(began) && all[earlier-1].start.Before(began) {
		all[earlier-1].end = began
	}
	for _, s := range timed[:min(len(timed), maxSteps)] {
		start := began.Add(time.Duration(max(s.GetStartNs(), 0)))
		all = append(all, span{s.GetStep(), start, start.Add(time.Duration(max(s.GetDurationNs(), 0)))})
	}
	return all
}
