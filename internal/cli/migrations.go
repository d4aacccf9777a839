package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

// Timeline draws a migration as an SVG.
type Timeline func(*clusterv1.Migration) []byte

// WithTimeline sets the function that draws migrations.
func WithTimeline(t Timeline) Option { return func(a *app) { a.timeline = t } }

func (a *app) migrationsCommand() *cobra.Command {
	var f getFlags
	k := a.must(clusterv1.Kind_KIND_MIGRATION)
	cmd := &cobra.Command{
		Use: "migrations", Short: "List migrations, and abort, resume or follow one",
		Long: `List the migrations, upgrades and downgrades of VMs and sessions that the cluster
remembers, the newest first. gpuctl describe migration ID shows one step by step, and
gpuctl get migrations --help lists what --where and --sort-by can name.`,
		Example: `  gpuctl migrations
  gpuctl migrations --where 'state == "held"' -o wide
  gpuctl migrations --watch
  gpuctl migrations abort m7`,
		Annotations: map[string]string{outputName: "yes"},
		Args:        noSuchCommand,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.sortBy == "" && !f.watch {
				f.sortBy = "-started"
			}
			return a.get(cmd.Context(), k, nil, f)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.where, "where", "", "only those for which this CEL `expression` is true")
	flags.StringVar(&f.sortBy, "sort-by", "", "`field` to sort by, -field for the largest first (default -started)")
	flags.BoolVarP(&f.watch, "watch", "w", false, "go on and print every change")
	flags.BoolVar(&f.stale, "stale", false, "as the asked host knows it, even without a leader")
	flags.Uint32Var(&f.limit, "limit", 0, "at most so many (0: all)")
	cmd.AddCommand(a.abortCommand(), a.resumeMigrationCommand(), a.watchMigrationCommand())
	return cmd
}

func (a *app) migrationColumns() []column {
	type T = *clusterv1.Migration
	return []column{
		col("MIGRATION", T.GetId), col("VERB", T.GetVerb), col("OBJECT", movedObject), col("FROM", T.GetFrom), col("TO", T.GetTo),
		col("STATE", migrationState), col("STEP", stepOf), col("TOOK", func(m T) string { return lastedOr(a.tookSoFar(m)) }),
		col("DOWNTIME", func(m T) string { return lastedOr(m.GetStoppedNs()) }),
		col("AGE", func(m T) string { return a.age(m.GetStartedUnixMs()) }),
		col("MESSAGE", func(m T) string { return a.cut(m.GetMessage(), 48) }),
		wide("DRIVER", T.GetDriver), wide("COPIED", func(m T) string { return bytesOr(m.GetBytes(), "") }),
		wide("PREDICTED", func(m T) string { return lastedOr(m.GetMachine().GetPredictedNs()) }), wide("CLAIM", T.GetClaim),
		wide("LOST", func(m T) string { return lostNames(m.GetMachine().GetLost()) }),
	}
}

// lostNames returns the names of lost sessions.
func lostNames(lost []*gpuctlv1.LostSession) string {
	var names []string
	for _, l := range lost[:min(len(lost), lostNamed)] {
		names = append(names, l.GetId())
	}
	if len(lost) > lostNamed {
		names = append(names, "…")
	}
	return strings.Join(names, ",")
}

func lastedOr(ns int64) string {
	if ns == 0 {
		return ""
	}
	return lasted(ns)
}

// movedObject returns the VM or session of a migration.
func movedObject(m *clusterv1.Migration) string {
	if name := m.GetMachine().GetName(); name != "" {
		return "VM " + name
	}
	return m.GetObject()
}

func migrationState(m *clusterv1.Migration) string {
	state := strings.ReplaceAll(view.Word(m.GetState()), "_", " ")
	if m.GetState() == clusterv1.MigrationState_MIGRATION_STATE_RUNNING && m.GetMachine().GetAborting() {
		state += " (aborting)"
	}
	if n := len(m.GetMachine().GetLost()); n > 0 {
		state += fmt.Sprintf(", %d lost", n)
	}
	return state
}

func stepOf(m *clusterv1.Migration) string {
	if m.GetMachine().GetUndoing() && m.GetStep() != "" {
		return "undo " + m.GetStep()
	}
	return m.GetStep()
}

// tookSoFar returns how long a migration took, in nanoseconds. If it runs, it is the time
// until now.
func (a *app) tookSoFar(m *clusterv1.Migration) int64 {
	if m.GetStartedUnixMs() == 0 {
		return 0
	}
	began, end := time.UnixMilli(m.GetStartedUnixMs()), a.now()
	switch {
	case m.GetEndedUnixMs() > 0:
		end = time.UnixMilli(m.GetEndedUnixMs())
	case m.GetState() != clusterv1.MigrationState_MIGRATION_STATE_RUNNING:
		return 0 // its end was not recorded
	}
	return max(0, int64(end.Sub(began))) // clocks may differ
}

// machineMigration finds a migration of a VM by its id or a prefix of it.
func (a *app) machineMigration(ctx context.Context, id string) (*clusterv1.Migration, error) {
	c, err := a.connectCluster()
	if err != nil {
		return nil, err
	}
	o, err := resolve(ctx, c, a.must(clusterv1.Kind_KIND_MIGRATION), id, false)
	if err != nil {
		return nil, err
	}
	m := o.GetMigration()
	if m.GetMachine() == nil {
		return nil, cmdutil.WithCode(fmt.Errorf("migration %s is of session %s, and its host ends it by itself: gpuctl describe migration %s shows it",
			clean(m.GetId()), clean(m.GetObject()), clean(m.GetId())), cmdutil.Refused)
	}
	return m, nil
}

// adviseMigration converts the refusal of a call about a migration to a text with what to
// do next.
func (a *app) adviseMigration(ctx context.Context, err error) error {
	c, dialErr := a.connectCluster()
	if dialErr != nil {
		return err
	}
	return advise(ctx, c, err)
}

func (a *app) abortCommand() *cobra.Command {
	return &cobra.Command{
		Use: "abort ID", Short: "Have a running migration of a VM undone",
		Long: `Have a running migration of a VM undone, step by step, before it is committed. What
can't be stopped in the middle, as the live migration itself, is waited for first and
then gone back.`,
		Example: "  gpuctl migrations abort m7",
		Args:    arguments(cobra.ExactArgs(1)), ValidArgsFunction: a.completeMigrations(`state == "running"`),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.redirect(cmd.Context(), args[0], "is being undone", func(c migrationClient, id string) (string, error) {
				res, err := c.Abort(cmd.Context(), connect.NewRequest(&gpuctlv1.MachineAbortRequest{Id: id}))
				return answer(res).GetMessage(), err
			})
		},
	}
}

func (a *app) resumeMigrationCommand() *cobra.Command {
	var absent string
	cmd := &cobra.Command{
		Use: "resume ID", Short: "Let a held migration of a VM go on",
		Long: `Let a migration go on that is held: its VM runs, and the applications that use the
GPU are frozen with their state safe in the VM's memory. Fix first what its message
names.

A VM that was sent to a host which cannot be asked since may run there. Nothing goes on
before that host says that it does not. Where it never will, as it has no power or the
VM was destroyed there by hand, --absent-on says so in its place: with it you assert
that the VM does not run on that host and will not. If that is wrong it runs twice, on
the same disks.`,
		Example: "  gpuctl migrations --where 'state == \"held\"'\n  gpuctl migrations resume m7\n  gpuctl migrations resume m7 --absent-on node2",
		Args:    arguments(cobra.ExactArgs(1)), ValidArgsFunction: a.completeMigrations(`state == "held"`),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.redirect(cmd.Context(), args[0], "goes on", func(c migrationClient, id string) (string, error) {
				res, err := c.Resume(cmd.Context(), connect.NewRequest(&gpuctlv1.MachineResumeRequest{Id: id, AbsentOn: absent}))
				return answer(res).GetMessage(), err
			})
		},
	}
	cmd.Flags().StringVar(&absent, "absent-on", "", "`host` that cannot be asked: you assert that the VM does not run there, and will not")
	_ = cmd.RegisterFlagCompletionFunc("absent-on", a.completeFlag(clusterv1.Kind_KIND_HOST))
	return cmd
}

// redirect aborts or resumes a migration, and prints that.
func (a *app) redirect(ctx context.Context, id, what string, call func(c migrationClient, id string) (string, error)) error {
	m, err := a.machineMigration(ctx, id)
	if err != nil {
		return err
	}
	c, err := a.connectMigrations()
	if err != nil {
		return err
	}
	message, err := call(c, m.GetId())
	if err != nil {
		return a.adviseMigration(ctx, err)
	}
	return a.began(m, what, message)
}

// began prints what abort and resume have started.
func (a *app) began(m *clusterv1.Migration, what, message string) error {
	if message != "" {
		what += ": " + message
	}
	if err := a.result(view.Object{{Name: "migration", Value: m.GetId()}, {Name: "message", Value: message}},
		"migration %s of %s %s", m.GetId(), movedObject(m), what); err != nil {
		return err
	}
	if !a.structured() {
		fmt.Fprintf(a.Err, "gpuctl migrations watch %s follows it\n", clean(m.GetId()))
	}
	return nil
}

func (a *app) watchMigrationCommand() *cobra.Command {
	return &cobra.Command{
		Use: "watch ID", Short: "Follow a migration of a VM to its end",
		Long: `Follow a migration of a VM to its end. The exit status is 0 when it is done and 1
when it was rolled back, is held or failed, or sessions were lost on the way.
Interrupting it leaves the migration as it is.`,
		Example: "  gpuctl migrations watch m7",
		Args:    arguments(cobra.ExactArgs(1)), ValidArgsFunction: a.completeMigrations(`state == "running"`),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := a.machineMigration(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			c, err := a.connectMigrations()
			if err != nil {
				return err
			}
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			show := a.newMoveProgress(m.GetVerb(), m.GetMachine().GetName())
			f := &follower{c: c, see: show.see, again: show.again}
			last, err := f.follow(ctx, func(ctx context.Context) (*connect.ServerStreamForClient[gpuctlv1.MachineProgress], error) {
				return c.Watch(ctx, connect.NewRequest(&gpuctlv1.MachineWatchRequest{Id: m.GetId()}))
			})
			show.end()
			if err != nil {
				return a.unfinished(ctx, nil, last, err)
			}
			return a.ended(ctx, m.GetVerb(), m.GetMachine().GetName(), last)
		},
	}
}

func (a *app) completeMigrations(where string) completer {
	return a.completeWhere(clusterv1.Kind_KIND_MIGRATION, where)
}

// printTimeline prints a migration as an SVG.
func (a *app) printTimeline(m *clusterv1.Migration) error {
	switch {
	case m == nil:
		return errors.New("hostd described something else than a migration; it is newer")
	case len(m.GetSteps()) == 0 && m.GetMachine() == nil:
		return fmt.Errorf("migration %s of session %s has no timeline, only those of VMs have; gpuctl describe migration %s shows what is known of it",
			clean(m.GetId()), clean(m.GetObject()), clean(m.GetId()))
	case len(m.GetSteps()) == 0:
		return fmt.Errorf("migration %s has no steps yet to draw; gpuctl migrations watch %s follows it", clean(m.GetId()), clean(m.GetId()))
	case a.timeline == nil:
		return errors.New("this gpuctl was built without timelines; -o json has the steps")
	}
	_, err := a.Out.Write(a.timeline(m))
	return err
}

// moved prints what is special to migrations of VMs: the predictions, and the steps.
func (d *describer) moved(m *clusterv1.Migration) {
	if m.GetMachine() != nil {
		stopped := m.GetStoppedNs()
		rows := [][]string{
			against("all of it", m.GetMachine().GetPredictedNs(), d.a.tookSoFar(m)),
			against("standing still", m.GetMachine().GetPredictedStopNs(), stopped),
		}
		rows = slices.DeleteFunc(rows, func(r []string) bool { return r[1] == "" && r[2] == "" })
		d.table("times", []string{"OF", "PREDICTED", "ACTUAL", "DIFFERENCE"}, rows)
	}
	var lost [][]string
	for _, l := range m.GetMachine().GetLost() {
		lost = append(lost, []string{l.GetId(), l.GetCommand(), l.GetReason()})
	}
	d.table("sessions that were lost on the way", []string{"SESSION", "COMMAND", "REASON"}, lost)
	var rows [][]string
	for _, s := range m.GetSteps() {
		undo, took := "", "runs"
		if s.GetUndo() {
			undo = "yes"
		}
		if s.GetTookNs() > 0 {
			took = lasted(s.GetTookNs())
		} else if m.GetState() != clusterv1.MigrationState_MIGRATION_STATE_RUNNING {
			took = ""
		}
		rows = append(rows, []string{
			s.GetName(), undo, time.Unix(0, s.GetStartedUnixNs()).Format("15:04:05.000"), took, bytesOr(s.GetBytes(), ""), s.GetError(),
		})
	}
	d.table("steps", []string{"STEP", "UNDO", "STARTED", "TOOK", "BYTES", "ERROR"}, rows)
}

// against compares a prediction with the real value.
func against(what string, predicted, actual int64) []string {
	difference := ""
	if predicted > 0 && actual > 0 {
		difference = fmt.Sprintf("%+.0f %%", 100*(float64(actual)/float64(predicted)-1))
	}
	return []string{what, lastedOr(predicted), lastedOr(actual), difference}
}
