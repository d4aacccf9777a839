package metrics

import (
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// maxModels is how many models have series of their own. Those with the fewest GPUs share
// one series.
const maxModels = 256

type clusterFamilies struct {
	build, joined, healthy, leads, hasLeader, quorum, term, last, commit, applied, protocol, members, skipped, certificate,
	objects, hosts, gpus, capacity, used, free, claims, oldest, assignments, sessions, migrations, twice,
	auditLines, auditLost, auditErrors family
}

func (m *Metrics) clusterFamilies() clusterFamilies {
	return clusterFamilies{
		build:   m.family("gpuctl_build_info", gauge, "1, with the version of hostd and of Go.", "version", "go_version"),
		joined:  m.family("gpuctl_cluster_joined", gauge, "1 if this host is in a cluster."),
		healthy: m.family("gpuctl_cluster_node_healthy", gauge, "1 if this host can do its part in the cluster; 0 if its disk or its log failed."),
		leads:   m.family("gpuctl_cluster_is_leader", gauge, "1 if this host leads."),
		hasLeader: m.family("gpuctl_cluster_has_leader", gauge,
			"1 if this host knows who leads."),
		quorum:   m.family("gpuctl_cluster_quorum", gauge, "1 if the leader has heard of a majority lately."),
		term:     m.family("gpuctl_cluster_term", gauge, "Raft's term: it grows with every election."),
		last:     m.family("gpuctl_cluster_last_index", gauge, "Index of the last entry in this host's log."),
		commit:   m.family("gpuctl_cluster_commit_index", gauge, "Index of the last entry that this host knows to be committed."),
		applied:  m.family("gpuctl_cluster_applied_index", gauge, "Index of the last entry that this host applied."),
		protocol: m.family("gpuctl_cluster_protocol", gauge, "Version of commands in force: the lowest of all hosts."),
		members:  m.family("gpuctl_cluster_members", gauge, "Members, by role (voter, nonvoter) and health (healthy, unhealthy), as this host knows them; only the leader knows them well.", "role", "health"),
		skipped:  m.family("gpuctl_cluster_skipped_entries_total", counter, "Entries of the log that this build does not know and left out."),
		certificate: m.family("gpuctl_cluster_certificate_expiry_timestamp_seconds", gauge,
			"When this host's certificate expires."),
		objects:  m.family("gpuctl_objects", gauge, "Objects of the inventory, by kind.", "kind"),
		hosts:    m.family("gpuctl_hosts", gauge, "Hosts, by state.", "state"),
		gpus:     m.family("gpuctl_gpus", gauge, "GPUs, by model, state (free, used, cordoned, draining, down, absent) and health.", "model", "state", "health"),
		capacity: m.family("gpuctl_gpu_memory_bytes", gauge, "Memory of all GPUs of a model that are present.", "model"),
		used:     m.family("gpuctl_gpu_memory_used_bytes", gauge, "Of that, scheduled, resident or reserved.", "model"),
		free:     m.family("gpuctl_gpu_memory_free_bytes", gauge, "Of that, what claims can get now.", "model"),
		claims:   m.family("gpuctl_claims", gauge, "Claims, by state.", "state"),
		oldest:   m.family("gpuctl_claim_oldest_pending_age_seconds", gauge, "Age of the claim that has been pending longest; 0 if none is."),
		assignments: m.family("gpuctl_assignments", gauge,
			"Assignments, by residence.", "residence"),
		sessions:    m.family("gpuctl_sessions", gauge, "Sessions of the cluster, by state.", "state"),
		twice:       m.family("gpuctl_machines_on_two_hosts", gauge, "VMs that were found running on two hosts and do so still, as far as is known."),
		migrations:  m.family("gpuctl_migrations", gauge, "Operations that the cluster remembers, by verb and state.", "verb", "state"),
		auditLines:  m.family("gpuctl_audit_lines_total", counter, "Lines of the audit trail that were written."),
		auditLost:   m.family("gpuctl_audit_lost_lines_total", counter, "Lines of the audit trail that were given up."),
		auditErrors: m.family("gpuctl_audit_errors_total", counter, "Failures to write, sync or rotate the audit trail."),
	}
}

func (m *Metrics) collectCluster(ch chan<- prometheus.Metric) {
	f := m.cluster
	if m.sources.Health != nil {
		f.healthy.truth(ch, m.sources.Health() == nil)
	}
	if m.sources.Skipped != nil {
		f.skipped.put(ch, float64(m.sources.Skipped()))
	}
	var status *clusterv1.StatusResponse
	if m.sources.Status != nil {
		status = m.sources.Status()
	}
	f.joined.truth(ch, status.GetJoined())
	if status.GetJoined() {
		f.status(ch, status)
	}
	if m.sources.View == nil {
		return
	}
	if v := m.sources.View(); v != nil {
		m.view(ch, v, time.Now())
	}
}

func (f clusterFamilies) status(ch chan<- prometheus.Metric, s *clusterv1.StatusResponse) {
	f.leads.truth(ch, s.GetLeader() != "" && s.GetLeader() == s.GetHost())
	f.hasLeader.truth(ch, s.GetLeader() != "")
	f.quorum.truth(ch, s.GetQuorum())
	f.term.put(ch, float64(s.GetTerm()))
	f.last.put(ch, float64(s.GetLastIndex()))
	f.commit.put(ch, float64(s.GetCommitIndex()))
	f.applied.put(ch, float64(s.GetAppliedIndex()))
	f.protocol.put(ch, float64(s.GetProtocol()))
	if at := s.GetCertificateExpiresUnixMs(); at > 0 {
		f.certificate.put(ch, float64(at)/1000)
	}
	members := map[[2]string]int{{"voter", "healthy"}: 0, {"voter", "unhealthy"}: 0, {"nonvoter", "healthy"}: 0, {"nonvoter", "unhealthy"}: 0}
	for _, m := range s.GetMembers() {
		key := [2]string{"nonvoter", "unhealthy"}
		if m.GetVoter() {
			key[0] = "voter"
		}
		if m.GetHealthy() {
			key[1] = "healthy"
		}
		members[key]++
	}
	for key, n := range members {
		f.members.put(ch, float64(n), key[0], key[1])
	}
}

// counts has a number for each value of an enum, including zeros.
type counts[E ~int32] map[E]int

func zeros[E ~int32](names map[int32]string) counts[E] {
	c := counts[E]{}
	for v := range names {
		if v != 0 {
			c[E(v)] = 0
		}
	}
	return c
}

func (c counts[E]) put(ch chan<- prometheus.Metric, f family, names map[int32]string, prefix string) {
	for v, n := range c {
		f.put(ch, float64(n), enum(v, names, prefix))
	}
}

// enum returns the name of a value. All values that only newer hosts know have one name.
func enum[E ~int32](v E, names map[int32]string, prefix string) string {
	name, ok := names[int32(v)]
	if !ok {
		return other
	}
	return word(name, prefix)
}

// kept caches what was read of the state, until an object of these kinds changes: until
// then, Changed returns the same channel.
type kept[T any] struct {
	mu      sync.Mutex
	changed <-chan struct{}
	value   T
}

func (k *kept[T]) of(v *state.View, read func(*state.View) T, kinds ...clusterv1.Kind) T {
	k.mu.Lock()
	defer k.mu.Unlock()
	changed := v.Changed(kinds...)
	if k.changed == nil || changed != k.changed {
		k.changed, k.value = changed, read(v)
	}
	return k.value
}

// knownState caches the state for the next scrape.
type knownState struct {
	inventory   kept[inventory]
	claims      kept[claims]
	assignments kept[tally[clusterv1.Residence]]
	sessions    kept[tally[gpuctlv1.SessionState]]
	migrations  kept[map[[2]string]int]
	twice       kept[int]
	vgpus       kept[int]
	rest        kept[counts[clusterv1.Kind]]
}

type claims struct {
	tally[clusterv1.ClaimState]
	oldest int64 // creation time of the claim that has been pending longest, Unix ms; 0: none
}

// tally counts objects by state.
type tally[E ~int32] struct {
	counts[E]
	total int
}

func tallied[T any, E ~int32](objects iter.Seq[*T], names map[int32]string, of func(*T) E) tally[E] {
	t := tally[E]{counts: zeros[E](names)}
	for x := range objects {
		t.total++
		t.counts[of(x)]++
	}
	return t
}

func length[T any](objects iter.Seq[*T]) (n int) {
	for range objects {
		n++
	}
	return n
}

func readClaims(v *state.View) claims {
	c := claims{tally: tallied(v.Claims(), clusterv1.ClaimState_name, (*clusterv1.Claim).GetState)}
	for p := range v.PendingClaims() {
		if at := p.GetCreatedUnixMs(); c.oldest == 0 || at < c.oldest {
			c.oldest = at
		}
	}
	return c
}

func readMigrations(v *state.View) map[[2]string]int {
	by := map[[2]string]int{}
	for m := range v.Migrations() {
		by[[2]string{
			known(m.GetVerb(), "upgrade", "downgrade", "migrate", "suspend", "resume"),
			enum(m.GetState(), clusterv1.MigrationState_name, "MIGRATION_STATE_"),
		}]++
	}
	return by
}

func (m *Metrics) view(ch chan<- prometheus.Metric, v *state.View, now time.Time) {
	const (
		kindHost        = clusterv1.Kind_KIND_HOST
		kindGPU         = clusterv1.Kind_KIND_GPU
		kindModel       = clusterv1.Kind_KIND_MODEL
		kindVGPU        = clusterv1.Kind_KIND_VGPU
		kindClaim       = clusterv1.Kind_KIND_CLAIM
		kindAssignment  = clusterv1.Kind_KIND_ASSIGNMENT
		kindSession     = clusterv1.Kind_KIND_SESSION
		kindMigration   = clusterv1.Kind_KIND_MIGRATION
		kindReservation = clusterv1.Kind_KIND_RESERVATION
	)
	// About half of the state are GPUs, so they are read by another goroutine.
	var in inventory
	var gpus sync.WaitGroup
	gpus.Go(func() { in = m.state.inventory.of(v, readInventory, kindGPU, kindHost) })

	f, objects := m.cluster, zeros[clusterv1.Kind](clusterv1.Kind_name)
	waiting := m.state.claims.of(v, readClaims, kindClaim)
	waiting.put(ch, f.claims, clusterv1.ClaimState_name, "CLAIM_STATE_")
	age := 0.0
	if waiting.oldest != 0 {
		age = float64(max(now.UnixMilli()-waiting.oldest, 0)) / 1000
	}
	f.oldest.put(ch, age)
	assignments := m.state.assignments.of(v, func(v *state.View) tally[clusterv1.Residence] {
		return tallied(v.Assignments(), clusterv1.Residence_name, (*clusterv1.Assignment).GetResidence)
	}, kindAssignment)
	assignments.put(ch, f.assignments, clusterv1.Residence_name, "RESIDENCE_")
	sessions := m.state.sessions.of(v, func(v *state.View) tally[gpuctlv1.SessionState] {
		return tallied(v.Sessions(), gpuctlv1.SessionState_name, (*clusterv1.Session).GetState)
	}, kindSession)
	sessions.put(ch, f.sessions, gpuctlv1.SessionState_name, "SESSION_STATE_")
	for key, n := range m.state.migrations.of(v, readMigrations, kindMigration) {
		objects[kindMigration] += n
		f.migrations.put(ch, float64(n), key[0], key[1])
	}
	f.twice.put(ch, float64(m.state.twice.of(v, func(v *state.View) (n int) {
		for m := range v.Migrations() {
			if m.GetMachine().GetTwice() && m.GetState() == clusterv1.MigrationState_MIGRATION_STATE_HELD {
				n++
			}
		}
		return n
	}, kindMigration)))
	rest := m.state.rest.of(v, func(v *state.View) counts[clusterv1.Kind] {
		return counts[clusterv1.Kind]{kindModel: length(v.Models()), kindReservation: length(v.Reservations())}
	}, kindModel, kindReservation)
	objects[kindModel], objects[kindReservation] = rest[kindModel], rest[kindReservation]
	objects[kindClaim], objects[kindAssignment], objects[kindSession] = waiting.total, assignments.total, sessions.total
	objects[kindVGPU] = m.state.vgpus.of(v, func(v *state.View) int { return length(v.VGPUs()) }, kindVGPU)

	gpus.Wait()
	in.put(ch, f)
	objects[kindHost], objects[kindGPU] = in.hosts.total, in.gpus
	objects.put(ch, f.objects, clusterv1.Kind_name, "KIND_")
}

// gpuState is whether a GPU can get claims: free, or the first reason that applies why
// not.
type gpuState int

const (
	stateFree gpuState = iota
	stateUsed
	stateCordoned
	stateDraining
	stateDown
	stateAbsent
	gpuStates
)

func (s gpuState) String() string {
	return [...]string{"free", "used", "cordoned", "draining", "down", "absent"}[s]
}

func stateOf(g *clusterv1.GPU, host gpuState) gpuState {
	switch {
	case !g.GetPresent():
		return stateAbsent
	case host != stateFree:
		return host
	case g.GetCordoned():
		return stateCordoned
	case g.GetFree():
		return stateFree
	}
	return stateUsed
}

// stock counts the GPUs of one model.
type stock struct {
	gpus                 [gpuStates]counts[clusterv1.Health]
	total                int
	capacity, used, free uint64
}

func (s *stock) add(t *stock) {
	for i, by := range t.gpus {
		for health, n := range by {
			s.gpus[i][health] += n
		}
	}
	s.total += t.total
	s.capacity += t.capacity
	s.used += t.used
	s.free += t.free
}

func newStock() *stock {
	s := &stock{}
	for i := range s.gpus {
		s.gpus[i] = counts[clusterv1.Health]{}
	}
	return s
}

// inventory counts the GPUs of all models.
type inventory struct {
	hosts  tally[clusterv1.HostState]
	gpus   int
	models map[string]*stock // by the label's value
}

func readInventory(v *state.View) inventory {
	in := inventory{hosts: tally[clusterv1.HostState]{counts: zeros[clusterv1.HostState](clusterv1.HostState_name)}}
	away := map[string]gpuState{} // hosts that get no claims
	for h := range v.Hosts() {
		in.hosts.total++
		in.hosts.counts[h.GetState()]++
		switch {
		case h.GetDown():
			away[h.GetName()] = stateDown
		case h.GetDraining():
			away[h.GetName()] = stateDraining
		}
	}
	models := map[string]*stock{}
	// GPUs are sorted by host, and those of one host are usually of the same model.
	var s *stock
	var model, host string
	var at gpuState
	for g := range v.GPUs() {
		in.gpus++
		if h := g.GetHost(); h != host || in.gpus == 1 {
			host, at = h, away[h]
		}
		if m := g.GetModel(); m != model || s == nil {
			if model, s = m, models[m]; s == nil {
				s = newStock()
				models[m] = s
			}
		}
		s.total++
		s.gpus[stateOf(g, at)][g.GetHealth()]++
		s.used += g.GetUsedMemory()
		s.free += g.GetFreeMemory()
		if g.GetPresent() {
			s.capacity += g.GetLimits().GetGlobalMemory()
		}
	}
	in.models = fold(models)
	return in
}

func (in inventory) put(ch chan<- prometheus.Metric, f clusterFamilies) {
	in.hosts.put(ch, f.hosts, clusterv1.HostState_name, "HOST_STATE_")
	for name, s := range in.models {
		for i, by := range s.gpus {
			for health, n := range by {
				f.gpus.put(ch, float64(n), name, gpuState(i).String(), enum(health, clusterv1.Health_name, "HEALTH_"))
			}
		}
		f.capacity.put(ch, float64(s.capacity), name)
		f.used.put(ch, float64(s.used), name)
		f.free.put(ch, float64(s.free), name)
	}
}

// fold limits the number of models, and adds up models whose names are the same as
// labels.
func fold(models map[string]*stock) map[string]*stock {
	names := slices.SortedFunc(maps.Keys(models), func(a, b string) int {
		if n := models[b].total - models[a].total; n != 0 {
			return n
		}
		return strings.Compare(a, b)
	})
	out := map[string]*stock{}
	for i, name := range names {
		label := clean(name)
		if i >= maxModels {
			label = other
		}
		if s := out[label]; s != nil {
			s.add(models[name])
		} else {
			out[label] = models[name]
		}
	}
	return out
}
