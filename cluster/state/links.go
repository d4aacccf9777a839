package state

import (
	"fmt"
	"iter"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

const kindLink = clusterv1.Kind_KIND_LINK

const (
	maxLinks  = 1024 // links that one report may contain
	maxNanos  = int64(24 * 60 * 60 * 1e9)
	maxRate   = 1 << 50 // bytes per second
	wholePPM  = 1_000_000
	queueWord = "QUEUE_POLICY_"
)

// Queue returns how waiting claims are served.
func (v *View) Queue() clusterv1.QueuePolicy {
	if v.queue == clusterv1.QueuePolicy_QUEUE_POLICY_UNSPECIFIED {
		return clusterv1.QueuePolicy_QUEUE_POLICY_MRQ
	}
	return v.queue
}

// Link returns the link with this id, FROM/TO.
func (r reader) Link(id string) *clusterv1.Link {
	return first[clusterv1.Link](r, tableLinks, byID, id)
}

// Links returns all links, sorted by id.
func (r reader) Links() iter.Seq[*clusterv1.Link] { return all[clusterv1.Link](r, tableLinks) }

// LinksFrom returns the links that begin at a host, sorted by id.
func (r reader) LinksFrom(host string) iter.Seq[*clusterv1.Link] {
	return scan[clusterv1.Link](r, tableLinks, byID+prefix, host+"/")
}

func (t *tx) setQueue(op *clusterv1.SetQueue) *clusterv1.Result {
	if err := known("queue", op.GetPolicy()); err != nil {
		return result(invalid, "%v", err)
	}
	if op.GetPolicy() == clusterv1.QueuePolicy_QUEUE_POLICY_UNSPECIFIED {
		return result(invalid, "queue: no policy")
	}
	if t.queue == op.GetPolicy() {
		return done()
	}
	t.queue = op.GetPolicy()
	t.changed |= 1 << kindClaim // wakes the scheduler: claims that wait may be served now
	t.event(0, "", "QueueSet", word(op.GetPolicy(), queueWord))
	return done()
}

func checkLink(host string, l *clusterv1.Link) error {
	what := fmt.Sprintf("link %.300q", l.GetId())
	if l.GetFrom() != "" && l.GetFrom() != host {
		return fmt.Errorf("%s: begins at host %.300q, not %s", what, l.GetFrom(), host)
	}
	if err := identifier(what+": to", l.GetTo()); err != nil {
		return err
	}
	switch {
	case l.GetTo() == host:
		return fmt.Errorf("%s: leads from host %s to itself", what, host)
	case l.GetId() != "" && l.GetId() != host+"/"+l.GetTo():
		return fmt.Errorf("%s: is not %s/%s", what, host, l.GetTo())
	case l.GetRate() > maxRate:
		return fmt.Errorf("%s: %d bytes per second: at most %d", what, l.GetRate(), uint64(maxRate))
	case l.GetFrozenPpm() > wholePPM:
		return fmt.Errorf("%s: %d millionths of the memory: at most %d", what, l.GetFrozenPpm(), wholePPM)
	}
	for _, ns := range []int64{l.GetRttNs(), l.GetFixedNs(), l.GetPredictedStopNs(), l.GetStoppedNs()} {
		if ns < 0 || ns > maxNanos {
			return fmt.Errorf("%s: a time of %d ns is not from 0 to %d", what, ns, maxNanos)
		}
	}
	return nil
}

func (t *tx) reportLinks(op *clusterv1.ReportLinks) *clusterv1.Result {
	host := op.GetHost()
	if t.Host(host) == nil {
		return result(notFound, "host %.300q: there is none", host)
	}
	if n := len(op.GetLinks()); n > maxLinks {
		return result(invalid, "host %s: %d links: at most %d", host, n, maxLinks)
	}
	seen := map[string]bool{}
	for _, l := range op.GetLinks() {
		if err := checkLink(host, l); err != nil {
			return result(invalid, "%v", err)
		}
		if seen[l.GetTo()] {
			return result(invalid, "link %s/%s: reported twice", host, l.GetTo())
		}
		seen[l.GetTo()] = true
	}
	for _, said := range op.GetLinks() {
		if t.Host(said.GetTo()) == nil {
			continue // it was removed meanwhile
		}
		l := proto.Clone(said).(*clusterv1.Link)
		l.From, l.Id = host, host+"/"+l.GetTo()
		old := t.Link(l.GetId())
		if l.Revision = old.GetRevision(); old == nil || !proto.Equal(old, l) {
			t.put(l)
		}
	}
	return done()
}

// unlink deletes the links from and to a host.
func (t *tx) unlink(host string) {
	var gone []*clusterv1.Link
	for l := range t.Links() {
		if l.GetFrom() == host || l.GetTo() == host {
			gone = append(gone, l)
		}
	}
	for _, l := range gone {
		t.del(l)
	}
}

// homeless returns the claims of applications on a host that have GPUs of other hosts.
func (t *tx) homeless(host string) []*clusterv1.Claim {
	var out []*clusterv1.Claim
	for c := range t.Claims() {
		if c.GetHome() != host || c.GetState() == claimReleasing {
			continue
		}
		for a := range t.AssignmentsOfClaim(c.GetId()) {
			if a.GetHost() != host {
				out = append(out, c)
				break
			}
		}
	}
	return out
}
