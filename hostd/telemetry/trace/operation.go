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

// Op describes an operation.
type Op struct {
	ID     string // id of its record in the cluster
	Verb   string
	Object string // session or VM
	Claim  string
	From   string
	At     time.Time // when it began; zero: now
}

// Operation is the trace of an operation in progress. A nil one is valid and does
// nothing. No method waits.
type Operation struct {
	span   api.Span
	ctx    context.Context // context of the root span
	tracer api.Tracer

	mu    sync.Mutex
	steps []span
	ended bool
}

type span struct {
	name       string
	start, end time.Time // end is zero while the step runs
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

// TraceID returns the trace's id, for the log; empty: there is no trace.
func (o *Operation) TraceID() string {
	if o == nil || !o.span.SpanContext().IsSampled() {
		return ""
	}
	return o.span.SpanContext().TraceID().String()
}

// Step records that a step begins, which ends the step before. Repeating the same name
// changes nothing.
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

// End ends the operation's trace. outcome is the result in a word, to is where the object
// is now. The steps of r have exact times. They replace those that Step has recorded from
// a stream.
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

// merged returns the steps with the best known times. The times in the result are
// relative to its own beginning. Two upper bounds fix that beginning: the result's end
// was not later than at, and its first step did not begin later than Step recorded it.
func merged(heard []span, r *gpuctlv1.SwapResult, at time.Time) []span {
	timed := r.GetSteps()
	if len(timed) == 0 || r.GetTotalNs() <= 0 {
		return heard
	}
	began := at.Add(-time.Duration(r.GetTotalNs()))
	// Steps of earlier attempts are not in the result, so they keep their recorded times.
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
