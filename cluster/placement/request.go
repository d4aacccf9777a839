package placement

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

var (
	// ErrInvalid means that a request is invalid.
	ErrInvalid = reason.New(reason.Invalid, "invalid placement")
	// ErrNotFound means that a request names something that does not exist.
	ErrNotFound = reason.New(reason.NotFound, "not found")
)

// Verb is the purpose of a placement.
type Verb string

// Resume is for a claim that was suspended or is pending again.
const (
	New       Verb = ""
	Upgrade   Verb = "upgrade"
	Downgrade Verb = "downgrade"
	Migrate   Verb = "migrate"
	Resume    Verb = "resume"
)

// Where limits a claim that has a home.
type Where string

// Anywhere is what the claim itself allows.
const (
	Anywhere  Where = ""
	AtHome    Where = "home"
	Elsewhere Where = "elsewhere"
)

// Tries returns where a claim is placed, in order: at home before elsewhere, and elsewhere
// only if the claim and the policy of the queue allow it.
func Tries(c *clusterv1.Claim, q clusterv1.QueuePolicy) []Where {
	if c.GetHome() == "" {
		return []Where{Anywhere}
	}
	switch c.GetRemote() {
	case clusterv1.Remote_REMOTE_ONLY: // who asks for it gets it, whatever the queue does
		return []Where{Elsewhere}
	case clusterv1.Remote_REMOTE_ALLOWED:
		if q != clusterv1.QueuePolicy_QUEUE_POLICY_FCFS {
			return []Where{AtHome, Elsewhere}
		}
	case clusterv1.Remote_REMOTE_UNSPECIFIED, clusterv1.Remote_REMOTE_NEVER:
	}
	return []Where{AtHome}
}

// Request is the input of Place.
type Request struct {
	Claim *clusterv1.Claim
	Verb  Verb
	From  []string // ids of the GPUs that the claim comes from
	To    string   // GPUs separated by commas, a model or a host; empty: anything
	Host  string   // host that asks; other hosts count as further away
	// Expr is the claim's expression, if it has been compiled.
	Expr *query.Query
	// Context ends the search, because expressions of users may be expensive. nil: not
	// limited.
	Context context.Context //nolint:containedctx // a request is made for one call

	// Bytes are moved to another host over the network, within Deadline.
	Bytes    uint64
	Deadline time.Duration // 0: no deadline

	Where Where // for a claim that has a home

	Span  bool // the claim's GPUs may be on different hosts
	Limit int  // most candidates; 0: 10
}

// Candidate is a place where a claim can go.
type Candidate struct {
	Host    string // host of the first choice
	Model   string // model of the first choice
	Choices []*clusterv1.Choice
	// Kept are the GPUs of those choices that the claim has already: a swap needs no new
	// assignment for them.
	Kept    []string
	Score   float64  // above 0, at most 1; the better candidate has the higher score
	Because []string // reasons for it, in words
}

// GPUs returns the ids of the candidate's GPUs, in order.
func (c Candidate) GPUs() []string {
	ids := make([]string, len(c.Choices))
	for i, choice := range c.Choices {
		ids[i] = choice.GetGpu()
	}
	return ids
}

// New returns the choices that need an assignment.
func (c Candidate) New() []*clusterv1.Choice {
	var out []*clusterv1.Choice
	for _, choice := range c.Choices {
		if !slices.Contains(c.Kept, choice.GetGpu()) {
			out = append(out, choice)
		}
	}
	return out
}

// Proto returns the candidate in the API's form.
func (c Candidate) Proto() *clusterv1.PlaceCandidate {
	return &clusterv1.PlaceCandidate{Host: c.Host, Choices: c.Choices, Model: c.Model, Score: c.Score, Because: c.Because}
}

// Decision is the output of Place.
type Decision struct {
	Candidates []Candidate // best first
	// Fits is the number of candidates, including those beyond the limit. If GPUs of a
	// class differ in the expression, it is an upper bound: the expression is evaluated
	// only for the best GPUs.
	Fits  int
	Index uint64 // index of the log entry on which it is based
	// Err is set if the request cannot be answered. It wraps ErrInvalid or ErrNotFound.
	// If nothing fits, that is not an error.
	Err error

	run *run
}

// OK reports whether there is a candidate.
func (d Decision) OK() bool { return d.Err == nil && len(d.Candidates) > 0 }

// Rejected yields the hosts and GPUs that do not fit, in order, with all reasons: one
// rejection for a host if all its GPUs have the same causes. The reasons are computed
// while it iterates, so only one goroutine may do that. Reasons may be shared and must
// not be changed.
func (d Decision) Rejected() iter.Seq[*clusterv1.Rejection] {
	return func(yield func(*clusterv1.Rejection) bool) {
		if d.run != nil {
			d.run.rejected(yield)
		}
	}
}

// Summary says in a few words why nothing fits, the most frequent cause first.
func (d Decision) Summary() string {
	switch {
	case d.Err != nil:
		return d.Err.Error()
	case d.OK() || d.run == nil:
		return ""
	}
	return d.run.summary()
}

// resolve finds what To names.
func (r *run) resolve(to string) error {
	if to == "" {
		return nil
	}
	ids := strings.Split(to, ",")
	var found []*clusterv1.GPU
	for _, id := range ids {
		g := r.snap.view.GPU(id)
		if g == nil && r.req.Host != "" {
			g = r.snap.view.GPU(key(r.req.Host) + id)
		}
		if g == nil {
			found = nil
			break
		}
		found = append(found, g)
	}
	if found != nil {
		return r.resolveGPUs(found)
	}
	seen := make([]bool, r.snap.classes)
	for h := range r.snap.all() {
		for i := range h.gpus {
			c := h.gpus[i].class
			if !seen[c.number] && strings.EqualFold(c.like.GetModel(), to) {
				r.toModel = to
				return nil
			}
			if seen[c.number] = true; h.class != nil {
				break // the host's other GPUs have the same class
			}
		}
	}
	if r.snap.host(to) != nil {
		r.toHost = to
		return nil
	}
	return r.unknown(ids)
}

func (r *run) resolveGPUs(found []*clusterv1.GPU) error {
	if len(found) != r.count {
		return fmt.Errorf("%w: claim %s has %d GPUs, %s names %d", ErrInvalid, r.claim.GetId(), r.count, r.req.To, len(found))
	}
	r.toGPUs = map[string]int{}
	for i, g := range found {
		_, twice := r.toGPUs[g.GetId()]
		apart := g.GetHost() != found[0].GetHost() && (!r.req.Span || r.claim.GetOneRuntime())
		if twice || apart || r.claim.GetOneRuntime() && r.count > 1 && (g.GetRuntimeKey() == "" || g.GetRuntimeKey() != found[0].GetRuntimeKey()) {
			what := "of one host"
			if r.claim.GetOneRuntime() {
				what = "of one runtime"
			}
			return fmt.Errorf("%w: the GPUs %s are not different GPUs %s", ErrInvalid, r.req.To, what)
		}
		r.toGPUs[g.GetId()] = i
	}
	return nil
}

// unknown returns an error that names the first unknown id, and similar ones.
func (r *run) unknown(ids []string) error {
	missing := ids[0]
	for _, id := range ids {
		if r.snap.view.GPU(id) == nil && (r.req.Host == "" || r.snap.view.GPU(key(r.req.Host)+id) == nil) {
			missing = id
			break
		}
	}
	hostPart, _, isID := strings.Cut(missing, "/")
	names := map[string]bool{}
	for h := range r.snap.all() {
		names[h.name] = true
		for i := range h.gpus {
			o := h.gpus[i].object
			names[o.GetModel()] = true
			if isID && h.name == hostPart {
				names[o.GetId()] = true
			}
			if h.name == r.req.Host {
				names[o.GetName()] = true
			}
		}
	}
	var all []string
	for n := range names {
		all = append(all, n)
	}
	slices.Sort(all)
	return reason.Detail(fmt.Errorf("%w: no GPU, model or host %q%s", ErrNotFound, missing, suggest.Hint(missing, all))).On("gpu", missing).Do("gpuctl get gpus lists them")
}
