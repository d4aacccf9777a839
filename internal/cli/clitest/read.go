package clitest

import (
	"context"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

// List implements the RPC.
func (c *Cluster) List(_ context.Context, r *connect.Request[clusterv1.ListRequest]) (*connect.Response[clusterv1.ListResponse], error) {
	match, err := c.filter(r.Msg.GetKind(), r.Msg.GetWhere())
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.may(r.Msg.GetStale(), clusterv1.Role_ROLE_VIEWER); err != nil {
		return nil, err
	}
	res := &clusterv1.ListResponse{Index: c.index}
	among := c.sorted(r.Msg.GetKind())
	if r.Msg.GetName() != "" {
		m, err := c.one(r.Msg.GetKind(), r.Msg.GetName())
		if err != nil {
			return nil, err
		}
		among = []proto.Message{m}
	}
	for _, m := range among {
		if Name(m) <= r.Msg.GetAfter() && r.Msg.GetAfter() != "" {
			continue
		}
		ok, err := match(m)
		if err != nil {
			return nil, err
		}
		if ok && r.Msg.GetLimit() > 0 && len(res.GetObjects()) == int(r.Msg.GetLimit()) {
			res.More = true
			break
		}
		if ok {
			res.Objects = append(res.Objects, envelope(m))
		}
	}
	return connect.NewResponse(res), nil
}

// one finds an object by its name or a unique prefix of it.
func (c *Cluster) one(kind clusterv1.Kind, name string) (proto.Message, error) {
	var found []proto.Message
	var names []string
	for _, m := range c.sorted(kind) {
		if Name(m) == name {
			return m, nil
		}
		if strings.HasPrefix(Name(m), name) {
			found = append(found, m)
		}
		names = append(names, Name(m))
	}
	switch len(found) {
	case 0:
		word := kindWord(kind)
		return nil, reason.Coded(reason.Errorf(reason.NotFound, "not found: no %s %q%s", word, name, suggest.Hint(name, names)).On(word, name).Do("gpuctl get %ss lists them", word))
	case 1:
		return found[0], nil
	}
	return nil, fail(connect.CodeInvalidArgument, "invalid: %s %q can be %s or %s", kindWord(kind), name, Name(found[0]), Name(found[1]))
}

// Watch implements the RPC.
func (c *Cluster) Watch(ctx context.Context, r *connect.Request[clusterv1.WatchRequest], st *connect.ServerStream[clusterv1.WatchResponse]) error {
	match, err := c.filter(r.Msg.GetKind(), r.Msg.GetWhere())
	if err != nil {
		return err
	}
	c.mu.Lock()
	if err := c.may(false, clusterv1.Role_ROLE_VIEWER); err != nil {
		c.mu.Unlock()
		return err
	}
	at, present, dropped := len(c.log), c.sorted(r.Msg.GetKind()), c.dropped
	index := c.index
	c.mu.Unlock()
	sent := map[string]bool{}
	send := func(ch change) error {
		if ch.kind != r.Msg.GetKind() || r.Msg.GetName() != "" && ch.name != r.Msg.GetName() {
			return nil
		}
		ok, err := match(ch.object)
		if err != nil {
			return err
		}
		gone := ch.deleted || !ok
		if gone && !sent[ch.name] {
			return nil
		}
		sent[ch.name] = !gone
		return st.Send(&clusterv1.WatchResponse{Object: envelope(ch.object), Deleted: gone, Index: ch.index})
	}
	for _, m := range present {
		if err := send(change{index, r.Msg.GetKind(), Name(m), m, false}); err != nil {
			return err
		}
	}
	if err := st.Send(&clusterv1.WatchResponse{Synced: true, Index: index}); err != nil {
		return err
	}
	for {
		c.mu.Lock()
		fresh, changed := c.log[at:], c.changed
		at = len(c.log)
		c.mu.Unlock()
		for _, ch := range fresh {
			if err := send(ch); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-dropped:
			return fail(connect.CodeUnavailable, "hostd is stopping")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Describe implements the RPC.
func (c *Cluster) Describe(_ context.Context, r *connect.Request[clusterv1.DescribeRequest]) (*connect.Response[clusterv1.DescribeResponse], error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.may(r.Msg.GetStale(), clusterv1.Role_ROLE_VIEWER); err != nil {
		return nil, err
	}
	found, err := c.one(r.Msg.GetKind(), r.Msg.GetName())
	if err != nil {
		return nil, err
	}
	name := Name(found)
	res := &clusterv1.DescribeResponse{Object: envelope(found), Index: c.index}
	for _, g := range all[*clusterv1.GPU](c, clusterv1.Kind_KIND_GPU) {
		if r.Msg.GetKind() == clusterv1.Kind_KIND_HOST && g.GetHost() == name {
			res.Related = append(res.Related, envelope(g))
		}
	}
	for _, a := range all[*clusterv1.Assignment](c, clusterv1.Kind_KIND_ASSIGNMENT) {
		if a.GetHost() == name || a.GetGpu() == name || a.GetClaim() == name {
			res.Related = append(res.Related, envelope(a))
		}
	}
	for _, e := range c.events {
		if e.GetKind() == r.Msg.GetKind() && e.GetObject() == name {
			res.Events = append(res.Events, e)
		}
	}
	return connect.NewResponse(res), nil
}

// Events implements the RPC.
func (c *Cluster) Events(ctx context.Context, r *connect.Request[clusterv1.EventsRequest], st *connect.ServerStream[clusterv1.Event]) error {
	wanted := func(e *clusterv1.Event) bool {
		return (r.Msg.GetKind() == 0 || e.GetKind() == r.Msg.GetKind()) && (r.Msg.GetObject() == "" || e.GetObject() == r.Msg.GetObject())
	}
	first := true
	var done uint64
	for {
		c.mu.Lock()
		if err := c.may(true, clusterv1.Role_ROLE_VIEWER); err != nil {
			c.mu.Unlock()
			return err
		}
		var fresh []*clusterv1.Event
		for _, e := range c.events {
			if e.GetIndex() > done && wanted(e) {
				fresh = append(fresh, e)
			}
		}
		done = c.index
		changed, dropped := c.changed, c.dropped
		c.mu.Unlock()
		if last := int(r.Msg.GetLast()); first && last > 0 && len(fresh) > last {
			fresh = fresh[len(fresh)-last:]
		}
		first = false
		for _, e := range fresh {
			if err := st.Send(e); err != nil {
				return err
			}
		}
		if !r.Msg.GetFollow() {
			return nil
		}
		select {
		case <-changed:
		case <-dropped:
			return fail(connect.CodeUnavailable, "hostd is stopping")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Top implements the RPC.
func (c *Cluster) Top(ctx context.Context, r *connect.Request[clusterv1.TopRequest], st *connect.ServerStream[clusterv1.TopResponse]) error {
	if ms := r.Msg.GetIntervalMs(); ms != 0 && ms < 100 {
		return fail(connect.CodeInvalidArgument, "an interval of %d ms is too short", ms)
	}
	tick := time.NewTicker(time.Duration(max(100, r.Msg.GetIntervalMs())) * time.Millisecond)
	defer tick.Stop()
	for {
		c.mu.Lock()
		res, dropped := c.facts(r.Msg.GetHost()), c.dropped
		c.mu.Unlock()
		if err := st.Send(res); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-dropped:
			return fail(connect.CodeUnavailable, "hostd is stopping")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (c *Cluster) facts(host string) *clusterv1.TopResponse {
	res := &clusterv1.TopResponse{}
	for _, h := range all[*clusterv1.Host](c, clusterv1.Kind_KIND_HOST) {
		if host != "" && h.GetName() != host {
			continue
		}
		if h.GetDown() {
			res.Missing = append(res.Missing, h.GetName())
			continue
		}
		f := &clusterv1.HostFacts{Host: h.GetName(), UnixMs: time.Now().UnixMilli(), Load1: 0.5, FreeMemory: h.GetMemory() / 2}
		for _, g := range all[*clusterv1.GPU](c, clusterv1.Kind_KIND_GPU) {
			if g.GetHost() != h.GetName() {
				continue
			}
			gf := &clusterv1.GPUFacts{Gpu: g.GetId(), UsedMemory: new(g.GetUsedMemory()), Health: g.GetHealth(), HealthReason: g.GetHealthReason()}
			if g.GetType() == "gpu" {
				gf.Utilization, gf.Temperature, gf.Power, gf.PowerLimit = new(uint32(37)), new(int32(41)), new(uint32(120_000)), new(uint32(700_000))
			}
			f.Gpus = append(f.Gpus, gf)
		}
		res.Hosts = append(res.Hosts, f)
	}
	return res
}

// Status implements the RPC. All hosts are voters.
func (c *Cluster) Status(context.Context, *connect.Request[clusterv1.StatusRequest]) (*connect.Response[clusterv1.StatusResponse], error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return connect.NewResponse(c.status()), nil
}

func (c *Cluster) status() *clusterv1.StatusResponse {
	if !c.joined {
		return &clusterv1.StatusResponse{Host: "h1"}
	}
	s := &clusterv1.StatusResponse{
		Joined: true, ClusterId: "c0ffee", Host: "h1", HostId: "id-h1", Leader: c.leader, Term: 3, LastIndex: c.index, AppliedIndex: c.index, CommitIndex: c.index,
		Protocol: 1, Queue: c.queue, CaFingerprint: "aabbcc", CertificateExpiresUnixMs: time.Now().Add(30*24*time.Hour + time.Hour).UnixMilli(), Quorum: c.leader != "",
	}
	for _, h := range all[*clusterv1.Host](c, clusterv1.Kind_KIND_HOST) {
		m := &clusterv1.MemberStatus{
			Host: h.GetName(), Id: h.GetId(), Address: h.GetAddress(), Voter: true, Leader: h.GetName() == c.leader, Healthy: !h.GetDown(),
			Version: h.GetVersion(), Message: h.GetMessage(),
		}
		if h.GetDown() {
			m.LastContactMs, m.Behind = 30_000, 5
		}
		s.Members = append(s.Members, m)
	}
	return s
}
