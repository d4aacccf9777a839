package placement

import (
	"cmp"
	"fmt"
	"math"
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
	maxCount     = 64 // GPUs of a claim
)

// cause is a set of reasons why something cannot serve.
type cause uint32

const (
	causeUnknown cause = 1 << iota
	causeDown
	causeDraining
	causeCordoned
	causeHealth
	causeHost
	causeGroup
	causeLink
	causeRank
	causeLimits
	causeRuntime
	causeMemory
	causeBusy
	causeProfile
	causeIsolation
	causeExpr
	causeCount
)

// obstacles are why a GPU gets nothing new, whatever its room.
func obstacles(g *clusterv1.GPU, h *clusterv1.Host) cause {
	c := hostObstacles(h)
	if !g.GetPresent() {
		c |= causeUnknown
	}
	if g.GetCordoned() {
		c |= causeCordoned
	}
	if g.GetHealth() == clusterv1.Health_HEALTH_FAILED {
		c |= causeHealth
	}
	return c
}

func hostObstacles(h *clusterv1.Host) cause {
	var c cause
	if h == nil {
		c |= causeUnknown
	}
	if h.GetDown() {
		c |= causeDown
	}
	if h.GetDraining() {
		c |= causeDraining
	}
	return c
}

// run is one decision.
type run struct {
	snap  *snapshot
	cache *query.Cache
	req   Request
	claim *clusterv1.Claim

	count  int
	need   uint64 // bytes of each GPU; 0: all of it
	want   uint64 // bytes; 0: it does not say
	policy clusterv1.Policy
	rank   uint32 // of the first GPU that it comes from

	query     *query.Query                          // the expression; nil: matches all
	rows      *query.Rows                           // its answers for all GPUs, where they can be had
	row       int                                   // of the first GPU of the host that is looked at; -1: not known
	match     func(*clusterv1.Object) (bool, error) // nil: matches all
	perClass  bool                                  // the expression says the same of all GPUs of a class
	object    *clusterv1.Object                     // that match is given
	objectGPU *clusterv1.Object_Gpu
	classes   []cause           // what is known of classes
	judged    []bool            // of which
	hostsNot  map[string]bool   // by name
	rivals    map[string]string // claims of the group, by host
	own       map[string]*own   // what the claim has of GPUs, by id
	ownHosts  map[string]bool
	fromIndex map[string]int
	fromHosts map[string]bool
	atOrigin  bool  // the host that is looked at is one of those
	fromHost  *host // nil: not known
	asking    string
	links     []link // known costs of links

	toGPUs  map[string]int // by id, their place
	toModel string
	toHost  string

	limit int
	fits  int
	best  []item
	spare []item // single GPUs, for a claim that may be on several hosts
	order uint32
	fit   []member // buffers
	rest  []member // buffer

	// Of what is rejected.
	verdicts []verdict // buffer
	worded   map[wording][]*gpuctlv1.Reason
}

// own is what a claim has of a GPU before the decision.
type own struct {
	kept        *clusterv1.Assignment
	reservation *clusterv1.Reservation
	// Without the reservation:
	room uint64
	free bool
}

// link is what the way to a host costs.
type link struct {
	speed uint64
	time  time.Duration
	cost  uint64
}

// member is a GPU of a candidate, and how the claim would have it.
type member struct {
	host        *host
	gpu         *gpu
	amount      uint64 // bytes; 0: the whole GPU
	room        uint64 // that is left for the claim
	kind        clusterv1.VGPUKind
	profile     string
	reservation string
	kept        bool
	hi, lo      uint64 // of it alone
}

// item is a candidate in the order of candidates.
type item struct {
	hi, lo  uint64
	order   uint32
	members []member
}

// Place finds where a claim can go. It is pure: it depends on nothing but the
// index and the request, and changes neither.
func Place(ix *Index, req Request) Decision {
	r := &run{snap: ix.current.Load(), cache: ix.cache, req: req, claim: req.Claim}
	d := Decision{Index: r.snap.view.Index()}
	if d.Err = r.prepare(); d.Err != nil {
		return d
	}
	d.run = r
	r.scan()
	if ctx := req.Context; ctx != nil && ctx.Err() != nil {
		// GPUs that were not asked for their expression count as unfit.
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
	case "model", "vendor", "type", "runtime", "platform", "driver", "rank", "profiles",
		"memory", "max_alloc", "local_memory", "max_work_group_size", "compute_units", "clock_mhz",
		"images", "fp64", "version", "extensions":
		return true
	}
	return false
}

// origin is where the claim comes from, and who asks.
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
	// The rank of a GPU that has left the inventory is not known; it counts as 0.
	g := r.snap.view.GPU(r.req.From[0])
	r.rank = g.GetRank()
	name, _, _ := strings.Cut(r.req.From[0], "/")
	r.fromHost = r.snap.host(name)
	if r.asking == "" {
		r.asking = name
	}
}

// possessions are what the claim has already: of assignments only those that a
// swap may leave where they are.
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

// without finds what a GPU has left if the reservation goes.
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

// scan looks at all hosts.
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

// short reports whether the claim cannot get what it needs of GPUs of which so many
// are free and so much can be had of one at most.
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

// scanNamed looks at the GPUs that the request names: they are one candidate.
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
		if g.flags&flagBlocked != 0 || h.class == nil && r.judgeClass(g.class) != 0 || r.toModel != "" && !r.ofToModel(g) {
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
			// Its expression may never be asked for.
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

// passed reports whether a host has nothing that is better than what was found, and
// counts what it has. How good the best of it can be is known without a look at
// its GPUs if they are of one class.
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
	// However they are put together.
	n := h.whole / r.count
	r.fits += n
	if r.count > 1 {
		r.order += uint32(n)
	}
	return true
}

// passedShares has a GPU with all the room that any of the host has; for pack
// it would be filled.
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

// together makes candidates of the GPUs of one host that fit.
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

// origins offers the GPUs that the claim comes from, if they all fit, and
// returns the others.
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

// ofRuntime makes candidates of GPUs that one executor can serve, sorted by
// NUMA node: first those of one node, then of what is left.
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

// beaten reports whether a candidate cannot be among the best any more. Of equal
// ones the first stays.
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

// keepSpare remembers the best single GPUs.
func (r *run) keepSpare(m member) {
	r.spare = insert(r.spare, item{m.hi, m.lo, uint32(len(r.spare)), []member{m}}, r.count)
}

func insert(items []item, it item, limit int) []item {
	at, _ := slices.BinarySearchFunc(items, it, func(a, b item) int {
		// After its equals: they were first.
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

// judgeHost says why a host cannot serve, whatever its GPUs.
func (r *run) judgeHost(h *host) cause {
	c := h.causes
	if want := r.claim.GetHost(); want != "" && want != h.name || r.hostsNot[h.name] {
		c |= causeHost
	}
	if r.toHost != "" && r.toHost != h.name {
		c |= causeHost
	}
	if len(r.rivals) > 0 {
		if _, ok := r.rivals[h.name]; ok {
			c |= causeGroup
		}
	}
	if r.req.Deadline > 0 && r.transfer(h) > r.req.Deadline {
		c |= causeLink
	}
	return c
}

// speed of the link to a host, bits per second; 0: not known.
func (r *run) speed(h *host) uint64 {
	if r.fromHost == nil {
		return h.speed
	}
	if h.speed == 0 || r.fromHost.speed == 0 {
		return 0
	}
	return min(h.speed, r.fromHost.speed)
}

// transfer is how long the bytes take to a host; 0 if none move or it is not
// known.
func (r *run) transfer(h *host) time.Duration {
	if r.req.Bytes == 0 || h.name == r.asking {
		return 0
	}
	return r.link(r.speed(h)).time
}

// link of a speed. There are few of them.
func (r *run) link(speed uint64) link {
	for _, l := range r.links {
		if l.speed == speed {
			return l
		}
	}
	// A link of unknown speed is as bad as a slow one.
	l := link{speed: speed, cost: 1<<16 - 1}
	if speed > 0 {
		seconds := float64(r.req.Bytes) * 8 / float64(speed)
		l.time = time.Duration(min(seconds*float64(time.Second), math.MaxInt64/2))
		ms := float64(l.time) / float64(time.Millisecond)
		l.cost = min(1<<16-2, uint64(1+2000*math.Log2(1+ms)))
	}
	if len(r.links) < 64 {
		r.links = append(r.links, l)
	}
	return l
}

// judgeClass says why GPUs of a class cannot serve, whatever else is with them.
func (r *run) judgeClass(c *class) cause {
	if r.judged[c.number] {
		return r.classes[c.number]
	}
	var why cause
	switch {
	case r.req.Verb == Upgrade && c.rank <= r.rank, r.req.Verb == Downgrade && c.rank >= r.rank:
		why |= causeRank
	}
	if len(shortfalls(c.like.GetLimits(), r.claim.GetMinLimits())) > 0 {
		why |= causeLimits
	}
	if r.claim.GetOneRuntime() && c.like.GetRuntimeKey() == "" {
		why |= causeRuntime
	}
	if c.like.GetLimits().GetGlobalMemory() < r.need {
		why |= causeMemory
	}
	if r.match != nil && r.perClass && !r.matches(c.like) {
		why |= causeExpr
	}
	r.classes[c.number], r.judged[c.number] = why, true
	return why
}

// matches evaluates the expression; one that fails does not hold.
func (r *run) matches(g *clusterv1.GPU) bool {
	r.objectGPU.Gpu = g
	ok, err := r.match(r.object)
	return ok && err == nil
}

// judge says how the claim would have a GPU, or why it cannot: one reason of
// possibly several. What suits says comes last, for it takes longest.
func (r *run) judge(h *host, g *gpu, special bool) (member, cause) {
	m := member{host: h, gpu: g}
	if g.flags&flagBlocked != 0 {
		return m, obstacles(g.object, h.object)
	}
	if why := r.judgeClass(g.class); why != 0 {
		return m, why
	}
	return m, r.judgeRoom(&m, special)
}

// suits reports whether the expression holds for a GPU, the i-th of its host, if
// it was not asked for the class.
func (r *run) suits(m *member, i int) bool {
	if r.match == nil || r.perClass {
		return true
	}
	if r.rows != nil && r.row >= 0 {
		if ok, known := r.rows.Match(r.row+i, m.gpu.object); known {
			return ok
		}
	}
	return r.matches(m.gpu.object)
}

// judgeRoom finds the part of a GPU that the claim would have.
func (r *run) judgeRoom(m *member, special bool) cause {
	g := m.gpu
	room, free := g.room, g.flags&flagFree != 0
	if special {
		if o := r.own[g.object.GetId()]; o != nil {
			if o.kept != nil && r.keeps(m, o.kept) {
				return 0
			}
			if o.reservation != nil {
				room, free, m.reservation = o.room, o.free, o.reservation.GetId()
			}
		}
	}
	m.room = room
	switch {
	case r.claim.GetProfile() != "":
		for _, p := range g.class.profiles {
			if p.GetName() == r.claim.GetProfile() {
				if p.GetMemory() < r.need {
					return causeMemory
				}
				return r.slice(m, p, room)
			}
		}
		return causeProfile
	case r.need == 0:
		return r.whole(m, free)
	case g.class.like.GetRuntime() != "":
		if room < r.need {
			return causeBusy
		}
		m.kind, m.amount = clusterv1.VGPUKind_VGPU_KIND_SHARE, min(r.want, room)
		return 0
	}
	return r.part(m, room, free)
}

// keeps reports whether what the claim has of a GPU is what it needs.
func (r *run) keeps(m *member, a *clusterv1.Assignment) bool {
	has := a.GetMemory()
	switch {
	case r.claim.GetProfile() != "" && has == 0, r.need == 0 && r.claim.GetProfile() == "" && has != 0:
		return false
	case has == 0:
		has = m.gpu.total
	}
	if has < r.need {
		return false
	}
	m.kept, m.room, m.amount = true, has, a.GetMemory()
	m.kind = clusterv1.VGPUKind_VGPU_KIND_SHARE
	if a.GetMemory() == 0 {
		m.kind = clusterv1.VGPUKind_VGPU_KIND_WHOLE
	}
	if r.claim.GetProfile() != "" {
		m.kind, m.profile = clusterv1.VGPUKind_VGPU_KIND_VENDOR, r.claim.GetProfile()
	}
	return true
}

func (r *run) whole(m *member, free bool) cause {
	switch {
	case !free:
		return causeBusy
	case !m.gpu.apart():
		return causeIsolation
	}
	m.kind, m.room = clusterv1.VGPUKind_VGPU_KIND_WHOLE, m.gpu.total
	return 0
}

// unlike is a profile that is taken of the GPU and does not go together with p.
func (m *member) unlike(p *clusterv1.Profile) string {
	if p.GetApart() == "" || len(m.host.taken) == 0 {
		return ""
	}
	for _, other := range m.gpu.class.profiles {
		if other.GetApart() != "" && other.GetApart() != p.GetApart() && m.host.taken[instance(m.gpu.object, other.GetName())] > 0 {
			return other.GetName()
		}
	}
	return ""
}

// slice takes one of a profile.
func (r *run) slice(m *member, p *clusterv1.Profile, room uint64) cause {
	switch {
	case p.GetMemory() == 0: // it cannot be accounted for
		return causeProfile
	case p.GetMemory() > room, m.host.taken[instance(m.gpu.object, p.GetName())] >= p.GetMaxInstances(), m.unlike(p) != "":
		return causeBusy
	}
	m.kind, m.profile, m.amount = clusterv1.VGPUKind_VGPU_KIND_VENDOR, p.GetName(), p.GetMemory()
	return 0
}

// part takes what suffices of a GPU that no runtime serves: the smallest slice
// that has all that is preferred, else the largest that suffices, else the card.
func (r *run) part(m *member, room uint64, free bool) cause {
	var why cause
	var fallback *clusterv1.Profile
	for _, p := range m.gpu.class.profiles {
		if p.GetMemory() < r.need {
			continue
		}
		trial := *m
		if c := r.slice(&trial, p, room); c != 0 {
			why |= c
			continue
		}
		if p.GetMemory() >= r.want {
			*m = trial
			return 0
		}
		fallback = p
	}
	if free && r.whole(m, free) == 0 {
		if fallback == nil || m.gpu.total >= r.want {
			return 0
		}
	}
	if fallback != nil {
		return r.slice(m, fallback, room)
	}
	return r.whole(m, free)
}

// The order of candidates, in bits of hi, the lower the better.
const (
	spanBit      = uint64(1) << 63
	scantBit     = uint64(1) << 62 // less than the claim prefers
	primaryShift = 30              // 32 bits: policy or verb
	degradedBit  = uint64(1) << 29
	linkShift    = 13 // 16 bits
	awayBit      = uint64(1) << 12
	numaShift    = 4 // 8 bits
	nicBit       = uint64(1) << 3
)

// hostBits are what all GPUs of a host have of the order.
func (r *run) hostBits(h *host) uint64 {
	var hi uint64
	r.atOrigin = len(r.fromHosts) > 0 && r.fromHosts[h.name]
	if r.req.Bytes > 0 {
		hi |= r.linkCost(h) << linkShift
	}
	if r.asking != "" && h.name != r.asking {
		hi |= awayBit
	}
	return hi
}

// first is what comes first in the order of a GPU taken alone; remains is what
// comes then.
func (r *run) first(m *member, hostBits uint64) uint64 {
	h, g := m.host, m.gpu
	hi := uint64(r.primary(m))<<primaryShift | hostBits
	if r.want > 0 && m.room < r.want {
		hi |= scantBit
	}
	if g.flags&flagDegraded != 0 {
		hi |= degradedBit
	}
	moves := r.req.Bytes > 0 || r.req.Verb == Migrate
	if moves && h.nicNUMA >= 0 && g.numa >= 0 && g.numa != h.nicNUMA {
		hi |= nicBit
	}
	return hi
}

// linkCost is the time that the bytes take, in steps that grow with it.
func (r *run) linkCost(h *host) uint64 {
	if h.name == r.asking {
		return 0
	}
	return r.link(r.speed(h)).cost
}

// primary is what the policy or verb says of a GPU, the lower the better.
func (r *run) primary(m *member) uint32 {
	switch r.req.Verb {
	case Migrate, Resume:
		return r.distance(m)
	case New, Upgrade, Downgrade:
	}
	h, g := m.host, m.gpu
	switch r.policy {
	case clusterv1.Policy_POLICY_PACK:
		if m.kind == clusterv1.VGPUKind_VGPU_KIND_WHOLE {
			return uint32(min(h.free, 1<<10))<<10 | h.unheld
		}
		return untouched(g)<<21 | permille(m.room-m.amount, g.total)<<10 | h.unheld
	case clusterv1.Policy_POLICY_SPREAD:
		return h.held<<10 | permille(g.total-min(g.total, m.room), g.total)
	case clusterv1.Policy_POLICY_CHEAPEST:
		// Of what has less than is preferred, the most.
		if r.want > 0 && m.room < r.want {
			return math.MaxUint32 - g.class.rank
		}
		return g.class.rank
	case clusterv1.Policy_POLICY_BEST, clusterv1.Policy_POLICY_UNSPECIFIED:
	}
	return math.MaxUint32 - g.class.rank
}

// distance orders what is closest to where a claim was: the same GPU, then the
// nearest model, the higher of two before the lower.
func (r *run) distance(m *member) uint32 {
	if r.atOrigin {
		if _, ok := r.fromIndex[m.gpu.object.GetId()]; ok {
			return 0
		}
	}
	d := 2 * (int64(m.gpu.class.rank) - int64(r.rank))
	if d < 0 {
		d = 1 - d
	}
	return uint32(min(1+d, math.MaxUint32))
}

func untouched(g *gpu) uint32 {
	if g.flags&flagFree != 0 {
		return 1
	}
	return 0
}

func permille(part, of uint64) uint32 {
	if of == 0 {
		return 0
	}
	return uint32(min(1000, float64(part)/float64(of)*1000))
}

// remains is what decides between candidates that are as good in all else: for
// pack and spread the model, then how little is left unused.
func (r *run) remains(m *member) uint64 {
	h, g := m.host, m.gpu
	var lo uint64
	spread := false
	switch r.policy {
	case clusterv1.Policy_POLICY_PACK:
		lo = uint64(g.class.rank) << 32
	case clusterv1.Policy_POLICY_SPREAD:
		lo = uint64(g.class.rank) << 32
		spread = true
	case clusterv1.Policy_POLICY_BEST, clusterv1.Policy_POLICY_CHEAPEST, clusterv1.Policy_POLICY_UNSPECIFIED:
	}
	switch {
	case spread || m.kept:
		return lo
	case r.want > 0 && m.room < r.want:
		return lo | uint64(1000-permille(m.room, g.total))
	}
	lo |= uint64(min(h.free, 1<<10-1))
	if m.kind == clusterv1.VGPUKind_VGPU_KIND_WHOLE && r.want == 0 {
		return lo
	}
	amount := m.amount
	if m.kind == clusterv1.VGPUKind_VGPU_KIND_WHOLE {
		amount = g.total
	}
	return lo | uint64(permille(amount-min(amount, r.want), g.total))<<22 | uint64(untouched(g))<<21 |
		uint64(permille(m.room-min(m.room, amount), g.total))<<10
}

// numaBits count the NUMA nodes beyond one.
func numaBits(members []member) uint64 {
	n := uint64(0)
	for i := 1; i < len(members); i++ {
		if !slices.ContainsFunc(members[:i], func(m member) bool { return m.gpu.numa == members[i].gpu.numa }) {
			n++
		}
	}
	return min(n, 255) << numaShift
}
