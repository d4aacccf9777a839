package placement

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/cluster/state"
)

const (
	defaultLimit = 10
	maxLimit     = 1000
	maxCount     = 64 // most GPUs of a claim
)

// run is the computation of one decision.
type run struct {
	snap  *snapshot
	cache *query.Cache
	req   Request
	claim *clusterv1.Claim

	count  int
	need   uint64 // bytes of each GPU; 0: the whole GPU
	want   uint64 // preferred bytes; 0: not stated
	policy clusterv1.Policy
	rank   uint32 // rank of the first GPU that the claim comes from

	query     *query.Query                          // the expression; nil: everything matches
	rows      *query.Rows                           // answers of the expression for all GPUs; nil: not available
	row       int                                   // row of the present host's first GPU; -1: unknown
	match     func(*clusterv1.Object) (bool, error) // evaluates the expression; nil: everything matches
	perClass  bool                                  // the expression has the same value for all GPUs of a class
	object    *clusterv1.Object                     // argument of match, used again for each call
	objectGPU *clusterv1.Object_Gpu
	classes   []cause           // causes against classes that were judged
	judged    []bool            // which classes were judged
	hostsNot  map[string]bool   // hosts that the claim excludes
	rivals    map[string]string // claims of the same group, by host
	own       map[string]*own   // what the claim has on GPUs, by id
	ownHosts  map[string]bool
	fromIndex map[string]int
	fromHosts map[string]bool
	atOrigin  bool  // the claim comes from the present host
	fromHost  *host // nil: unknown
	asking    string
	links     []link // costs of speeds that occurred

	toGPUs  map[string]int // index in To, by id
	toModel string
	toHost  string

	limit int
	fits  int
	best  []item
	spare []item // best single GPUs, for a claim that may use several hosts
	order uint32
	fit   []member // buffer
	rest  []member // buffer

	// Used for rejections.
	verdicts []verdict // buffer
	worded   map[wording][]*gpuctlv1.Reason
}

// own is what the claim has on a GPU before the decision.
type own struct {
	kept        *clusterv1.Assignment
	reservation *clusterv1.Reservation
	// Room and free of the GPU without the reservation:
	room uint64
	free bool
}

// link is the cost of the network link to a host.
type link struct {
	speed uint64
	time  time.Duration
	cost  uint64
}

// member is a GPU of a candidate, with the part that the claim would get.
type member struct {
	host        *host
	gpu         *gpu
	amount      uint64 // bytes; 0: the whole GPU
	room        uint64 // bytes available to the claim
	kind        clusterv1.VGPUKind
	profile     string
	reservation string
	kept        bool
	hi, lo      uint64 // order of this GPU alone
}

// item is a candidate with its order.
type item struct {
	hi, lo  uint64
	order   uint32
	members []member
}

// Place finds where a claim can go. It is a pure function of the index and the request,
// and changes neither. Decision.Err wraps ErrInvalid or ErrNotFound if the request cannot
// be answered.
func Place(ix *Index, req Request) Decision {
	r := &run{snap: ix.current.Load(), cache: ix.cache, req: req, claim: req.Claim}
	d := Decision{Index: r.snap.view.Index()}
	if d.Err = r.prepare(); d.Err != nil {
		return d
	}
	d.run = r
	r.scan()
	if ctx := req.Context; ctx != nil && ctx.Err() != nil {
		// GPUs for which the expression was not evaluated count as not fitting.
		d.Err = fmt.Errorf("claim %s: the search for its GPUs was given up: %w", req.Claim.GetId(), ctx.Err())
		return d
	}
	d.Fits = r.fits
	for _, it := range r.best {
		d.Candidates = append(d.Candidates, r.candidate(it))
	}
	r.best, r.spare, r.fit = nil, nil, nil
	return d
}

func (r *run) prepare() error {
	c := r.claim
	if c == nil {
		return fmt.Errorf("%w: no claim", ErrInvalid)
	}
	if c.GetCount() > maxCount {
		return fmt.Errorf("%w: claim %s: %d GPUs, more than %d", ErrInvalid, c.GetId(), c.GetCount(), maxCount)
	}
	switch r.req.Verb {
	case New, Upgrade, Downgrade, Migrate, Resume:
	default:
		return fmt.Errorf("%w: claim %s: %q is not new, upgrade, downgrade, migrate or resume", ErrInvalid, c.GetId(), r.req.Verb)
	}
	r.count = int(max(1, c.GetCount()))
	r.need = least(c)
	r.want = max(c.GetMinMemory(), c.GetPreferMemory(), r.need)
	r.limit = r.req.Limit
	if r.limit <= 0 {
		r.limit = defaultLimit
	}
	r.limit = min(r.limit, maxLimit)
	r.policy = c.GetPolicy()
	if r.policy == clusterv1.Policy_POLICY_UNSPECIFIED {
		r.policy = clusterv1.Policy_POLICY_BEST
		if r.want > 0 {
			r.policy = clusterv1.Policy_POLICY_CHEAPEST
		}
	}
	switch r.req.Verb {
	case Upgrade:
		r.policy = clusterv1.Policy_POLICY_BEST
	case Downgrade:
		r.policy = clusterv1.Policy_POLICY_CHEAPEST
	case New, Migrate, Resume:
	}
	if err := r.compile(); err != nil {
		return err
	}
	r.classes, r.judged = make([]cause, r.snap.classes), make([]bool, r.snap.classes)
	r.origin()
	r.possessions()
	if g := c.GetGroup(); g != "" {
		r.rivals = map[string]string{}
		for other := range r.snap.view.ClaimsOfGroup(g) {
			if other.GetId() == c.GetId() {
				continue
			}
			for a := range r.snap.view.AssignmentsOfClaim(other.GetId()) {
				if have, ok := r.rivals[a.GetHost()]; !ok || other.GetId() < have {
					r.rivals[a.GetHost()] = other.GetId()
				}
			}
		}
	}
	if len(c.GetHostsNot()) > 0 {
		r.hostsNot = map[string]bool{}
		for _, h := range c.GetHostsNot() {
			r.hostsNot[h] = true
		}
	}
	return r.resolve(r.req.To)
}

func (r *run) compile() error {
	q := r.req.Expr
	if q == nil {
		if strings.TrimSpace(r.claim.GetExpr()) == "" {
			return nil
		}
		var err error
		if q, err = r.cache.Compile(clusterv1.Kind_KIND_GPU, r.claim.GetExpr()); err != nil {
			return fmt.Errorf("%w: claim %s: %w", ErrInvalid, r.claim.GetId(), err)
		}
	}
	if q.Kind() != clusterv1.Kind_KIND_GPU {
		return fmt.Errorf("%w: claim %s: its expression is over a %s, not a gpu", ErrInvalid, r.claim.GetId(), query.KindName(q.Kind()))
	}
	if r.req.Context != nil {
		q = q.Within(r.req.Context)
	}
	r.query, r.match = q, q.Matcher()
	r.perClass = true
	for _, f := range query.Fields(clusterv1.Kind_KIND_GPU) {
		if q.Uses(f.Name) && !ofClass(f.Name) {
			r.perClass = false
		}
	}
	r.objectGPU = &clusterv1.Object_Gpu{}
	r.object = &clusterv1.Object{Object: r.objectGPU}
	r.row = -1
	return nil
}

// ofClass reports whether all GPUs of a class have the same value of a field.
func ofClass(field string) bool {
	switch field {
	case "model", "vendor", "type", "runtime", "platform", "driver", "rank", "profiles", "kinds",
		"memory", "max_alloc", "local_memory", "max_work_group_size", "compute_units", "clock_mhz",
		"images", "fp64", "version", "extensions":
		return true
	}
	return false
}

// origin finds out which GPUs the claim comes from, and which host asks.
func (r *run) origin() {
	r.asking = r.req.Host
	if len(r.req.From) == 0 {
		r.fromHost = r.snap.host(r.req.Host)
		return
	}
	r.fromIndex, r.fromHosts = map[string]int{}, map[string]bool{}
	for i, id := range r.req.From {
		r.fromIndex[id] = i
		name, _, _ := strings.Cut(id, "/")
		r.fromHosts[name] = true
	}
	// A GPU that was removed from the inventory has rank 0.
	g := r.snap.view.GPU(r.req.From[0])
	r.rank = g.GetRank()
	name, _, _ := strings.Cut(r.req.From[0], "/")
	r.fromHost = r.snap.host(name)
	if r.asking == "" {
		r.asking = name
	}
}

// possessions finds out what the claim has already. Assignments that are being released
// do not count.
func (r *run) possessions() {
	r.own = map[string]*own{}
	get := func(gpu string) *own {
		o := r.own[gpu]
		if o == nil {
			o = &own{}
			r.own[gpu] = o
		}
		return o
	}
	id := r.claim.GetId()
	if r.req.Verb != New {
		for a := range r.snap.view.AssignmentsOfClaim(id) {
			if a.GetResidence() != clusterv1.Residence_RESIDENCE_RELEASING {
				get(a.GetGpu()).kept = a
			}
		}
	}
	owners := []string{id}
	for m := range r.snap.view.MigrationsOfClaim(id) {
		owners = append(owners, m.GetId())
	}
	for _, owner := range owners {
		if owner == "" {
			continue
		}
		for x := range r.snap.view.ReservationsOfOwner(owner) {
			if o := get(x.GetGpu()); o.reservation == nil {
				o.reservation = x
			}
		}
	}
	r.ownHosts = map[string]bool{}
	for gpu, o := range r.own {
		name, _, _ := strings.Cut(gpu, "/")
		r.ownHosts[name] = true
		if o.reservation != nil {
			o.without(r.snap.view, gpu)
		}
	}
}

// without computes the room of a GPU without the reservation.
func (o *own) without(v *state.View, gpu string) {
	g := v.GPU(gpu)
	reserved := func(x *clusterv1.Reservation) uint64 {
		if x.GetMemory() == 0 {
			return g.GetLimits().GetGlobalMemory()
		}
		return x.GetMemory()
	}
	o.free = true
	whole := false
	for s := range v.VGPUsOfGPU(gpu) {
		o.free = false
		whole = whole || s.GetKind() == clusterv1.VGPUKind_VGPU_KIND_WHOLE
	}
	for x := range v.ReservationsOfGPU(gpu) {
		if x.GetId() != o.reservation.GetId() {
			o.free = false
			whole = whole || x.GetMemory() == 0
		}
	}
	used := g.GetUsedMemory() - min(g.GetUsedMemory(), reserved(o.reservation))
	if total := g.GetLimits().GetGlobalMemory(); !whole && used < total {
		o.room = total - used
	}
}

// scan examines all hosts.
func (r *run) scan() {
	if len(r.toGPUs) > 0 {
		r.scanNamed()
		return
	}
	if only := cmp.Or(r.toHost, r.claim.GetHost()); only != "" {
		if h := r.snap.host(only); h != nil {
			r.scanHost(h)
		}
	} else {
		r.scanAll()
	}
	if r.fits == 0 && len(r.spare) == r.count {
		r.fits = 1
		r.offer(r.spare[0].hi|spanBit, r.spare[0].lo, singles(r.spare))
	}
}

func (r *run) scanAll() {
	if r.match != nil && !r.perClass {
		r.rows = r.cache.Rows(r.query, r.snap.view)
	}
	row := 0
	for _, b := range r.snap.blocks {
		if len(r.own) == 0 && r.short(b.free, b.room) {
			row += b.gpus
			continue
		}
		for i := range b.hosts {
			h := &b.hosts[i]
			r.row = row
			row += len(h.gpus)
			r.scanHost(h)
		}
	}
	r.row = -1
}

// short reports whether no GPU of a block can satisfy the claim. free is the number of its
// free GPUs, room the most bytes that a claim can get of one of them.
func (r *run) short(free int, room uint64) bool {
	if r.need == 0 && r.claim.GetProfile() == "" {
		return free == 0
	}
	return room < max(1, r.need)
}

func singles(items []item) []member {
	var out []member
	for _, it := range items {
		out = append(out, it.members...)
	}
	return out
}

// scanNamed examines the GPUs that the request names. Together they are one candidate.
func (r *run) scanNamed() {
	members := make([]member, r.count)
	var hi, lo uint64
	for id, i := range r.toGPUs {
		name, _, _ := strings.Cut(id, "/")
		h := r.snap.host(name)
		if h == nil || r.judgeHost(h) != 0 {
			return
		}
		n := slices.IndexFunc(h.gpus, func(g gpu) bool { return g.object.GetId() == id })
		if n < 0 {
			return
		}
		m, why := r.judge(h, &h.gpus[n], r.ownHosts[h.name])
		if why != 0 || !r.suits(&m, n) {
			return
		}
		m.hi, m.lo = r.first(&m, r.hostBits(h)), r.remains(&m)
		hi, lo = max(hi, m.hi), max(lo, m.lo)
		members[i] = m
	}
	r.fits++
	for _, m := range members[1:] {
		if m.host != members[0].host {
			hi |= spanBit
		}
	}
	r.offer(hi|numaBits(members), lo, members)
}

func (r *run) scanHost(h *host) {
	own := len(r.own) > 0 && r.ownHosts[h.name]
	if !own && r.short(h.free, h.room) || h.class != nil && r.judgeClass(h.class) != 0 || r.judgeHost(h) != 0 {
		return
	}
	bits := r.hostBits(h)
	if !own && r.passed(h, bits) {
		return
	}
	fit := r.fit[:0]
	wholly := r.need == 0 && r.claim.GetProfile() == ""
	var m member
	for i := range h.gpus {
		g := &h.gpus[i]
		if g.flags&flagBlocked != 0 || h.class == nil && r.judgeClass(g.class) != 0 || r.toModel != "" && !r.ofToModel(g) || g.class.service && !r.borrows(h) {
			continue
		}
		if !own && g.flags&flagFree == 0 && (g.room < r.need || wholly) {
			continue
		}
		m = member{host: h, gpu: g}
		if r.judgeRoom(&m, own) != 0 {
			continue
		}
		if r.count > 1 {
			if r.suits(&m, i) {
				m.hi, m.lo = r.first(&m, bits), r.remains(&m)
				fit = append(fit, m)
			}
			continue
		}
		m.hi = r.first(&m, bits)
		if len(r.best) == r.limit && m.hi > r.best[len(r.best)-1].hi {
			r.fits++
			continue
		}
		m.lo = r.remains(&m)
		if r.beaten(m.hi, m.lo) {
			// Counted without evaluating its expression.
			r.fits++
			continue
		}
		if !r.suits(&m, i) {
			continue
		}
		r.fits++
		r.order++
		r.offer(m.hi, m.lo, []member{m})
	}
	r.fit = fit
	if r.count > 1 {
		r.together(fit)
	}
}

// passed reports whether no GPU of a host can be better than the candidates found, and
// counts those that fit. If all GPUs have the same class, the best possible order is
// known without examining each GPU.
func (r *run) passed(h *host, bits uint64) bool {
	if r.claim.GetProfile() != "" || h.class == nil || len(r.best) < r.limit || r.atOrigin || r.toModel != "" {
		return false
	}
	if r.need == 0 {
		return r.passedWhole(h, bits)
	}
	return r.count == 1 && h.class.like.GetRuntime() != "" && r.passedShares(h, bits)
}

func (r *run) passedWhole(h *host, bits uint64) bool {
	if r.count > 1 && (r.req.Span || r.match != nil && !r.perClass) {
		return false
	}
	if h.whole < r.count {
		return true
	}
	g := gpu{class: h.class, total: h.gpus[0].total, room: h.gpus[0].total, numa: -1, flags: flagFree}
	m := member{host: h, gpu: &g, room: g.total, kind: clusterv1.VGPUKind_VGPU_KIND_WHOLE}
	if !r.beaten(r.first(&m, bits), r.remains(&m)) {
		return false
	}
	// The number of candidates does not depend on how the GPUs are combined.
	n := h.whole / r.count
	r.fits += n
	if r.count > 1 {
		r.order += uint32(n)
	}
	return true
}

// passedShares computes the order of a GPU that has the most room of any GPU of the host.
// For pack, it assumes that the claim would fill that GPU.
func (r *run) passedShares(h *host, bits uint64) bool {
	g := gpu{class: h.class, total: h.gpus[0].total, room: h.room, numa: -1}
	m := member{host: h, gpu: &g, room: h.room, amount: min(r.want, h.room), kind: clusterv1.VGPUKind_VGPU_KIND_SHARE}
	if r.policy == clusterv1.Policy_POLICY_PACK {
		m.amount = m.room
	}
	if r.first(&m, bits) <= r.best[len(r.best)-1].hi {
		return false
	}
	for i := range h.gpus {
		if g := &h.gpus[i]; g.flags&flagBlocked == 0 && g.room >= r.need {
			r.fits++
		}
	}
	return true
}

func (r *run) ofToModel(g *gpu) bool {
	return strings.EqualFold(g.class.like.GetModel(), r.toModel)
}

// together makes candidates of several GPUs that fit, of one host.
func (r *run) together(fit []member) {
	if r.req.Span && !r.claim.GetOneRuntime() {
		for _, m := range fit {
			r.keepSpare(m)
		}
	}
	if len(fit) < r.count {
		return
	}
	if fit = r.origins(fit); len(fit) < r.count {
		return
	}
	runtime := func(m member) string {
		if !r.claim.GetOneRuntime() {
			return ""
		}
		return m.gpu.class.like.GetRuntimeKey()
	}
	slices.SortStableFunc(fit, func(a, b member) int {
		return cmp.Or(
			strings.Compare(runtime(a), runtime(b)), cmp.Compare(a.gpu.numa, b.gpu.numa),
			cmp.Compare(a.hi, b.hi), cmp.Compare(a.lo, b.lo),
		)
	})
	for from := 0; from < len(fit); {
		to := from + 1
		for to < len(fit) && runtime(fit[to]) == runtime(fit[from]) {
			to++
		}
		r.ofRuntime(fit[from:to])
		from = to
	}
}

// origins makes a candidate of the GPUs that the claim comes from if all of them fit, and
// returns the other GPUs.
func (r *run) origins(fit []member) []member {
	if len(r.fromIndex) != r.count || r.req.Verb == New {
		return fit
	}
	isFrom := func(m member) bool {
		_, ok := r.fromIndex[m.gpu.object.GetId()]
		return ok
	}
	var mine []member
	for _, m := range fit {
		if isFrom(m) {
			mine = append(mine, m)
		}
	}
	if len(mine) != r.count {
		return fit
	}
	slices.SortFunc(mine, func(a, b member) int {
		return cmp.Compare(r.fromIndex[a.gpu.object.GetId()], r.fromIndex[b.gpu.object.GetId()])
	})
	r.chunk(mine)
	return slices.DeleteFunc(fit, isFrom)
}

// ofRuntime makes candidates of GPUs that one executor can use, sorted by NUMA node:
// first of GPUs of one node, then of the remaining ones.
func (r *run) ofRuntime(fit []member) {
	left := r.rest[:0]
	for from := 0; from < len(fit); {
		to := from + 1
		for to < len(fit) && fit[to].gpu.numa == fit[from].gpu.numa {
			to++
		}
		node := fit[from:to]
		for ; len(node) >= r.count; node = node[r.count:] {
			r.chunk(node[:r.count])
		}
		left = append(left, node...)
		from = to
	}
	r.rest = left
	if len(left) < r.count {
		return
	}
	slices.SortStableFunc(left, func(a, b member) int { return cmp.Or(cmp.Compare(a.hi, b.hi), cmp.Compare(a.lo, b.lo)) })
	for ; len(left) >= r.count; left = left[r.count:] {
		r.chunk(left[:r.count])
	}
}

func (r *run) chunk(members []member) {
	hi, lo := numaBits(members), uint64(0)
	var worst uint64
	for _, m := range members {
		worst, lo = max(worst, m.hi), max(lo, m.lo)
	}
	hi |= worst
	r.fits++
	r.order++
	if !r.beaten(hi, lo) {
		r.offer(hi, lo, slices.Clone(members))
	}
}

// beaten reports whether a candidate cannot be among the best. Of equal candidates, the
// first one is kept.
func (r *run) beaten(hi, lo uint64) bool {
	if len(r.best) < r.limit {
		return false
	}
	last := &r.best[len(r.best)-1]
	return hi > last.hi || hi == last.hi && lo >= last.lo
}

func (r *run) offer(hi, lo uint64, members []member) {
	r.best = insert(r.best, item{hi, lo, r.order, members}, r.limit)
}

// keepSpare keeps the best single GPUs.
func (r *run) keepSpare(m member) {
	r.spare = insert(r.spare, item{m.hi, m.lo, uint32(len(r.spare)), []member{m}}, r.count)
}

func insert(items []item, it item, limit int) []item {
	at, _ := slices.BinarySearchFunc(items, it, func(a, b item) int {
		// Insert after equal items, which came first.
		return cmp.Or(cmp.Compare(a.hi, b.hi), cmp.Compare(a.lo, b.lo), -1)
	})
	if at >= limit {
		return items
	}
	if len(items) == limit {
		items = items[:limit-1]
	}
	return slices.Insert(items, at, it)
}
