package placement

import (
	"iter"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// blockHosts is how many hosts are copied when one of them changes.
const blockHosts = 64

// flags of a GPU.
const (
	flagBlocked   uint16 = 1 << iota // it gets nothing new
	flagFree                         // no claim has any part of it
	flagDegraded                     // it may be used, but its health is degraded
	flagEntangled                    // another GPU of its isolation group is in use
)

// gpu is what a decision reads about a GPU.
type gpu struct {
	object *clusterv1.GPU
	total  uint64 // bytes
	room   uint64 // bytes left
	class  *class
	numa   int32
	flags  uint16
}

// class is what several GPUs have in common.
type class struct {
	number   int
	like     *clusterv1.GPU // one of these GPUs
	rank     uint32
	profiles []*clusterv1.Profile // sorted by memory, then name
	mediated bool                 // parts of it are given away, and the whole never
	service  bool                 // it is a service VM's: for sessions of other hosts and of VMs only
}

// host is a host with its GPUs.
type host struct {
	name    string
	object  *clusterv1.Host // nil: the host was removed, but its assignments still exist
	gpus    []gpu           // sorted by id
	class   *class          // class of all its GPUs; nil: they have different ones
	causes  cause           // why it gets nothing new
	free    int             // number of usable GPUs that no claim has any part of
	whole   int             // number of those that can be assigned as a whole
	room    uint64          // most bytes that a claim could get of one GPU
	used    uint64          // bytes in use, on usable and other GPUs
	total   uint64          // bytes
	held    uint32          // thousandths of the bytes
	unheld  uint32          // thousandths of the bytes
	speed   uint64          // of its fastest network card, bits per second; 0: unknown
	nicNUMA int32           // NUMA node of that card; -1: unknown
	taken   map[string]uint32
}

// key returns a key that sorts hosts as the ids of their GPUs are sorted.
func key(host string) string { return host + "/" }

// block has some hosts in order, and the maxima over them.
type block struct {
	hosts []host
	gpus  int // number of GPUs of all of them
	free  int
	room  uint64
}

func newBlock(hosts []host) *block {
	b := &block{hosts: hosts}
	b.seal()
	return b
}

// seal computes the maxima over the hosts.
func (b *block) seal() {
	b.gpus, b.free, b.room = 0, 0, 0
	for i := range b.hosts {
		b.gpus += len(b.hosts[i].gpus)
		b.free = max(b.free, b.hosts[i].free)
		b.room = max(b.room, b.hosts[i].room)
	}
}

// snapshot is the index of one view.
type snapshot struct {
	view    *state.View
	changed <-chan struct{}
	blocks  []*block
	classes int
	gpus    int
	hosts   int
}

// Index is the input of Place. It is safe for concurrent use: a decision uses the last
// update that was complete when the decision began.
type Index struct {
	mu      sync.Mutex // held during updates
	current atomic.Pointer[snapshot]
	classes map[string]*class
	limits  map[*gpuctlv1.Limits]string // their encoded form
	cache   *query.Cache                // for expressions over single GPUs
}

// NewIndex makes an index of a view.
func NewIndex(v *state.View) *Index {
	ix := &Index{cache: query.NewCache()}
	ix.Update(v)
	return ix
}

// At returns the log index of the view that the index follows.
func (ix *Index) At() uint64 { return ix.current.Load().view.Index() }

// Update brings the index up to date with a view. It reads only the hosts that have
// changed and those whose GPUs have changed. It ignores a view that is older than the
// last one.
func (ix *Index) Update(v *state.View) {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	old := ix.current.Load()
	if old != nil {
		if v == old.view || v.Index() < old.view.Index() {
			return
		}
		select {
		case <-old.changed:
		default:
			same := *old
			same.view = v
			ix.current.Store(&same)
			return
		}
	}
	next := &snapshot{view: v, changed: v.Changed(clusterv1.Kind_KIND_HOST, clusterv1.Kind_KIND_GPU)}
	if old == nil || len(ix.limits) > 2*old.gpus+1024 || len(ix.classes) > old.gpus+1024 {
		// Forget the classes that no GPU has any more.
		ix.classes, ix.limits = map[string]*class{}, map[*gpuctlv1.Limits]string{}
		old = nil
	}
	names, known := changed(v, old)
	if known && len(names) <= 64+old.hosts/8 {
		next.blocks, next.hosts, next.gpus = ix.follow(v, old, names)
	} else {
		next.blocks, next.hosts, next.gpus = ix.build(v, old)
	}
	next.classes = len(ix.classes)
	ix.current.Store(next)
}

// changed returns the names of the hosts that have changed since a snapshot, themselves
// or their GPUs, in the order of hosts. It returns false if that is unknown.
func changed(v *state.View, old *snapshot) ([]string, bool) {
	if old == nil {
		return nil, false
	}
	names, ok := v.ChangedSince(old.view, clusterv1.Kind_KIND_HOST)
	if !ok {
		return nil, false
	}
	gpus, ok := v.ChangedSince(old.view, clusterv1.Kind_KIND_GPU)
	if !ok {
		return nil, false
	}
	for _, id := range gpus {
		name, _, _ := strings.Cut(id, "/")
		names = append(names, name)
	}
	slices.SortFunc(names, compareHosts)
	return slices.Compact(names), true
}

// compareHosts sorts hosts as the ids of their GPUs are sorted.
func compareHosts(a, b string) int {
	n := min(len(a), len(b))
	if a[:n] == b[:n] && len(a) != len(b) {
		return strings.Compare(key(a)[n:], key(b)[n:])
	}
	return strings.Compare(a, b)
}

// follow makes the blocks of a view from those of an older one. Only the hosts with the
// given names have changed.
func (ix *Index) follow(v *state.View, old *snapshot, names []string) (blocks []*block, hosts, gpus int) {
	blocks, hosts, gpus = slices.Clone(old.blocks), old.hosts, old.gpus
	fresh := map[*block]bool{} // blocks that have been copied already
	for _, name := range names {
		object := v.Host(name)
		of := slices.Collect(v.GPUsOfHost(name))
		there := object != nil || len(of) > 0
		n, i, found := find(blocks, name)
		if !found && !there {
			continue
		}
		if len(blocks) == 0 {
			blocks, n, i = []*block{{}}, 0, 0
		}
		b := blocks[n]
		if !fresh[b] {
			b = &block{hosts: append(make([]host, 0, len(b.hosts)+1), b.hosts...)}
			blocks[n], fresh[b] = b, true
		}
		if found {
			gpus -= len(b.hosts[i].gpus)
			hosts--
		}
		switch {
		case !there:
			b.hosts = slices.Delete(b.hosts, i, i+1)
			blocks = settle(blocks, n)
			continue
		case !found:
			b.hosts = slices.Insert(b.hosts, i, host{})
		}
		b.hosts[i] = ix.host(v, name, object, of, nil)
		hosts++
		gpus += len(of)
		if len(b.hosts) > 2*blockHosts {
			rest := &block{hosts: slices.Clone(b.hosts[blockHosts:])}
			b.hosts = slices.Clip(b.hosts[:blockHosts])
			blocks, fresh[rest] = slices.Insert(blocks, n+1, rest), true
		}
	}
	for b := range fresh {
		b.seal()
	}
	return blocks, hosts, gpus
}

// settle removes an empty block, and joins a small one with a neighbour.
func settle(blocks []*block, n int) []*block {
	switch size := len(blocks[n].hosts); {
	case size == 0:
		return slices.Delete(blocks, n, n+1)
	case size >= blockHosts/4:
		return blocks
	}
	for _, first := range []int{n, n - 1} {
		if first < 0 || first+1 >= len(blocks) {
			continue
		}
		if a, b := blocks[first].hosts, blocks[first+1].hosts; len(a)+len(b) <= blockHosts {
			return slices.Replace(blocks, first, first+2, newBlock(slices.Concat(a, b)))
		}
	}
	return blocks
}

// build makes all blocks. Hosts that have not changed are taken from old.
func (ix *Index) build(v *state.View, old *snapshot) ([]*block, int, int) {
	hosts := slices.Collect(v.Hosts())
	gpus := slices.Collect(v.GPUs())
	was := map[string]*host{}
	if old != nil {
		for h := range old.all() {
			was[h.name] = h
		}
	}
	objects := make(map[string]*clusterv1.Host, len(hosts))
	names := make([]string, 0, len(hosts))
	for _, h := range hosts {
		objects[h.GetName()] = h
		names = append(names, h.GetName())
	}
	of := make(map[string][]*clusterv1.GPU, len(hosts))
	for from := 0; from < len(gpus); {
		name, to := gpus[from].GetHost(), from+1
		for to < len(gpus) && gpus[to].GetHost() == name {
			to++
		}
		if objects[name] == nil && of[name] == nil {
			names = append(names, name)
		}
		of[name] = gpus[from:to]
		from = to
	}
	slices.SortFunc(names, compareHosts)
	count := len(names)
	var out []*block
	for len(names) > 0 {
		n := min(len(names), blockHosts)
		b := &block{hosts: make([]host, 0, n)}
		size := 0
		for _, name := range names[:n] {
			size += len(of[name])
		}
		room := make([]gpu, size) // all GPUs next to each other in memory: a scan then has fewer cache misses
		for _, name := range names[:n] {
			h := was[name]
			if h != nil && h.object == objects[name] && slices.EqualFunc(h.gpus, of[name], func(have gpu, g *clusterv1.GPU) bool { return have.object == g }) {
				b.hosts = append(b.hosts, *h)
				continue
			}
			b.hosts = append(b.hosts, ix.host(v, name, objects[name], of[name], room))
			room = room[len(of[name]):]
		}
		b.seal()
		out = append(out, b)
		names = names[n:]
	}
	return out, count, len(gpus)
}

func (s *snapshot) all() iter.Seq[*host] {
	return func(yield func(*host) bool) {
		for _, b := range s.blocks {
			for i := range b.hosts {
				if !yield(&b.hosts[i]) {
					return
				}
			}
		}
	}
}

// find returns the position of a host in the blocks, or where it would be inserted. If it
// comes after all, that is the end of the last block.
func find(blocks []*block, name string) (n, i int, found bool) {
	n = sort.Search(len(blocks), func(i int) bool {
		hosts := blocks[i].hosts
		return compareHosts(hosts[len(hosts)-1].name, name) >= 0
	})
	if n == len(blocks) {
		if n == 0 {
			return 0, 0, false
		}
		return n - 1, len(blocks[n-1].hosts), false
	}
	i, found = slices.BinarySearchFunc(blocks[n].hosts, name, func(h host, name string) int { return compareHosts(h.name, name) })
	return n, i, found
}

// host returns the host with that name; nil if there is none.
func (s *snapshot) host(name string) *host {
	if n, i, found := find(s.blocks, name); found {
		return &s.blocks[n].hosts[i]
	}
	return nil
}

// host makes a host with its GPUs. It puts them into room if that is large enough.
func (ix *Index) host(v *state.View, name string, object *clusterv1.Host, gpus []*clusterv1.GPU, room []gpu) host {
	if cap(room) < len(gpus) {
		room = make([]gpu, 0, len(gpus))
	}
	h := host{name: name, object: object, gpus: room[:0:len(gpus)], nicNUMA: -1, causes: hostObstacles(object)}
	for _, n := range object.GetNics() {
		if n.GetSpeed() > h.speed {
			h.speed, h.nicNUMA = n.GetSpeed(), n.GetNumaNode()
		}
	}
	held := map[string]int{} // number of GPUs in use, by isolation group
	for _, g := range gpus {
		if group := g.GetIsolationGroup(); group != "" && !g.GetFree() {
			held[group]++
		}
	}
	for _, o := range gpus {
		g := gpu{object: o, total: o.GetLimits().GetGlobalMemory(), room: o.GetFreeMemory(), numa: o.GetNumaNode(), class: ix.class(o)}
		if obstacles(o, object) != 0 {
			g.flags |= flagBlocked
		}
		if o.GetFree() {
			g.flags |= flagFree
		}
		if o.GetHealth() != clusterv1.Health_HEALTH_OK && o.GetHealth() != clusterv1.Health_HEALTH_UNSPECIFIED {
			g.flags |= flagDegraded
		}
		others := held[o.GetIsolationGroup()]
		if !o.GetFree() {
			others--
		}
		if o.GetIsolationGroup() != "" && others > 0 {
			g.flags |= flagEntangled
		}
		h.total += g.total
		h.used += min(g.total, o.GetUsedMemory())
		if g.flags&flagBlocked == 0 {
			h.room = max(h.room, g.room)
			if g.flags&flagFree != 0 {
				h.free++
				h.room = max(h.room, g.total)
				if g.apart() {
					h.whole++
				}
			}
		}
		if len(o.GetProfiles()) > 0 && !o.GetFree() {
			for s := range v.VGPUsOfGPU(o.GetId()) {
				if s.GetProfile() != "" {
					if h.taken == nil {
						h.taken = map[string]uint32{}
					}
					h.taken[instance(o, s.GetProfile())]++
				}
			}
		}
		h.gpus = append(h.gpus, g)
		if len(h.gpus) == 1 {
			h.class = g.class
		} else if h.class != g.class {
			h.class = nil
		}
	}
	h.held, h.unheld = permille(h.used, h.total), permille(h.total-h.used, h.total)
	return h
}

// apart reports whether a GPU can be assigned without its neighbours. Cards of one
// isolation group can only be passed through together. For executors isolation groups do
// not matter.
func (g *gpu) apart() bool {
	return g.flags&flagEntangled == 0 || g.class.like.GetRuntime() != ""
}

// instance returns the key of host.taken for a profile of a GPU.
func instance(g *clusterv1.GPU, profile string) string { return g.GetId() + "/" + profile }

// class finds or makes the class of a GPU.
func (ix *Index) class(g *clusterv1.GPU) *class {
	limits, ok := ix.limits[g.GetLimits()]
	if !ok {
		limits = encode(g.GetLimits())
		ix.limits[g.GetLimits()] = limits
	}
	var k strings.Builder
	for _, s := range []string{g.GetModel(), g.GetVendor(), g.GetType(), g.GetRuntime(), g.GetPlatform(), g.GetDriver(), g.GetRuntimeKey(), strings.Join(g.GetEngines(), ","), limits} {
		k.WriteString(s)
		k.WriteByte(0)
	}
	rank := g.GetRank()
	k.Write([]byte{byte(rank >> 24), byte(rank >> 16), byte(rank >> 8), byte(rank)})
	for _, p := range g.GetProfiles() {
		k.WriteByte(0)
		k.WriteString(encode(p))
	}
	for _, kind := range g.GetKinds() {
		k.WriteByte(1)
		k.WriteString(kind)
	}
	if g.GetServer() != "" {
		k.WriteByte(2)
	}
	if c := ix.classes[k.String()]; c != nil {
		return c
	}
	c := &class{number: len(ix.classes), like: g, service: g.GetServer() != "", mediated: slices.Contains(g.GetKinds(), state.KindMediated), rank: rank, profiles: slices.Clone(g.GetProfiles())}
	slices.SortFunc(c.profiles, func(a, b *clusterv1.Profile) int {
		if a.GetMemory() != b.GetMemory() {
			if a.GetMemory() < b.GetMemory() {
				return -1
			}
			return 1
		}
		return strings.Compare(a.GetName(), b.GetName())
	})
	ix.classes[k.String()] = c
	return c
}

func encode(m proto.Message) string {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		// Text that is not UTF-8 cannot be encoded. Then the class is equal to no other.
		return "unencodable " + err.Error()
	}
	return string(b)
}
