package placementtest

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// Job is one run of an application on its home.
type Job struct {
	ID     string
	Home   string
	Arrive time.Duration // since the beginning
	Work   time.Duration // on a GPU of its home
	Slower float64       // how many times as long it takes on a GPU of another host
	Remote clusterv1.Remote
}

// Jobs makes a trace: jobs that arrive at random (exponential gaps), most of them on a
// few hosts, as users have a host that they log in to. The same seed makes the same trace.
func Jobs(hosts, n int, gap, work time.Duration, seed uint64) []Job {
	rng := rand.New(rand.NewPCG(seed, 2)) //nolint:gosec // repeatable
	var out []Job
	at := time.Duration(0)
	for i := range n {
		at += time.Duration(rng.ExpFloat64() * float64(gap))
		home := rng.IntN(hosts)
		if rng.IntN(3) > 0 { // two thirds of the jobs are on the first quarter of the hosts
			home = rng.IntN(max(1, hosts/4))
		}
		out = append(out, Job{
			ID: fmt.Sprintf("j%05d", i), Home: HostName(home), Arrive: at, Work: time.Duration((0.2 + rng.ExpFloat64()) * float64(work)),
			Slower: 1 + rng.Float64()*rng.Float64()*4, Remote: clusterv1.Remote_REMOTE_ALLOWED,
		})
	}
	return out
}

// QueueReport is what became of a trace's jobs.
type QueueReport struct {
	Policy   clusterv1.QueuePolicy
	Lifetime time.Duration // mean time from arrival to end
	Wait     time.Duration // mean time until it began
	Longest  time.Duration // longest lifetime
	Remote   int           // jobs that began on a GPU of another host
	Homes    int           // jobs that moved home
	Twice    int           // jobs that moved more than once
}

func (r QueueReport) String() string {
	return fmt.Sprintf("%-4s mean lifetime %v, wait %v, longest %v; %d began elsewhere, %d moved home",
		query.Enum(r.Policy), r.Lifetime.Round(time.Second), r.Wait.Round(time.Second), r.Longest.Round(time.Second), r.Remote, r.Homes)
}

// running is a job on a GPU.
type running struct {
	Job
	began  time.Duration
	gpu    string
	left   time.Duration // work at home that was left at the time since
	since  time.Duration
	factor float64
	moves  int
}

func (j *running) end() time.Duration { return j.since + time.Duration(float64(j.left)*j.factor) }

// queueSim is a simulation with a clock of its own. Placement, policies and the state
// machine are the real ones.
type queueSim struct {
	cluster *Cluster
	index   *placement.Index
	policy  clusterv1.QueuePolicy
	stop    time.Duration // downtime of a move
	now     time.Duration
	waiting []Job
	running []*running
	report  QueueReport
	total   time.Duration
	waited  time.Duration
}

// Queue runs the jobs on a cluster of equal hosts under a policy. stop is how long a job
// is stopped when it moves home.
func Queue(hosts, gpus int, jobs []Job, policy clusterv1.QueuePolicy, stop time.Duration) (QueueReport, error) {
	c := NewCluster()
	for n := range hosts {
		name := HostName(n)
		h := &clusterv1.Host{Name: name, Id: "id-" + name, Address: fmt.Sprintf("10.0.%d.%d:7650", n>>8, n&255), LendAddress: fmt.Sprintf("10.0.%d.%d:7651", n>>8, n&255), Protocol: state.Protocol}
		var of []*clusterv1.GPU
		for i := range gpus {
			of = append(of, &clusterv1.GPU{Name: fmt.Sprintf("g%d", i), Model: "M", Type: "gpu", Runtime: "pocl", RuntimeKey: "k", Limits: &gpuctlv1.Limits{GlobalMemory: 16 << 30}})
		}
		if err := c.Report(h, of); err != nil {
			return QueueReport{}, err
		}
	}
	s := &queueSim{cluster: c, index: placement.NewIndex(c.Store.View()), policy: policy, stop: stop, report: QueueReport{Policy: policy}}
	jobs = slices.SortedFunc(slices.Values(jobs), func(a, b Job) int { return cmp.Compare(a.Arrive, b.Arrive) })
	for next := 0; next < len(jobs) || len(s.running) > 0 || len(s.waiting) > 0; {
		over := s.first()
		switch {
		case over != nil && (next == len(jobs) || over.end() <= jobs[next].Arrive):
			s.now = over.end()
			s.finish(over)
		case next < len(jobs):
			s.now = jobs[next].Arrive
			s.waiting = append(s.waiting, jobs[next])
			next++
		default:
			return s.report, fmt.Errorf("%d jobs wait for ever, the first is %s", len(s.waiting), s.waiting[0].ID)
		}
		if err := s.pass(); err != nil {
			return s.report, err
		}
	}
	n := time.Duration(max(1, len(jobs)))
	s.report.Lifetime, s.report.Wait = s.total/n, s.waited/n
	return s.report, nil
}

// first returns the job that ends next.
func (s *queueSim) first() (out *running) {
	for _, j := range s.running {
		if out == nil || j.end() < out.end() {
			out = j
		}
	}
	return out
}

func (s *queueSim) finish(j *running) {
	s.cluster.Delete(j.ID)
	s.running = slices.DeleteFunc(s.running, func(x *running) bool { return x == j })
	life := s.now - j.Arrive
	s.total += life
	s.waited += j.began - j.Arrive
	s.report.Longest = max(s.report.Longest, life)
	if j.moves > 1 {
		s.report.Twice++
	}
}

func (s *queueSim) place(c *clusterv1.Claim, where placement.Where) placement.Decision {
	s.index.Update(s.cluster.Store.View())
	return placement.Place(s.index, placement.Request{Claim: c, Host: c.GetHome(), Where: where, Limit: 1})
}

func claimOf(j Job) *clusterv1.Claim {
	return &clusterv1.Claim{Id: j.ID, Home: j.Home, Remote: j.Remote, Count: 1, OneRuntime: true, Unmet: clusterv1.Unmet_UNMET_WAIT}
}

// pass serves those who wait, the oldest first, and then lets jobs move home.
func (s *queueSim) pass() error {
	var still []Job
	for _, j := range s.waiting {
		if !s.serve(j) {
			still = append(still, j)
		}
	}
	s.waiting = still
	if s.policy == clusterv1.QueuePolicy_QUEUE_POLICY_MRQ {
		for _, j := range s.running {
			s.home(j)
		}
	}
	return s.cluster.Store.View().Check()
}

func (s *queueSim) serve(j Job) bool {
	c := claimOf(j)
	for _, where := range placement.Tries(c, s.policy) {
		d := s.place(c, where)
		if !d.OK() {
			continue
		}
		if r := s.cluster.Put(c, d.Candidates[0].Choices); r.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
			continue
		}
		x := &running{Job: j, began: s.now, since: s.now, left: j.Work, factor: 1, gpu: d.Candidates[0].Choices[0].GetGpu()}
		if d.Candidates[0].Host != j.Home {
			x.factor = j.Slower
			s.report.Remote++
		}
		s.running = append(s.running, x)
		return true
	}
	return false
}

// home moves a job home, as hostd does: once.
func (s *queueSim) home(j *running) {
	v := s.cluster.Store.View()
	if v.GPU(j.gpu).GetHost() == j.Home || j.moves > 0 {
		return
	}
	d := s.place(claimOf(j.Job), placement.AtHome)
	if !d.OK() {
		return
	}
	var old *clusterv1.Assignment
	for a := range v.AssignmentsOfClaim(j.ID) {
		old = a
	}
	choices := d.Candidates[0].Choices
	if r := s.cluster.Apply(&clusterv1.Command{Op: &clusterv1.Command_Assign{Assign: &clusterv1.Assign{Claim: j.ID, Choices: choices}}}); r.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		return
	}
	s.cluster.Apply(&clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{ConfirmAssignments: &clusterv1.ConfirmAssignments{
		Host: old.GetHost(), Confirmations: []*clusterv1.Confirmation{{Assignment: old.GetId(), Token: old.GetToken(), Gone: true}},
	}}})
	j.left -= time.Duration(float64(s.now-j.since) / j.factor)
	j.since, j.factor, j.gpu = s.now+s.stop, 1, choices[0].GetGpu()
	j.moves++
	s.report.Homes++
}
