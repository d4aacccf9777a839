package placement

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/size"
)

// candidate converts an item to the API's candidate, with reasons in words.
func (r *run) candidate(it item) Candidate {
	first := it.members[0]
	c := Candidate{
		Host: first.host.name, Model: first.gpu.object.GetModel(),
		// The score follows the order. Only people compare it.
		Score: max(1-float64(it.hi)/(1<<64), 1e-9),
	}
	for _, m := range it.members {
		choice := &clusterv1.Choice{Gpu: m.gpu.object.GetId(), Memory: m.amount, Kind: m.kind, Profile: m.profile, Reservation: m.reservation}
		if m.kind == clusterv1.VGPUKind_VGPU_KIND_WHOLE {
			choice.Memory = 0
		}
		c.Choices = append(c.Choices, choice)
		if m.kept {
			c.Kept = append(c.Kept, choice.GetGpu())
		}
	}
	c.Because = r.because(it)
	return c
}

func (r *run) because(it item) []string {
	m := it.members[0]
	h := m.host
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	model, rank := m.gpu.object.GetModel(), m.gpu.class.rank
	_, stays := r.fromIndex[m.gpu.object.GetId()]
	switch {
	case r.req.Verb == Upgrade:
		say("model %s of rank %d is above rank %d", model, rank, r.rank)
	case r.req.Verb == Downgrade:
		say("model %s of rank %d is below rank %d", model, rank, r.rank)
	case (r.req.Verb == Migrate || r.req.Verb == Resume) && stays:
		say("it is where the claim was")
	case r.req.Verb == Migrate || r.req.Verb == Resume:
		say("model %s of rank %d is near rank %d", model, rank, r.rank)
	case r.policy == clusterv1.Policy_POLICY_PACK:
		say("pack: %d of %d GPUs of the host are free", h.free, len(h.gpus))
	case r.policy == clusterv1.Policy_POLICY_SPREAD:
		say("spread: %d %% of the host's GPU memory is held", h.held/10)
	case r.policy == clusterv1.Policy_POLICY_CHEAPEST:
		say("cheapest: model %s of rank %d suffices", model, rank)
	default:
		say("best: model %s of rank %d", model, rank)
	}
	if r.weighsKinds() || m.gpu.class.mediated {
		say("%s: %s", m.way(), wayWords(m.way()))
	}
	if r.want > 0 && it.hi&scantBit != 0 {
		say("%s of the %s preferred", size.Format(m.room), size.Format(r.want))
	}
	if it.hi&degradedBit != 0 {
		say("degraded: %s", cmp.Or(m.gpu.object.GetHealthReason(), "no reason given"))
	}
	if len(it.members) > 1 {
		switch nodes := it.hi >> numaShift & 255; {
		case it.hi&spanBit != 0:
			say("no host has %d GPUs that fit", r.count)
		case nodes > 0:
			say("its GPUs are on %d NUMA nodes", nodes+1)
		case m.gpu.numa >= 0:
			say("its GPUs are on NUMA node %d", m.gpu.numa)
		}
	}
	if h.name == r.asking {
		say("on the same host")
	} else if r.req.Bytes > 0 {
		if speed := r.speed(h); speed == 0 {
			say("the speed of its link is not known")
		} else {
			say("%s over %s take %s", size.Format(r.req.Bytes), bits(speed), round(r.transfer(h)))
		}
	}
	if m.reservation != "" {
		say("reserved for the claim")
	}
	return out
}

func bits(speed uint64) string {
	switch {
	case speed >= 1e9:
		return fmt.Sprintf("%.4g Gb/s", float64(speed)/1e9)
	default:
		return fmt.Sprintf("%.4g Mb/s", float64(speed)/1e6)
	}
}

func round(d time.Duration) time.Duration {
	for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond} {
		if d >= 10*unit {
			return d.Round(unit / 10)
		}
	}
	return d
}

func against(code, format string, args ...any) *gpuctlv1.Reason {
	return &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)}
}

// rejected yields a rejection for everything that is not a candidate.
func (r *run) rejected(yield func(*clusterv1.Rejection) bool) {
	row := 0
	defer func() { r.row = -1 }()
	for h := range r.snap.all() {
		r.row = row
		row += len(h.gpus)
		if !r.considered(h) {
			continue
		}
		for _, x := range r.rejectHost(h) {
			if !yield(x) {
				return
			}
		}
	}
}

// considered reports whether the request may use a host: it does not name other hosts.
func (r *run) considered(h *host) bool {
	if r.toHost != "" {
		return r.toHost == h.name
	}
	for id := range r.toGPUs {
		if strings.HasPrefix(id, key(h.name)) {
			return true
		}
	}
	return len(r.toGPUs) == 0
}

func (r *run) rejectHost(h *host) []*clusterv1.Rejection {
	if why := r.judgeHost(h); why != 0 {
		return []*clusterv1.Rejection{{Host: h.name, Reasons: r.hostReasons(h, why)}}
	}
	if len(h.gpus) == 0 {
		return []*clusterv1.Rejection{{Host: h.name, Reasons: []*gpuctlv1.Reason{against("count", "host %s has no GPU", h.name)}}}
	}
	all := r.verdicts[:0]
	for i := range h.gpus {
		g := &h.gpus[i]
		if len(r.toGPUs) > 0 {
			if _, named := r.toGPUs[g.object.GetId()]; !named {
				continue
			}
		}
		if r.toModel == "" || r.ofToModel(g) {
			all = append(all, verdict{gpu: g, why: r.causes(h, g, i)})
		}
	}
	r.verdicts = all
	if r.count > 1 && !r.apart() {
		r.tooFew(all)
	}
	// A request about one host gets a rejection for each GPU, and so does a claim of its home.
	same := len(all) > 1 && all[0].why != 0 && r.claim.GetHost() == "" && r.claim.GetHome() != h.name
	for _, v := range all {
		same = same && v.why == all[0].why
	}
	if same {
		return []*clusterv1.Rejection{r.asOne(h, all)}
	}
	var out []*clusterv1.Rejection
	for _, v := range all {
		if v.why != 0 {
			out = append(out, &clusterv1.Rejection{
				Host: h.name, Gpu: v.gpu.object.GetId(), Model: v.gpu.object.GetModel(), Reasons: r.reasons(h, v),
			})
		}
	}
	return out
}

// verdict has the causes against a GPU. fit is how many GPUs of its host fit and have the
// same runtime.
type verdict struct {
	gpu *gpu
	why cause
	fit int
}

// fitting counts the GPUs that fit and have the same runtime as a GPU.
func (r *run) fitting(all []verdict, like *gpu) int {
	n := 0
	for _, v := range all {
		if v.why&^causeCount == 0 && r.runtime(v.gpu) == r.runtime(like) {
			n++
		}
	}
	return n
}

// tooFew rejects GPUs that fit, if there are not enough of them.
func (r *run) tooFew(all []verdict) {
	for i := range all {
		v := &all[i]
		if v.fit = r.fitting(all, v.gpu); v.why == 0 && v.fit < r.count {
			v.why = causeCount
		}
	}
}

// apart reports whether GPUs of several hosts may be combined.
func (r *run) apart() bool {
	return len(r.toGPUs) > 0 || r.req.Span && !r.claim.GetOneRuntime() && r.fits > 0
}

func (r *run) runtime(g *gpu) string {
	if !r.claim.GetOneRuntime() {
		return ""
	}
	return g.class.like.GetRuntimeKey()
}

// asOne combines the rejections of all GPUs of a host, which have the same causes.
func (r *run) asOne(h *host, all []verdict) *clusterv1.Rejection {
	out := &clusterv1.Rejection{Host: h.name, Model: all[0].gpu.class.like.GetModel()}
	for _, v := range all {
		if v.gpu.class.like.GetModel() != out.GetModel() {
			out.Model = ""
		}
	}
	k := wording{all[0].gpu.class, all[0].why, len(all)}
	ofClass := h.class != nil && k.why&^perClass == 0
	if ofClass && r.worded[k] != nil {
		out.Reasons = r.worded[k]
		return out
	}
	reasons := r.reasons(h, all[0])
	same := make([]bool, len(reasons))
	for i := range same {
		same[i] = true
	}
	for _, v := range all[1:] {
		if ofClass || !slices.Contains(same, true) {
			break
		}
		for i, other := range r.reasons(h, v) {
			if i < len(same) && other.GetMessage() != reasons[i].GetMessage() {
				same[i] = false
			}
		}
	}
	for i, x := range reasons {
		message := fmt.Sprintf("each of %d GPUs: %s", len(all), x.GetMessage())
		if !same[i] {
			message = fmt.Sprintf("each of %d GPUs, as %s: %s", len(all), all[0].gpu.object.GetId(), x.GetMessage())
		}
		out.Reasons = append(out.Reasons, &gpuctlv1.Reason{Code: x.GetCode(), Message: message})
	}
	if ofClass {
		r.word(k, out.GetReasons())
	}
	return out
}

func (r *run) word(k wording, reasons []*gpuctlv1.Reason) {
	if r.worded == nil {
		r.worded = map[wording][]*gpuctlv1.Reason{}
	}
	r.worded[k] = reasons
}

// perClass are the causes whose text is the same for all GPUs of a class.
const perClass = causeRank | causeLimits | causeRuntime | causeMemory | causeProfile | causeKind

// wording is the key of texts. Texts about a class are made once.
type wording struct {
	class *class
	why   cause
	gpus  int // GPUs that are rejected together; 0: one alone
}

// causes returns all causes against a GPU, which is the i-th of its host.
func (r *run) causes(h *host, g *gpu, i int) cause {
	why := r.judgeClass(g.class)
	if g.flags&flagBlocked != 0 {
		why |= obstacles(g.object, h.object)
	}
	if g.class.service && !r.borrows(h) {
		why |= causeService
	}
	m := member{host: h, gpu: g}
	if why&causeMemory == 0 {
		why |= r.judgeRoom(&m, len(r.own) > 0 && r.ownHosts[h.name])
	}
	if !r.suits(&m, i) {
		why |= causeExpr
	}
	return why
}

func (r *run) hostReasons(h *host, why cause) []*gpuctlv1.Reason {
	var out []*gpuctlv1.Reason
	add := func(c cause, code, format string, args ...any) {
		if why&c != 0 {
			out = append(out, against(code, format, args...))
		}
	}
	add(causeUnknown, "unknown", "host %s has been removed", h.name)
	add(causeDown, "down", "host %s is down%s", h.name, because(h.object.GetMessage()))
	add(causeDraining, "draining", "host %s is draining%s", h.name, because(h.object.GetMessage()))
	if want := r.claim.GetHost(); want != "" && want != h.name {
		add(causeHost, "host", "the claim must be on host %s", want)
	} else {
		add(causeHost, "host", "the claim must not be on host %s", h.name)
	}
	switch {
	case h.name == r.claim.GetHome():
		add(causeHome, "home", "the claim is for GPUs of other hosts than %s only", h.name)
	case r.claim.GetRemote() == clusterv1.Remote_REMOTE_ALLOWED:
		add(causeHome, "home", "only GPUs of host %s are considered now", r.claim.GetHome())
	default:
		add(causeHome, "home", "the claim is for GPUs of host %s only", r.claim.GetHome())
	}
	add(causeLend, "lend", "host %s lends no GPU to others: it has no cluster.lendListen, or it is older", h.name)
	add(causeGroup, "group", "host %s has claim %s of the same group %s", h.name, r.rivals[h.name], r.claim.GetGroup())
	if why&causeLink != 0 {
		add(causeLink, "link", "%s over %s take %s, more than %s", size.Format(r.req.Bytes), bits(r.speed(h)), round(r.transfer(h)), r.req.Deadline)
	}
	return out
}

func because(s string) string {
	if s == "" {
		return ""
	}
	return ": " + s
}

func (r *run) reasons(h *host, v verdict) []*gpuctlv1.Reason {
	if v.why&^perClass != 0 {
		return r.reword(h, v)
	}
	k := wording{v.gpu.class, v.why, 0}
	if known := r.worded[k]; known != nil {
		return known
	}
	out := r.reword(h, v)
	r.word(k, out)
	return out
}

func (r *run) reword(h *host, v verdict) []*gpuctlv1.Reason {
	g, why, fit := v.gpu, v.why, v.fit
	var out []*gpuctlv1.Reason
	add := func(c cause, code, format string, args ...any) {
		if why&c != 0 {
			out = append(out, against(code, format, args...))
		}
	}
	o := g.object
	if why&causeExpr != 0 {
		r.objectGPU.Gpu = o
		if _, err := r.match(r.object); err != nil {
			add(causeExpr, "expr", "%v", err)
		} else {
			add(causeExpr, "expr", "%s is not true of it", r.claim.GetExpr())
		}
	}
	add(causeUnknown, "unknown", "its host no longer reports it")
	add(causeCordoned, "cordoned", "cordoned%s", because(o.GetCordonReason()))
	add(causeHealth, "health", "failed%s", because(o.GetHealthReason()))
	if why&causeRank != 0 {
		higher, hint := "higher", ""
		if r.req.Verb == Downgrade {
			higher = "lower"
		}
		if r.req.To != "" {
			hint = "; gpuctl migrate goes there all the same"
		}
		add(causeRank, "rank", "not a %s model than %s%s", higher, strings.Join(r.req.From, ","), hint)
	}
	if why&causeLimits != 0 {
		for _, s := range shortfalls(o.GetLimits(), r.claim.GetMinLimits()) {
			add(causeLimits, s.code, "%s: %s needed, it has %s", s.what, s.need, s.has)
		}
	}
	add(causeRuntime, "runtime", "no OpenCL runtime serves it")
	if why&causeMemory != 0 {
		add(causeMemory, "memory", "%s needed, it has %s", size.Format(r.need), size.Format(r.has(g)))
	}
	p := r.claim.GetProfile()
	if p != "" {
		add(causeProfile, "profile", "it has no profile %s", p)
	}
	if why&causeBusy != 0 { // finding out who has it takes longest, so do it only if needed
		switch held := r.holders(g); {
		case p != "":
			add(causeBusy, "busy", "no room for a slice of profile %s beside %s", p, held)
		case r.need == 0:
			add(causeBusy, "busy", "held by %s; wait for it, or share the GPU with --min-memory", held)
		default:
			add(causeBusy, "busy", "%s needed, %s left beside %s", size.Format(r.need), size.Format(r.left(g)), held)
		}
	}
	if p == "" {
		add(causeProfile, "profile", "none of its slices can be accounted for")
	}
	if why&causeKind != 0 {
		hint := ""
		if len(g.class.profiles) > 0 {
			hint = "; name one (--profile " + g.class.profiles[0].GetName() + "), or the kind (--where '\"mediated\" in kinds')"
		}
		add(causeKind, "kind", "mediated: only parts of it are given away, and only to who asks for them%s", hint)
	}
	add(causeService, "service", "service VM %s owns it: it is for sessions of other hosts, and for VMs (gpuctl attach VM %s --remote)", o.GetServer(), o.GetId())
	add(causeIsolation, "isolation", "another GPU of its isolation group %s is held", o.GetIsolationGroup())
	what := "GPUs"
	if r.claim.GetOneRuntime() {
		what = "GPUs of one runtime"
	}
	add(causeCount, "count", "%d %s needed, host %s has %d that fit", r.count, what, h.name, fit)
	return out
}

// has returns the memory of a GPU, or of the slices of it that the claim asks for.
func (r *run) has(g *gpu) uint64 {
	for _, p := range g.class.profiles {
		if p.GetName() == r.claim.GetProfile() {
			return p.GetMemory()
		}
	}
	return g.total
}

func (r *run) left(g *gpu) uint64 {
	if o := r.own[g.object.GetId()]; o != nil && o.reservation != nil {
		return o.room
	}
	return g.room
}

// holders returns in words which other claims have parts of a GPU.
func (r *run) holders(g *gpu) string {
	id := g.object.GetId()
	var names []string
	for v := range r.snap.view.VGPUsOfGPU(id) {
		claim := v.GetAssignment()
		if i := strings.LastIndexByte(claim, '.'); i > 0 {
			claim = claim[:i]
		}
		names = append(names, "claim "+claim)
	}
	for x := range r.snap.view.ReservationsOfGPU(id) {
		names = append(names, "a reservation of "+x.GetOwner())
	}
	slices.Sort(names)
	names = slices.Compact(names)
	const most = 5
	if n := len(names); n > most {
		names = append(names[:most], fmt.Sprintf("%d others", n-most))
	}
	if len(names) == 0 {
		return "nobody"
	}
	return strings.Join(names, ", ")
}

// summary counts the causes of all rejections.
func (r *run) summary() string {
	counts := map[string]int{}
	example := map[string]string{}
	total := 0
	r.rejected(func(x *clusterv1.Rejection) bool {
		total++
		for _, why := range x.GetReasons() {
			counts[why.GetCode()]++
			if example[why.GetCode()] == "" {
				example[why.GetCode()] = cmp.Or(x.GetGpu(), x.GetHost()) + ": " + why.GetMessage()
			}
		}
		return true
	})
	if total == 0 {
		return "there are no GPUs"
	}
	var codes []string
	for code := range counts {
		codes = append(codes, code)
	}
	slices.SortFunc(codes, func(a, b string) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), strings.Compare(a, b)) })
	var out []string
	for _, code := range codes[:min(3, len(codes))] {
		words := example[code]
		if n := counts[code]; n > 1 {
			words += fmt.Sprintf(" (and %d more)", n-1)
		}
		out = append(out, words)
	}
	return strings.Join(out, "; ")
}
