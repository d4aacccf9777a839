package state

import (
	"bytes"
	"strings"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

func report(t *testing.T, s *Store, index uint64, c *clusterv1.Command, want clusterv1.Outcome) *clusterv1.Result {
	t.Helper()
	r := s.Apply(index, c)
	if r.GetOutcome() != want {
		t.Fatalf("entry %d: %v", index, r)
	}
	if err := s.View().Check(); err != nil {
		t.Fatal(err)
	}
	return r
}

func links(host string, l ...*clusterv1.Link) *clusterv1.Command {
	return &clusterv1.Command{Op: &clusterv1.Command_ReportLinks{ReportLinks: &clusterv1.ReportLinks{Host: host, Links: l}}}
}

func TestLinksAndTheQueueSurviveARestart(t *testing.T) {
	s := New()
	for i, h := range []string{"h1", "h2"} {
		report(t, s, uint64(i+1), &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: testHost(h, 1)}}, ok)
	}
	if q := s.View().Queue(); q != clusterv1.QueuePolicy_QUEUE_POLICY_MRQ {
		t.Errorf("a new cluster's queue is %v", q)
	}
	waiting := s.View().Changed(kindClaim)
	report(t, s, 3, &clusterv1.Command{Op: &clusterv1.Command_SetQueue{SetQueue: &clusterv1.SetQueue{Policy: clusterv1.QueuePolicy_QUEUE_POLICY_FCFS}}}, ok)
	select {
	case <-waiting:
	default:
		t.Error("the scheduler is not woken by another policy")
	}
	report(t, s, 4, links("h1", &clusterv1.Link{To: "h2", RttNs: 5, Rate: 6, Samples: 1}, &clusterv1.Link{To: "nowhere"}), ok)
	var b bytes.Buffer
	if err := s.View().Persist(&b); err != nil {
		t.Fatal(err)
	}
	fresh := New()
	if err := fresh.Restore(&b); err != nil {
		t.Fatal(err)
	}
	v := fresh.View()
	if l := v.Link("h1/h2"); l.GetRttNs() != 5 || l.GetRate() != 6 || l.GetFrom() != "h1" || v.Link("h1/nowhere") != nil || v.Queue() != clusterv1.QueuePolicy_QUEUE_POLICY_FCFS {
		t.Errorf("%v, queue %v", l, v.Queue())
	}
}

func TestAHostReportsItsOwnLinksOnly(t *testing.T) {
	s := New()
	for i, h := range []string{"h1", "h2"} {
		report(t, s, uint64(i+1), &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: testHost(h, 1)}}, ok)
	}
	for i, l := range []*clusterv1.Link{
		{To: "h1"}, {From: "h2", To: "h1"}, {Id: "h2/h1", To: "h2"}, {To: "h2", RttNs: -1}, {To: "h2", Rate: 1 << 63}, {To: "../h2"}, {},
	} {
		report(t, s, uint64(10+i), links("h1", l), invalid)
	}
}

// What an application of a removed host has elsewhere is given back.
func TestARemovedHostKeepsNoGPUOfOthers(t *testing.T) {
	s := New()
	for i, h := range []string{"h1", "h2"} {
		report(t, s, uint64(i+1), &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: testHost(h, 1)}}, ok)
	}
	var gpu string
	for g := range s.View().GPUsOfHost("h2") {
		gpu = g.GetId()
	}
	report(t, s, 3, &clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
		Claim:   &clusterv1.Claim{Id: "c", Home: "h1", Remote: clusterv1.Remote_REMOTE_ALLOWED, Count: 1},
		Choices: []*clusterv1.Choice{{Gpu: gpu}},
	}}}, ok)
	report(t, s, 4, links("h2", &clusterv1.Link{To: "h1", Rate: 1}), ok)
	remove := func(force bool) *clusterv1.Command {
		return &clusterv1.Command{Op: &clusterv1.Command_RemoveHost{RemoveHost: &clusterv1.RemoveHost{Host: "h1", Force: force}}}
	}
	if r := report(t, s, 5, remove(false), refused); !strings.Contains(r.GetMessage(), "claims of it have GPUs of other hosts, the first is c") {
		t.Error(r)
	}
	report(t, s, 6, remove(true), ok)
	v := s.View()
	if c := v.Claim("c"); c.GetState() != claimReleasing {
		t.Errorf("%v", c)
	}
	if l := v.Link("h2/h1"); l != nil {
		t.Errorf("%v", l)
	}
	a := v.Assignment("c.1")
	report(t, s, 7, &clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{ConfirmAssignments: &clusterv1.ConfirmAssignments{
		Host: "h2", Confirmations: []*clusterv1.Confirmation{{Assignment: a.GetId(), Token: a.GetToken(), Gone: true}},
	}}}, ok)
	if s.View().Claim("c") != nil || !s.View().GPU(gpu).GetFree() {
		t.Errorf("%v %v", s.View().Claim("c"), s.View().GPU(gpu))
	}
}

func TestWhatOlderHostsDoNotKnowNeedsTheirUpgrade(t *testing.T) {
	for _, c := range []*clusterv1.Command{
		links("h1"),
		{Op: &clusterv1.Command_SetQueue{SetQueue: &clusterv1.SetQueue{}}},
		{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{Claim: &clusterv1.Claim{Id: "c", Home: "h1"}}}},
	} {
		if v := VersionOf(c); v != ProtocolRemote {
			t.Errorf("%v: %d", c, v)
		}
	}
	if v := VersionOf(&clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{Claim: &clusterv1.Claim{Id: "c"}}}}); v != 1 {
		t.Errorf("a claim without a home needs protocol %d", v)
	}
}
