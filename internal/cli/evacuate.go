package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
)

// maxParallel is the largest value of --parallel. A network link is saturated by far
// fewer.
const maxParallel = 64

// evacuation is how the VMs of a host are migrated away.
type evacuation struct {
	move, all bool
	parallel  int
	deadline  time.Duration
}

// vm is one VM of a host that is drained.
type vm struct {
	m    *gpuctlv1.Machine
	plan *gpuctlv1.MachinePlanResponse
	err  error // why there is no plan
}

func (v vm) movable() bool { return v.err == nil && possible(v.plan) }

// why returns the reasons why a VM cannot be migrated.
func (v vm) why() []string {
	if v.err != nil {
		return []string{v.err.Error()}
	}
	return planReasons(v.plan)
}

// planReasons returns all reasons against a plan, each with its object.
func planReasons(r *gpuctlv1.MachinePlanResponse) []string {
	var out []string
	for _, x := range r.GetReasons() {
		out = append(out, x.GetMessage())
	}
	if len(out) > 0 {
		return out // for any destination
	}
	for _, x := range r.GetRejected() {
		if x.GetHost() == r.GetHost() {
			continue // the host that is drained
		}
		at := x.GetGpu()
		if at == "" {
			at = "host " + x.GetHost()
		}
		for _, why := range x.GetReasons() {
			out = append(out, at+": "+why.GetMessage())
		}
	}
	if len(out) == 0 {
		out = append(out, "the cluster has no other host for it")
	}
	return out
}

// vms are the VMs that a drain affects.
type vms struct {
	all   []vm
	other int // VMs without a GPU, which stay unless --all is given
	// unknown is why nobody says which there are.
	unknown error
}

func (v vms) movable() (n int) {
	for _, one := range v.all {
		if one.movable() {
			n++
		}
	}
	return n
}

// movable makes a plan for each VM of a host. If hostd does not manage VMs, there are
// none.
func (a *app) movable(ctx context.Context, cl clusterClient, host string, f evacuation) (vms, error) {
	var out vms
	res, err := a.machines(ctx, host)
	switch {
	case connect.CodeOf(err) == connect.CodeUnimplemented:
		return out, nil
	case err != nil && f.move:
		return out, a.adviseMachine(ctx, host, "", err)
	case err != nil:
		out.unknown = fmt.Errorf("the VMs of host %s are not known: %w", clean(host), explain(err))
		return out, nil
	}
	c, err := a.connectMigrations()
	if err != nil {
		return out, err
	}
	// A VM whose migration is in progress or held may have no GPU at the moment.
	open, err := call(ctx, cl, cl.List, &clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_MIGRATION, Where: `state in ["running", "held"]`})
	if err != nil {
		return out, err
	}
	moving := map[string]bool{}
	for _, o := range open.GetObjects() {
		moving[o.GetMigration().GetMachine().GetUuid()] = true
	}
	for _, m := range res.GetMachines() {
		if m.GetState() == "shutoff" && len(m.GetGpus()) == 0 {
			continue // it uses nothing of the host
		}
		if len(m.GetGpus()) == 0 && !f.all && !moving[m.GetUuid()] {
			out.other++
			continue
		}
		one := vm{m: m}
		p, err := c.Plan(ctx, connect.NewRequest(f.request(host, m)))
		if err != nil {
			one.err = explain(err)
		} else {
			one.plan = p.Msg
		}
		out.all = append(out.all, one)
	}
	return out, ctx.Err()
}

func (f evacuation) request(host string, m *gpuctlv1.Machine) *gpuctlv1.MachinePlanRequest {
	return &gpuctlv1.MachinePlanRequest{Machine: m.GetUuid(), Host: host, Verb: "migrate", DeadlineMs: f.deadline.Milliseconds()}
}

func vmHeading() []string {
	return []string{"VM", "GPUS", "MOVES TO", "TAKES", "DOWNTIME", "WHY NOT"}
}

func (v vms) rows(host string) [][]string {
	var rows [][]string
	for _, one := range v.all {
		var gpus []string
		for _, g := range one.m.GetGpus() {
			gpus = append(gpus, strings.TrimPrefix(g, host+"/"))
		}
		row := []string{one.m.GetName(), strings.Join(gpus, ","), "", "", "", ""}
		if one.movable() {
			best := one.plan.GetCandidates()[0]
			row[2], row[3], row[4] = best.GetGpu(), lastedOr(best.GetPredictedNs()), lastedOr(best.GetPredictedStopNs())
			if row[2] == "" {
				row[2] = best.GetHost()
			}
			rows = append(rows, row)
			continue
		}
		for i, why := range one.why() {
			if i > 0 {
				row = []string{" ", " ", " ", " ", " ", ""}
			}
			row[5] = why
			rows = append(rows, slices.Clone(row))
		}
	}
	return rows
}

func (v vms) view() []view.Object {
	out := []view.Object{}
	for _, one := range v.all {
		o := view.Object{{Name: "machine", Value: view.Of(one.m)}, {Name: "movable", Value: one.movable()}}
		if one.err != nil {
			o = append(o, view.Member{Name: "error", Value: one.err.Error()})
		} else {
			o = append(o, view.Member{Name: "plan", Value: view.Of(one.plan)})
		}
		out = append(out, o)
	}
	return out
}

// hintMove prints what --move would do.
func (a *app) hintMove(host string, v vms) {
	can := v.movable()
	var stay []string
	for _, one := range v.all {
		if !one.movable() {
			stay = append(stay, one.m.GetName())
		}
	}
	if can > 0 {
		fmt.Fprintf(a.Err, "%d of %s can be moved: gpuctl drain %s --move\n", can, plural(len(v.all), "VM", "VMs"), clean(host))
	}
	if len(stay) > 0 {
		fmt.Fprintf(a.Err, "to be stopped, or repaired first: %s\n", clean(strings.Join(stay, ", ")))
	}
	a.hintOther(v)
}

func (a *app) hintOther(v vms) {
	if v.other > 0 {
		fmt.Fprintf(a.Err, "%s without a GPU: --all moves them, too\n", plural(v.other, "VM stays, being", "VMs stay, being"))
	}
}

// moved is the result of one VM's migration.
type moved struct {
	vm   vm
	last *gpuctlv1.MachineProgress
	end  string // done, rolled_back, held, failed or refused; empty: unknown
	why  string
	text string // where the VM is
}

// evacuate drains a host and migrates its VMs away.
func (a *app) evacuate(ctx context.Context, c clusterClient, req *clusterv1.SetDrainRequest, f evacuation) error {
	res, err := callOn(ctx, c, a.must(clusterv1.Kind_KIND_HOST), req.GetHost(), c.SetDrain, req)
	if err != nil {
		return err
	}
	host := res.GetHost().GetName()
	fmt.Fprintln(a.Err, clean(fmt.Sprintf("host %s is %s", host, hostState(res.GetHost()))))
	ctx, stop := interruptible(ctx)
	defer stop()
	v, err := a.movable(ctx, c, host, f)
	if err != nil {
		return err
	}
	if len(v.all) > 0 {
		if err := table(a.Err, vmHeading(), v.rows(host)); err != nil {
			return err
		}
	}
	e := &evacuator{a: a, host: host, f: f}
	if e.c, err = a.connectMigrations(); err != nil {
		return err
	}
	return a.evacuated(ctx, host, v, e.run(ctx, v.all))
}

// evacuated prints the summary.
func (a *app) evacuated(ctx context.Context, host string, v vms, all []moved) error {
	entries := []view.Object{}
	var stay, lost []string
	for _, m := range all {
		entry := view.Object{
			{Name: "machine", Value: m.vm.m.GetName()},
			{Name: "uuid", Value: m.vm.m.GetUuid()},
			{Name: "migration", Value: m.last.GetId()},
			{Name: "end", Value: m.end},
			{Name: "gpu", Value: m.last.GetGpu()},
			{Name: "took_ns", Value: m.last.GetTookNs()},
			{Name: "stopped_ns", Value: m.last.GetStoppedNs()},
			{Name: "message", Value: m.why},
			{Name: "lost", Value: view.List(m.last.GetLost())},
		}
		entries = append(entries, entry)
		if m.end != endDone {
			stay = append(stay, m.vm.m.GetName())
			fmt.Fprintln(a.Err, clean(m.vm.m.GetName()+" stays: "+m.why))
			continue
		}
		if err := lostError(m.vm.m.GetName(), m.last); err != nil {
			lost = append(lost, m.vm.m.GetName())
			fmt.Fprintln(a.Err, err)
		}
	}
	if a.structured() {
		if err := a.print(view.Object{{Name: "host", Value: host}, {Name: "vms", Value: entries}}); err != nil {
			return err
		}
	}
	a.hintOther(v)
	switch {
	case len(stay) > 0 && ctx.Err() != nil:
		return fmt.Errorf("interrupted: host %s is draining, and what has begun goes on (gpuctl migrations lists it)", clean(host))
	case len(stay) > 0:
		return fmt.Errorf("%d of %s moved away from host %s; %s: stop what can't be moved, or fix what is said and repeat gpuctl drain %s --move",
			len(all)-len(stay), plural(len(all), "VM", "VMs"), clean(host), clean(strings.Join(stay, ", "))+plural2(len(stay), " stays", " stay"), clean(host))
	case len(lost) > 0:
		return fmt.Errorf("%s moved away from host %s; sessions of %s were lost on the way, or could not be asked for",
			plural(len(all), "VM is", "VMs are"), clean(host), clean(strings.Join(lost, ", ")))
	case a.structured():
		return nil
	case len(all) == 0:
		return a.say("host " + clean(host) + " has no VM to move")
	}
	return a.say(fmt.Sprintf("%s moved away from host %s", plural(len(all), "VM is", "VMs are"), clean(host)))
}

func plural2(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// evacuator migrates VMs, a few at a time.
type evacuator struct {
	a    *app
	c    migrationClient
	host string
	f    evacuation

	mu sync.Mutex // guards the output
}

// run migrates all VMs that can be migrated. A VM whose only obstacle is that too many
// migrations run is tried again when fewer do. The results are in the order of the VMs.
func (e *evacuator) run(ctx context.Context, all []vm) []moved {
	out := make([]moved, len(all))
	var waiting []int
	for i, v := range all {
		out[i].vm = v
		if v.movable() || onlyTooMany(v.plan) {
			waiting = append(waiting, i)
			continue
		}
		out[i].end, out[i].why = endRefused, strings.Join(v.why(), "; ")
	}
	type result struct {
		i int
		m moved
	}
	results := make(chan result)
	running, full := 0, false // full: wait until one migration has ended
	for len(waiting) > 0 || running > 0 {
		for len(waiting) > 0 && running < e.f.parallel && !full && ctx.Err() == nil {
			i := waiting[0]
			waiting = waiting[1:]
			running++
			go func() { results <- result{i, e.one(ctx, all[i])} }()
		}
		if running == 0 { // interrupted
			break
		}
		r := <-results
		running--
		full = false
		if r.m.end == endRefused && running > 0 && onlyTooMany(r.m.last.GetRefused()) {
			waiting, full = append(waiting, r.i), true
			continue
		}
		out[r.i] = r.m
	}
	for _, i := range waiting {
		out[i].why = "it was not begun"
	}
	return out
}

// onlyTooMany reports whether, for some destination, the number of running migrations is
// the only obstacle.
func onlyTooMany(r *gpuctlv1.MachinePlanResponse) bool {
	if r == nil || possible(r) {
		return false
	}
	only := func(reasons []*gpuctlv1.Reason) bool {
		return len(reasons) > 0 && !slices.ContainsFunc(reasons, func(x *gpuctlv1.Reason) bool { return x.GetCode() != tooMany })
	}
	if len(r.GetReasons()) > 0 {
		return only(r.GetReasons())
	}
	return slices.ContainsFunc(r.GetRejected(), func(x *gpuctlv1.MachineRejection) bool { return only(x.GetReasons()) })
}

func (e *evacuator) say(name, text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	fmt.Fprintln(e.a.Err, clean(name+": "+text))
}

// one migrates one VM, and prints each step.
func (e *evacuator) one(ctx context.Context, v vm) moved {
	name, step, said, begun := v.m.GetName(), "", "", false
	f := &follower{c: e.c, again: func() { e.say(name, "hostd went away; trying again") }, see: func(u *gpuctlv1.MachineProgress) error {
		if u.GetRefused() != nil || u.GetEnd() != "" || u.GetId() == "" {
			return nil
		}
		if !begun {
			begun = true
			e.say(name, beginWords("migrate", name, u))
		}
		if shown := stepShown(u); shown.GetStep() != step && u.GetStep() != "" {
			step, shown.Message = shown.GetStep(), news(shown.GetMessage(), &said)
			e.say(name, fmt.Sprintf("[%d/%d] %s%s", shown.GetStepIndex()+1, shown.GetSteps(), step, note(shown)))
		}
		return nil
	}}
	last, err := f.follow(ctx, func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.MachineProgress], error) {
		return e.c.Start(ctx, connect.NewRequest(&gpuctlv1.MachineStartRequest{Plan: e.f.request(e.host, v.m)}))
	})
	out := moved{vm: v, last: last, end: last.GetEnd()}
	switch {
	case err != nil:
		out.end = ""
		if err = e.a.unfinished(ctx, e.f.request(e.host, v.m), last, err); err != nil {
			out.why = err.Error()
		}
	case last.GetRefused() != nil:
		out.end, out.why = endRefused, strings.Join(planReasons(last.GetRefused()), "; ")
	case out.end != endDone:
		out.why = endWords("migrate", name, last, e.a.migration(ctx, last.GetId()))
	default:
		out.text = e.a.doneWords(ctx, name, last, e.a.migration(ctx, last.GetId()))
		if err := e.done(out.text); err != nil {
			out.why = err.Error()
		}
	}
	return out
}

// done prints where a VM is now.
func (e *evacuator) done(text string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.a.structured() {
		return nil
	}
	return e.a.say(clean(text))
}
