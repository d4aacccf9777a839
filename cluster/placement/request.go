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
	// ErrInvalid says that a request makes no sense.
	ErrInvalid = reason.New(reason.Invalid, "invalid placement")
	// ErrNotFound says that a request names what does not exist.
	ErrNotFound = reason.New(reason.NotFound, "not found")
)

// Verb is what a placement is for.
type Verb string

// The verbs. Resume is for what has been suspended or is pending again.
const (
	New       Verb = ""
	Upgrade   Verb = "upgrade"
	Downgrade Verb = "downgrade"
	Migrate   Verb = "migrate"
	Resume    Verb = "resume"
)

// Request is what Place is asked for.
type Request struct {
	Claim *clusterv1.Claim
	Verb  Verb
	From  []string // GPUs that it comes from: ids
	To    string   // GPUs with commas between, a model or a host; empty: anything
	Host  string   // that asks: others are further away
	// Expr is the claim's expression if it is compiled already.
	Expr *query.Query
	// Context bounds the search, whose expressions others have written; nil:
	// nothing does.
	Context context.Context //nolint:containedctx // a request is made for one call

	// Bytes move over the network to another host, and must be there in time.
	Bytes    uint64
	Deadline time.Duration // 0: whenever

	Span  bool // the GPUs of the claim may be on different hosts
	Limit int  // of candidates; 0: 10
}

// Candidate is where a claim can go.
type Candidate struct {
	Host    string // of the first choice
	Model   string // of the first choice
	Choices []*clusterv1.Choice
	// Kept are those choices' GPUs that the claim has already: a swap needs no
	// new assignment for them.
	Kept    []string
	Score   float64  // above 0, at most 1; of two candidates the better has the higher one
	Because []string // what speaks for it, in words
}

// GPUs of the candidate, in order.
func (c Candidate) GPUs() []string {
	ids := make([]string, len(c.Choices))
	for i, choice := range c.Choices {
		ids[i] = choice.GetGpu()
	}
	return ids
}

// New are the choices that need an assignment.
func (c Candidate) New() []*clusterv1.Choice {
	var out []*clusterv1.Choice
	for _, choice := range c.Choices {
		if !slices.Contains(c.Kept, choice.GetGpu()) {
			out = append(out, choice)
		}
	}
	return out
}

// Proto is the candidate as the API has it.
func (c Candidate) Proto() *clusterv1.PlaceCandidate {
	return &clusterv1.PlaceCandidate{Host: c.Host, Choices: c.Choices, Model: c.Model, Score: c.Score, Because: c.Because}
}

// Decision is an answer of Place.
type Decision struct {
	Candidates []Candidate // best first
	// Fits is how many there are, those beyond the limit too. With an expression
	// over what GPUs of a kind differ in, it is how many there may be at most:
	// those that are not among the best are not asked.
	Fits  int
	Index uint64 // of the log entry that it follows from
	// Err says why the request cannot be answered: it wraps ErrInvalid or
	// ErrNotFound. That nothing fits is no error.
	Err error

	run *run
}

// OK reports whether there is a candidate.
func (d Decision) OK() bool { return d.Err == nil && len(d.Candidates) > 0 }

// Rejected are the hosts and GPUs that cannot serve, in order, with all reasons:
// one for a host if all its GPUs fail for the same. They are found when asked
// for; only one goroutine may ask. Reasons may be shared: nobody may change them.
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
				break // all others are the same
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

// unknown names the first of the ids that there is not, and what may be meant.
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
