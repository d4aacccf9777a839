package hostd

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/ledger"
	"github.com/gpuctl/gpuctl/internal/expr"
	"github.com/gpuctl/gpuctl/internal/near"
	"github.com/gpuctl/gpuctl/internal/size"
)

// placement is what a claim runs on: GPUs of one runtime, in order.
type placement []*gpuctlv1.GPU

func (p placement) ids() []string {
	ids := make([]string, len(p))
	for i, g := range p {
		ids[i] = g.GetId()
	}
	return ids
}

func (p placement) rank() uint32 { return p[0].GetRank() }

func (p placement) String() string { return strings.Join(p.ids(), separator) }

// separator stands between the GPUs of one target.
const separator = ","

func splitIDs(ids string) []string {
	if ids == "" {
		return nil
	}
	return strings.Split(ids, separator)
}

// target describes the placement to the guest, with the amount that the claim
// has of it.
func (p placement) target(amount uint64) *gpuctlv1.Target {
	limits := cloneLimits(p[0].GetLimits())
	if amount != ledger.Whole {
		limits.GlobalMemory = min(limits.GlobalMemory, amount)
		limits.MaxAlloc = min(limits.MaxAlloc, amount)
	}
	runtime := &gpuctlv1.Runtime{Library: p[0].GetRuntime().GetLibrary(), Env: p[0].GetRuntime().GetEnv()}
	for _, g := range p {
		runtime.Devices = append(runtime.Devices, g.GetRuntime().GetDevices()...)
	}
	return &gpuctlv1.Target{Gpu: p.String(), Model: p[0].GetModel(), Runtime: runtime, Limits: limits}
}

// runtimeKey is equal for GPUs that one executor can serve together.
func runtimeKey(g *gpuctlv1.GPU) string {
	r := g.GetRuntime()
	var env []string
	for k, v := range r.GetEnv() {
		env = append(env, k+"="+v)
	}
	slices.Sort(env)
	return r.GetLibrary() + "\x00" + strings.Join(env, "\x00")
}

func reason(code, format string, args ...any) *gpuctlv1.Reason {
	return &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)}
}

func rejected(g *gpuctlv1.GPU, reasons ...*gpuctlv1.Reason) *gpuctlv1.Candidate {
	return &gpuctlv1.Candidate{Gpu: g.GetId(), Model: g.GetModel(), Reasons: reasons}
}

// judge returns every reason why the claim cannot have the GPU.
func judge(g *gpuctlv1.GPU, c *claim, e *expr.Expr, l *ledger.Ledger) []*gpuctlv1.Reason {
	var reasons []*gpuctlv1.Reason
	room, free := l.Room(c.ID, g.GetId())
	if ok, err := e.Match(expr.OfGPU(g)); err != nil {
		reasons = append(reasons, reason("expr", "%v", err))
	} else if !ok {
		reasons = append(reasons, reason("expr", "%s is not true of it", e))
	}
	if memory := g.GetLimits().GetGlobalMemory(); memory < c.Min {
		reasons = append(reasons, reason("memory", "%s needed, it has %s", size.Format(c.Min), size.Format(memory)))
	} else if r := judgeRoom(g, c, l, room, free); r != nil {
		reasons = append(reasons, r)
	}
	return reasons
}

// judgeRoom says whether others hold too much of the GPU.
func judgeRoom(g *gpuctlv1.GPU, c *claim, l *ledger.Ledger, room uint64, free bool) *gpuctlv1.Reason {
	owners := strings.Join(ownerNames(l, g.GetId(), c.ID), ", ")
	switch {
	case c.Min == 0 && !free:
		return reason("busy", "held by claim %s; wait for it, or share the GPU with --min-memory", owners)
	case c.Min > 0 && room < c.Min:
		return reason("busy", "%s needed, %s left beside claim %s", size.Format(c.Min), size.Format(room), owners)
	}
	return nil
}

func ownerNames(l *ledger.Ledger, gpu, but string) []string {
	var names []string
	for other := range l.Owners(gpu) {
		if other != but {
			names = append(names, other)
		}
	}
	slices.Sort(names)
	return names
}

// choose finds the best placement for a new claim. A claim that says how much
// memory it wants gets the lowest model that has it, any other the highest.
func choose(gpus []*gpuctlv1.GPU, c *claim, e *expr.Expr, l *ledger.Ledger) (placement, []*gpuctlv1.Candidate) {
	var out []*gpuctlv1.Candidate
	var fit []*gpuctlv1.GPU
	for _, g := range gpus {
		if reasons := judge(g, c, e, l); len(reasons) > 0 {
			out = append(out, rejected(g, reasons...))
			continue
		}
		fit = append(fit, g)
	}
	want := c.want()
	enough := func(g *gpuctlv1.GPU) bool {
		room, _ := l.Room(c.ID, g.GetId())
		return want > 0 && room >= want
	}
	slices.SortFunc(fit, func(a, b *gpuctlv1.GPU) int {
		switch ea, eb := enough(a), enough(b); {
		case ea && eb:
			return cmp.Or(cmp.Compare(a.GetRank(), b.GetRank()), cmp.Compare(a.GetId(), b.GetId()))
		case ea != eb:
			if ea {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(b.GetRank(), a.GetRank()), cmp.Compare(a.GetId(), b.GetId()))
	})
	for _, p := range group(fit, c.Count) {
		return p, out
	}
	for _, g := range fit {
		out = append(out, rejected(g, reason("count", "%d GPUs of one runtime needed, this one has fewer that fit", c.Count)))
	}
	return nil, out
}

// group makes placements of count GPUs each, of one runtime, in the order of
// their first.
func group(gpus []*gpuctlv1.GPU, count int) []placement {
	if count <= 1 {
		var out []placement
		for _, g := range gpus {
			out = append(out, placement{g})
		}
		return out
	}
	byRuntime := map[string]placement{}
	var order []string
	for _, g := range gpus {
		key := runtimeKey(g)
		if byRuntime[key] == nil {
			order = append(order, key)
		}
		byRuntime[key] = append(byRuntime[key], g)
	}
	var out []placement
	for _, key := range order {
		for p := byRuntime[key]; len(p) >= count; p = p[count:] {
			out = append(out, p[:count:count])
		}
	}
	return out
}

// destinations lists the placements that a swap of a session may try, best
// first, and those GPUs that the verb itself rules out. Its error names what
// the user asked for and does not exist.
func destinations(gpus []*gpuctlv1.GPU, verb gpuctlv1.Verb, to string, from []string, count int) ([]placement, []*gpuctlv1.Candidate, error) {
	pool, err := named(gpus, to, count)
	if err != nil {
		return nil, nil, err
	}
	// The rank of a GPU that has left the inventory is not known; it counts as 0.
	var now uint32
	for _, g := range gpus {
		if len(from) > 0 && g.GetId() == from[0] {
			now = g.GetRank()
		}
	}
	var fit []placement
	var out []*gpuctlv1.Candidate
	for _, p := range pool {
		var why *gpuctlv1.Reason
		switch {
		case verb == gpuctlv1.Verb_VERB_UPGRADE && p.rank() <= now:
			why = reason("rank", "not a higher model than %s", strings.Join(from, separator))
		case verb == gpuctlv1.Verb_VERB_DOWNGRADE && p.rank() >= now:
			why = reason("rank", "not a lower model than %s", strings.Join(from, separator))
		}
		if why == nil {
			fit = append(fit, p)
			continue
		}
		if to != "" {
			why.Message += "; gpuctl migrate goes there all the same"
		}
		for _, g := range p {
			out = append(out, rejected(g, why))
		}
	}
	slices.SortStableFunc(fit, func(a, b placement) int {
		switch verb {
		case gpuctlv1.Verb_VERB_UPGRADE:
			return cmp.Compare(b.rank(), a.rank())
		case gpuctlv1.Verb_VERB_DOWNGRADE:
			return cmp.Compare(a.rank(), b.rank())
		case gpuctlv1.Verb_VERB_MIGRATE, gpuctlv1.Verb_VERB_UNSPECIFIED:
			return cmp.Compare(nearness(a, now, from), nearness(b, now, from))
		}
		return 0
	})
	return fit, out, nil
}

// nearness orders what is closest to where a session was: the same GPU, then
// the nearest model, the higher of two before the lower.
func nearness(p placement, now uint32, from []string) int64 {
	if slices.Equal(p.ids(), from) {
		return -1
	}
	d := 2 * (int64(p.rank()) - int64(now))
	if d < 0 {
		d = 1 - d
	}
	return d
}

// named returns the placements that to can mean: GPUs with commas between, or
// a model, or anything if it is empty.
func named(gpus []*gpuctlv1.GPU, to string, count int) ([]placement, error) {
	if to == "" {
		return group(gpus, count), nil
	}
	byID := map[string]*gpuctlv1.GPU{}
	var names []string
	var ofModel []*gpuctlv1.GPU
	for _, g := range gpus {
		byID[g.GetId()] = g
		names = append(names, g.GetId())
		if strings.EqualFold(g.GetModel(), to) {
			ofModel = append(ofModel, g)
		} else {
			names = append(names, g.GetModel())
		}
	}
	if len(ofModel) > 0 && byID[to] == nil {
		if all := group(ofModel, count); len(all) > 0 {
			return all, nil
		}
		return nil, fmt.Errorf("model %q: %w: this session needs %d of one runtime", to, errNotFound, count)
	}
	var p placement
	for _, id := range splitIDs(to) {
		g := byID[id]
		if g == nil {
			return nil, fmt.Errorf("%w: no GPU or model %q%s; gpuctl inventory lists them", errNotFound, id, near.Hint(id, names))
		}
		if slices.Contains(p, g) || len(p) > 0 && runtimeKey(p[0]) != runtimeKey(g) {
			return nil, fmt.Errorf("%w: the GPUs %s are not different GPUs of one runtime", errInvalid, to)
		}
		p = append(p, g)
	}
	if len(p) != count {
		return nil, fmt.Errorf("%w: this session has %d GPUs, %s names %d", errInvalid, count, to, len(p))
	}
	return []placement{p}, nil
}
