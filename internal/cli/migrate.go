package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

// migrationClient is a client of MigrationService.
type migrationClient = gpuctlv1connect.MigrationServiceClient

// Ends of a migration, with hostd's names.
const (
	endDone       = "done"
	endRolledBack = "rolled_back"
	endHeld       = "held"
	endWaiting    = "waiting"
	endRefused    = "refused" // gpuctl's own: it was not started
)

// tooMany is the code of a reason that will go away without any action.
const tooMany = "too_many_migrations"

func (a *app) connectMigrations() (migrationClient, error) {
	h, url, err := a.dialer()
	if err != nil {
		return nil, err
	}
	return gpuctlv1connect.NewMigrationServiceClient(h, url, a.patience()), nil
}

// machineFlags are the flags of commands about VMs.
type machineFlags struct {
	vm       bool
	on       string
	deadline time.Duration
	noWait   bool
	cold     bool
	live     string
	wait     bool
}

func (f *machineFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.BoolVar(&f.vm, "vm", false, "the name is a VM's, whatever sessions there are")
	flags.DurationVar(&f.deadline, "deadline", 0, "of a VM: the longest `time` that it may take (default any)")
	flags.BoolVar(&f.noWait, "no-wait", false, "of a VM: return when it has begun")
	flags.BoolVar(&f.cold, "force-cold", false, "of a VM that can't be moved alive: stop it, and start it with the other card; its applications end")
	flags.StringVar(&f.live, "live", "", "of a VM: let its applications compute on a remote `GPU` while it moves, or never (default where that shortens their downtime)")
	flags.Lookup("live").NoOptDefVal = liveAlways
	_ = cmd.RegisterFlagCompletionFunc("live", cobra.FixedCompletions([]string{liveAlways, liveNever}, cobra.ShellCompDirectiveNoFileComp))
	flags.BoolVar(&f.wait, "wait", false, "of a VM, with --live: stop before it gets its card, with its applications on the remote GPU, until gpuctl migrations resume or abort; without --to it is its own card")
	onFlag(cmd, &f.on, "`host` of the VM (default where it is found)")
}

// Values of --live, with hostd's names.
const (
	liveAlways = "always"
	liveNever  = "never"
)

// named returns an error if flags were given that are for VMs only.
func (f *machineFlags) named(cmd *cobra.Command) error {
	for _, name := range []string{"deadline", "no-wait", "force-cold", "live", "wait"} {
		if cmd.Flags().Changed(name) {
			return cmdutil.Usage(fmt.Errorf("--%s is for VMs, and this is a session; a VM is meant with --vm", name))
		}
	}
	return nil
}

func (f *machineFlags) check(cmd *cobra.Command) error {
	for _, name := range []string{"build", "timeout", "fail-at"} {
		if cmd.Flags().Changed(name) {
			return cmdutil.Usage(fmt.Errorf("--%s is for sessions, and this is a VM", name))
		}
	}
	if f.live != "" && f.live != liveAlways && f.live != liveNever {
		return cmdutil.Usage(fmt.Errorf("--live=%s: want --live, or --live=never", f.live))
	}
	if f.wait && f.live != liveAlways {
		return cmdutil.Usage(errors.New("--wait is for --live: the applications compute on a remote GPU meanwhile"))
	}
	if cmd.Flags().Changed("deadline") && f.deadline < time.Millisecond {
		return cmdutil.Usage(fmt.Errorf("--deadline %v: want a time, as 60s", f.deadline))
	}
	return nil
}

// subject finds out whether a command is about a session or a VM, and returns the VM with
// its host.
func (a *app) subject(ctx context.Context, verb, name string, f machineFlags) (machine *gpuctlv1.Machine, err error) {
	if f.vm || f.on != "" {
		if name == "" {
			return nil, a.whichMachine(ctx, verb, errors.New("no VM is named"))
		}
		return &gpuctlv1.Machine{Name: name, Host: f.on}, nil // hostd finds its host
	}
	c, err := a.connect()
	if err != nil {
		return nil, err
	}
	res, err := c.DescribeSession(ctx, connect.NewRequest(&gpuctlv1.DescribeSessionRequest{Session: name}))
	s := answer(res).GetSession()
	switch {
	case err == nil && (name == "" || s.GetId() == name || strconv.FormatUint(uint64(s.GetPid()), 10) == name):
		return nil, nil //nolint:nilnil // no VM is an answer
	case err == nil:
		// The prefix of a session's id may be a VM's complete name.
		if m, _, err := a.machineNamed(ctx, name); err == nil && m != nil {
			return nil, cmdutil.Usage(fmt.Errorf("%q is the beginning of session %s and the name of a VM: write the session's whole id, or --vm", name, clean(s.GetId())))
		}
		return nil, nil //nolint:nilnil // no VM is an answer
	case notThere(err) && name == "":
		return nil, a.whichMachine(ctx, verb, err)
	case !notThere(err) && (connect.CodeOf(err) != connect.CodeInvalidArgument || name == ""):
		return nil, err
	}
	m, near, machinesErr := a.machineNamed(ctx, name)
	switch {
	case connect.CodeOf(machinesErr) == connect.CodeUnimplemented || machinesErr == nil && m == nil && connect.CodeOf(err) == connect.CodeInvalidArgument:
		return nil, err // this host has no VMs, or the command is about a session
	case machinesErr != nil:
		return nil, machinesErr
	case m == nil:
		return nil, fmt.Errorf("there is no session and no VM %q%s", clean(name), near)
	}
	return m, nil
}

// answer returns the message of a response, or nil if there is no response.
func answer[T any](res *connect.Response[T]) *T {
	if res == nil {
		return new(T)
	}
	return res.Msg
}

// machineNamed finds a VM of the cluster by its name or UUID. If there is none, hint
// contains similar names.
func (a *app) machineNamed(ctx context.Context, name string) (m *gpuctlv1.Machine, hint string, err error) {
	res, err := a.machines(ctx, "*")
	if err != nil {
		return nil, "", err
	}
	var names, at []string
	for _, one := range res.GetMachines() {
		names = append(names, one.GetName())
		if one.GetName() == name || one.GetUuid() == name {
			m = one
			at = append(at, one.GetHost())
		}
	}
	if len(at) > 1 {
		return nil, "", cmdutil.Usage(fmt.Errorf("VM %s is on %s: say which with --on", clean(name), clean(strings.Join(at, " and "))))
	}
	hint = clean(suggest.Hint(name, names)) + "; gpuctl sessions and gpuctl vms list them"
	if missing := res.GetMissing(); len(missing) > 0 {
		hint += " (no answer from host " + clean(strings.Join(missing, ", ")) + ")"
	}
	return m, hint, nil
}

func (a *app) machines(ctx context.Context, host string) (*gpuctlv1.ListMachinesResponse, error) {
	c, err := a.connectDevices()
	if err != nil {
		return nil, err
	}
	res, err := c.ListMachines(ctx, connect.NewRequest(&gpuctlv1.ListMachinesRequest{Host: host}))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// whichMachine returns an error that lists the possible VMs if none was named. It never
// chooses one: a VM is moved only if it was named.
func (a *app) whichMachine(ctx context.Context, verb string, cause error) error {
	res, err := a.machines(ctx, "*")
	if err != nil {
		return cause
	}
	var names []string
	for _, m := range res.GetMachines() {
		if len(m.GetGpus()) > 0 {
			names = append(names, clean(m.GetName()))
		}
	}
	what := "there is no session"
	if connect.CodeOf(cause) == connect.CodeUnknown {
		what = cause.Error()
	}
	switch len(names) {
	case 0:
		return cause
	case 1:
		return cmdutil.Usage(fmt.Errorf("%s; the only VM with a GPU is %s: gpuctl %s %s", what, names[0], verb, names[0]))
	}
	return cmdutil.Usage(fmt.Errorf("%s; name one of the VMs with a GPU: %s", what, strings.Join(names, ", ")))
}

// adviseMachine converts the refusal of a call about a VM, possibly on a named host, to a
// text with what to do next.
func (a *app) adviseMachine(ctx context.Context, host, name string, err error) error {
	c, dialErr := a.connectCluster()
	if dialErr != nil {
		return err
	}
	r := reason.Of(err)
	if r.Code != reason.NotFound {
		return advise(ctx, c, err)
	}
	why := explain(err)
	switch {
	case r.Next != "":
	case name != "" && r.Kind == "vm" && r.Object == name:
		var names []string
		if res, err := a.machines(ctx, "*"); err == nil {
			for _, m := range res.GetMachines() {
				names = append(names, m.GetName())
			}
		}
		return fmt.Errorf("%w%s; gpuctl vms lists them", why, clean(suggest.Hint(name, names)))
	case host != "" && r.Kind == "host" && r.Object == host:
		return withSuggestion(ctx, c, a.must(clusterv1.Kind_KIND_HOST), host, why)
	}
	return why
}

// moveMachine executes migrate, upgrade and downgrade for a VM.
func (a *app) moveMachine(ctx context.Context, req *gpuctlv1.MachinePlanRequest, planOnly, noWait bool) error {
	c, err := a.connectMigrations()
	if err != nil {
		return err
	}
	if planOnly {
		res, err := c.Plan(ctx, connect.NewRequest(req))
		if err != nil {
			return a.adviseMachine(ctx, req.GetHost(), req.GetMachine(), err)
		}
		return a.printMachinePlan(req.GetVerb(), res.Msg)
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	show := a.newMoveProgress(req.GetVerb(), req.GetMachine())
	f := &follower{c: c, noWait: noWait, see: show.see, again: show.again}
	last, err := f.follow(ctx, func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.MachineProgress], error) {
		return c.Start(ctx, connect.NewRequest(&gpuctlv1.MachineStartRequest{Plan: req, NoWait: noWait}))
	})
	show.end()
	if err != nil {
		return a.unfinished(ctx, req, last, err)
	}
	return a.ended(ctx, req.GetVerb(), req.GetMachine(), last)
}

// follower follows a migration to its end. If a stream breaks, it opens another one,
// because the migration goes on.
type follower struct {
	c      migrationClient
	noWait bool
	see    func(*gpuctlv1.MachineProgress) error
	again  func() // called when a stream has broken
}

// errOutput means that writing the output failed, not reading the stream.
type errOutput struct{ error }

// follow returns the last progress: the end, or the last one that was received.
func (f *follower) follow(ctx context.Context, open func(context.Context) (*connect.ServerStreamForClient[gpuctlv1.MachineProgress], error)) (*gpuctlv1.MachineProgress, error) {
	last := &gpuctlv1.MachineProgress{}
	wait, since := firstRetry, time.Now()
	for {
		over, err := f.once(ctx, open, &last, func() { wait, since = firstRetry, time.Now() })
		var output errOutput
		switch {
		case over:
			return last, nil
		case errors.As(err, &output):
			return last, output.error
		case ctx.Err() != nil:
			return last, ctx.Err()
		case last.GetId() == "" && err != nil:
			return last, err
		case last.GetId() == "":
			return last, unavailable("hostd went away before it said whether the migration has begun; gpuctl migrations lists it if so")
		case connect.IsWireError(err) && connect.CodeOf(err) != connect.CodeUnavailable:
			return last, err
		case time.Since(since) > giveUp:
			return last, unavailable("hostd does not answer any more")
		}
		f.again()
		open = func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.MachineProgress], error) {
			return f.c.Watch(ctx, connect.NewRequest(&gpuctlv1.MachineWatchRequest{Id: last.GetId()}))
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		wait = min(2*wait, lastRetry)
	}
}

// once reads one stream. It calls moved when there is something new.
func (f *follower) once(ctx context.Context, open func(context.Context) (*connect.ServerStreamForClient[gpuctlv1.MachineProgress], error), last **gpuctlv1.MachineProgress, moved func()) (over bool, err error) {
	stream, err := open(ctx)
	if err != nil {
		return false, err
	}
	defer stream.Close()
	for stream.Receive() {
		u := proto.CloneOf(stream.Msg())
		if u.GetId() == "" {
			u.Id = (*last).GetId()
		}
		was := proto.CloneOf(*last)
		was.TookNs = u.GetTookNs() // only the time has changed
		if !proto.Equal(was, u) {
			moved()
		}
		*last = u
		if err := f.see(u); err != nil {
			return false, errOutput{err}
		}
		if u.GetEnd() != "" || u.GetRefused() != nil || f.noWait && u.GetId() != "" {
			return true, nil
		}
	}
	return false, stream.Err()
}

// unfinished prints the state of a migration whose end was not seen.
func (a *app) unfinished(ctx context.Context, req *gpuctlv1.MachinePlanRequest, last *gpuctlv1.MachineProgress, err error) error {
	id := clean(last.GetId())
	switch {
	case id == "" && ctx.Err() != nil:
		return errors.New("interrupted; gpuctl migrations reports whether it has begun")
	case id == "":
		return a.adviseMachine(ctx, req.GetHost(), req.GetMachine(), err)
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted; migration %s goes on: gpuctl migrations watch %s follows it, gpuctl migrations abort %s has it undone", id, id, id)
	}
	why := err
	var e *connect.Error
	if errors.As(err, &e) {
		why = errors.New(words(e))
	}
	return unavailable("%w; migration %s goes on all the same: gpuctl migrations watch %s follows it", why, id, id)
}

// ended prints how a migration ended, and returns the error of the command.
func (a *app) ended(ctx context.Context, verb, name string, u *gpuctlv1.MachineProgress) error {
	id := clean(u.GetId())
	if r := u.GetRefused(); r != nil {
		return a.refuseMachine(verb, name, r)
	}
	if u.GetEnd() == "" { // --no-wait
		if a.structured() {
			return nil
		}
		return a.say(fmt.Sprintf("migration %s of VM %s has begun; gpuctl migrations watch %s follows it", id, clean(name), id))
	}
	m := a.migration(ctx, u.GetId())
	if n := m.GetMachine().GetName(); n != "" {
		name = n
	}
	if v := m.GetVerb(); v != "" {
		verb = v
	}
	if u.GetEnd() == endWaiting {
		if a.structured() {
			return lostError(name, u)
		}
		if err := a.say(clean(fmt.Sprintf("migration %s waits: %s", id, orWord(u.GetMessage(), m.GetMessage())))); err != nil {
			return err
		}
		return lostError(name, u)
	}
	if u.GetEnd() != endDone {
		return errors.New(endWords(verb, name, u, m))
	}
	if a.structured() {
		return lostError(name, u)
	}
	if err := a.say(clean(a.doneWords(ctx, name, u, m))); err != nil {
		return err
	}
	if lost := lostError(name, u); lost != nil {
		return lost // which says more than the message does
	}
	if u.GetMessage() != "" {
		fmt.Fprintln(a.Err, clean(u.GetMessage()))
	}
	return nil
}

// lostError returns the error of a command whose VM has arrived, and sessions of it were lost
// on the way; nil: none was. Where that could not be asked, it is an error, too.
func lostError(name string, u *gpuctlv1.MachineProgress) error {
	text := lostWords(u.GetLost())
	if text == "" && u.GetLostUnknown() == "" {
		return nil
	}
	if text == "" {
		text = "which sessions were lost on the way is not known: " + u.GetLostUnknown() + "; look whether its applications go on"
		return cmdutil.WithCode(errors.New(clean("VM "+name+": "+text)), cmdutil.Failed)
	}
	r := reason.Of(reason.Errorf(reason.SessionsLost, "%s", text))
	return cmdutil.WithCode(errors.New(clean(withAdvice("VM "+name+": "+text, r)+"; gpuctl describe migration "+u.GetId()+" lists them")), r.Exit)
}

// lostNamed is how many lost sessions a sentence names.
const lostNamed = 10

// lostWords returns in words which sessions were lost; empty: none.
func lostWords(lost []*gpuctlv1.LostSession) string {
	if len(lost) == 0 {
		return ""
	}
	var out []string
	for _, l := range lost[:min(len(lost), lostNamed)] {
		text := l.GetId()
		if l.GetCommand() != "" {
			text += " (" + l.GetCommand() + ")"
		}
		out = append(out, text+": "+orWord(l.GetReason(), "hostd does not say why"))
	}
	if more := len(lost) - lostNamed; more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return fmt.Sprintf("%s lost on the way: %s", plural(len(lost), "session was", "sessions were"), strings.Join(out, "; "))
}

// doneWords returns in words where a VM is now.
func (a *app) doneWords(ctx context.Context, name string, u *gpuctlv1.MachineProgress, m *clusterv1.Migration) string {
	gpu := u.GetGpu()
	if gpu == "" {
		gpu = m.GetMachine().GetToGpu()
	}
	host := m.GetMachine().GetToHost()
	if host == "" {
		host, _, _ = strings.Cut(gpu, "/")
	}
	text := "VM " + name + " is on " + orWord(host, "its new host")
	if gpu != "" {
		text += " with " + gpu
		if model := a.modelOf(ctx, gpu); model != "" {
			text += " (" + model + ")"
		}
	}
	text += ": took " + lasted(u.GetTookNs())
	if u.GetStoppedNs() > 0 {
		text += ", downtime of its applications " + lasted(u.GetStoppedNs())
	}
	return text
}

// endWords returns in words how a migration ended that is not done, the state of its VM,
// and what to do next.
func endWords(verb, name string, u *gpuctlv1.MachineProgress, m *clusterv1.Migration) string {
	why, id := u.GetMessage(), u.GetId()
	if why == "" {
		why = m.GetMessage()
	}
	text := fmt.Sprintf("%s of VM %s ", verb, name)
	switch u.GetEnd() {
	case endRolledBack:
		text += "was rolled back, it goes on as it was"
		if len(u.GetLost()) > 0 {
			text += ", but for the sessions that were lost,"
		}
		if host := m.GetMachine().GetFromHost(); host != "" {
			text += " on " + host
		}
		if gpu := m.GetMachine().GetFromGpu(); gpu != "" {
			text += " with " + gpu
		}
		text += ": " + orWord(why, "hostd does not say why")
	case endHeld:
		text += heldWords(m) + orWord(why, "hostd does not say why")
		if u.GetNext() == "" { // or the message contains it
			text += fmt.Sprintf("; fix the cause, then gpuctl migrations resume %s", id)
		}
		if lost := lostWords(u.GetLost()); lost != "" { // the message of another end has them
			text += "; " + lost
		}
	default:
		text += fmt.Sprintf("failed: %s; gpuctl describe migration %s says where things are", orWord(why, "hostd does not say why"), id)
	}
	return clean(text)
}

// heldWords returns in words what the applications of a held migration do.
func heldWords(m *clusterv1.Migration) string {
	if gpu := m.GetMachine().GetFarGpu(); gpu != "" {
		return "is held, and " + gpu + " is kept for its applications: "
	}
	return "is held, its applications are frozen and their state is safe: "
}

// migration returns the record of a migration; nil if it cannot be read.
func (a *app) migration(ctx context.Context, id string) *clusterv1.Migration {
	c, err := a.connectCluster()
	if err != nil || id == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	res, err := c.List(ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_MIGRATION, Name: id, Stale: true}))
	if err != nil || len(res.Msg.GetObjects()) != 1 || res.Msg.GetObjects()[0].GetMigration().GetId() != id {
		return nil
	}
	return res.Msg.GetObjects()[0].GetMigration()
}

// modelOf returns a GPU's model; empty if it cannot be read.
func (a *app) modelOf(ctx context.Context, gpu string) string {
	c, err := a.connectCluster()
	if err != nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	res, err := c.List(ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_GPU, Name: gpu, Stale: true}))
	if err != nil || len(res.Msg.GetObjects()) != 1 {
		return ""
	}
	return res.Msg.GetObjects()[0].GetGpu().GetModel()
}

// lasted formats a duration for a sentence.
func lasted(ns int64) string {
	d := time.Duration(ns)
	switch {
	case d >= 10*time.Minute:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	case d >= 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return duration(ns)
}

// moveProgress shows the progress of a VM's migration.
type moveProgress struct {
	a          *app
	bar        *progress
	verb, name string
	begun      bool
	gpu, said  string
}

func (a *app) newMoveProgress(verb, name string) *moveProgress {
	return &moveProgress{a: a, bar: a.newProgress(), verb: verb, name: name}
}

func (p *moveProgress) see(u *gpuctlv1.MachineProgress) error {
	if p.a.structured() {
		return p.a.printLine(view.Of(u))
	}
	switch {
	case u.GetRefused() != nil || u.GetEnd() != "" || u.GetId() == "":
		return nil
	case !p.begun:
		p.begun, p.gpu = true, u.GetGpu()
		p.note("%s", beginWords(p.verb, p.name, u))
	case u.GetGpu() != p.gpu && u.GetGpu() != "":
		p.gpu = u.GetGpu()
		p.note("now to %s", p.gpu)
	}
	if u.GetStep() == "" {
		return nil
	}
	shown := stepShown(u)
	if p.bar.columns > 0 && u.GetPredictedNs() > 0 {
		all := "about " + lasted(u.GetPredictedNs())
		if took := u.GetTookNs(); took >= int64(time.Second) {
			all = lasted(took) + " of " + all
		}
		shown.Message = strings.TrimSuffix(all+", "+shown.GetMessage(), ", ")
	}
	if p.bar.columns == 0 && shown.GetStep() != p.bar.step {
		shown.Message = news(shown.GetMessage(), &p.said)
	}
	p.bar.update(shown)
	return nil
}

// news returns a message unless it was printed before, because each undo repeats the
// cause.
func news(message string, said *string) string {
	if message == *said {
		return ""
	}
	*said = message
	return message
}

// beginWords returns the first line about a migration.
func beginWords(verb, name string, u *gpuctlv1.MachineProgress) string {
	text := fmt.Sprintf("migration %s: %s of VM %s", u.GetId(), verb, name)
	if u.GetGpu() != "" {
		text += " to " + u.GetGpu()
	}
	if u.GetPredictedNs() > 0 {
		text += ", about " + lasted(u.GetPredictedNs())
	}
	return text
}

// stepShown converts the progress of a VM's migration to that of a session's operation.
func stepShown(u *gpuctlv1.MachineProgress) *gpuctlv1.Progress {
	step := u.GetStep()
	if u.GetUndo() {
		step = "undo " + step
	}
	return &gpuctlv1.Progress{
		Step: step, StepIndex: max(u.GetStepIndex(), 1) - 1, Steps: u.GetSteps(), BytesDone: u.GetBytesDone(), BytesTotal: u.GetBytesTotal(), Message: u.GetMessage(),
	}
}

// note prints a line between the progress bars.
func (p *moveProgress) note(format string, args ...any) {
	p.bar.end()
	p.bar.dirty = false
	fmt.Fprintln(p.bar.w, clean(fmt.Sprintf(format, args...)))
}

func (p *moveProgress) again() {
	p.end()
	fmt.Fprintln(p.a.Err, "hostd went away; trying again")
}

func (p *moveProgress) end() {
	p.bar.end()
	p.bar.dirty = false
}

// refuseMachine prints all reasons and returns the exit status.
func (a *app) refuseMachine(verb, name string, r *gpuctlv1.MachinePlanResponse) error {
	if n := r.GetMachine(); n != "" {
		name = n
	}
	if rows := reasonRows(r); len(rows) > 0 && !a.structured() {
		if err := table(a.Err, rejectionHeading(), rows); err != nil {
			return err
		}
	}
	return a.impossible(verb, name, r)
}

func (a *app) impossible(verb, name string, r *gpuctlv1.MachinePlanResponse) error {
	why := "no GPU of the cluster can take it"
	switch {
	case len(r.GetReasons()) > 0:
		why = "it can't be moved as it is"
	case len(r.GetRejected()) == 0:
		why = "the cluster has no other GPU (gpuctl get gpus)"
	case verb == "migrate" && len(r.GetGpus()) == 0:
		why = "no host of the cluster can take it"
	}
	return cmdutil.WithCode(fmt.Errorf("%s of VM %s refused: %s; it goes on as it was", verb, clean(name), why), cmdutil.Refused)
}

func possible(r *gpuctlv1.MachinePlanResponse) bool {
	return len(r.GetReasons()) == 0 && len(r.GetCandidates()) > 0
}
