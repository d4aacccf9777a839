package cli

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/size"
)

func rejectionHeading() []string { return []string{"HOST", "GPU", "MODEL", "REASON"} }

// reasonRows returns all reasons against a migration: first those against the VM itself,
// then host by host. Cells that are equal to those above are left blank.
func reasonRows(r *gpuctlv1.MachinePlanResponse) [][]string {
	var rows [][]string
	add := func(first []string, reasons []*gpuctlv1.Reason) {
		for i, why := range reasons {
			row := slices.Clone(first)
			if i > 0 {
				row = []string{" ", " ", " "}
			}
			rows = append(rows, append(row, why.GetMessage()))
		}
	}
	add([]string{"any", "any", "any"}, r.GetReasons())
	for _, x := range r.GetRejected() {
		gpu, model := strings.TrimPrefix(x.GetGpu(), x.GetHost()+"/"), x.GetModel()
		if gpu == "" {
			gpu, model = "any", "any"
		}
		add([]string{x.GetHost(), gpu, model}, x.GetReasons())
	}
	return rows
}

// printMachinePlan prints a plan. If it is impossible, it returns exit status 3.
func (a *app) printMachinePlan(verb string, r *gpuctlv1.MachinePlanResponse) error {
	var refused error
	if !possible(r) {
		refused = a.impossible(verb, r.GetMachine(), r)
	}
	if a.structured() {
		if err := a.print(view.Of(r)); err != nil {
			return err
		}
		return refused
	}
	from := r.GetMachine() + " on " + r.GetHost()
	if len(r.GetGpus()) > 0 {
		from += " with " + strings.Join(r.GetGpus(), ", ")
	}
	rows := [][2]string{{"VM", from}}
	if r.GetSessions() > 0 || r.GetGpuState() > 0 {
		text := plural(int(r.GetSessions()), "session", "sessions") + ", " + size.Format(r.GetGpuState()) + " of GPU memory"
		if r.GetAway() > 0 {
			text += ", of which " + size.Format(r.GetAway()) + " leave the VM for its hosts' memory"
		}
		rows = append(rows, [2]string{"Applications", text})
	}
	if best := r.GetCandidates(); refused == nil {
		to := "host " + best[0].GetHost()
		if gpu := best[0].GetGpu(); gpu != "" {
			to = fmt.Sprintf("%s (%s)", gpu, best[0].GetModel())
		}
		rows = append(rows, [2]string{"To", to},
			[2]string{"Takes", takes(best[0])})
		if r.GetCold() {
			rows = append(rows, [2]string{"Cold", "it is stopped and started; its applications end" + whyCold(r)})
		}
	}
	if refused == nil {
		rows = append(rows, liveRows(r.GetLive())...)
	}
	for _, n := range r.GetNotes() {
		rows = append(rows, [2]string{"Note", clean(n.GetMessage())})
	}
	if err := a.pairs(rows); err != nil {
		return err
	}
	if refused == nil {
		if err := a.printCandidates(r.GetCandidates()); err != nil {
			return err
		}
	}
	if err := a.section("Rejected", rejectionHeading(), reasonRows(r)); err != nil {
		return err
	}
	if l := r.GetLive(); l.GetGpu() == "" || refused != nil {
		rows := reasonRows(&gpuctlv1.MachinePlanResponse{Rejected: l.GetRejected()})
		if err := a.section("Rejected as remote GPU meanwhile", rejectionHeading(), rows); err != nil {
			return err
		}
	}
	return refused
}

// liveRows says on which remote GPU a VM's applications compute meanwhile, or why on none.
func liveRows(l *gpuctlv1.MachineLive) (rows [][2]string) {
	if l.GetGpu() != "" {
		text := fmt.Sprintf("its applications compute on %s (%s) over the network", l.GetGpu(), l.GetModel())
		if l.GetThroughHost() {
			text += ", through the VM's host as its network does not reach it"
		}
		if l.GetRttNs() > 0 {
			text += ", " + lasted(l.GetRttNs()) + " away"
		}
		if other := l.GetOtherwiseStopNs(); other > 0 {
			text += "; frozen, their downtime would be about " + lasted(other)
		}
		return append(rows, [2]string{"Meanwhile", clean(text)})
	}
	for _, why := range l.GetReasons() {
		rows = append(rows, [2]string{"Frozen", clean(why.GetMessage())})
	}
	return rows
}

// whyCold returns why a VM cannot be migrated live.
func whyCold(r *gpuctlv1.MachinePlanResponse) string {
	var out []string
	for _, w := range r.GetWarmReasons() {
		out = append(out, clean(w.GetMessage()))
	}
	if len(out) == 0 {
		return ""
	}
	return ": " + strings.Join(out, "; ")
}

// takes returns the predicted times of a candidate.
func takes(c *gpuctlv1.MachineCandidate) string {
	text := "about " + expected(c.GetPredictedNs(), c.GetTotal(), lasted)
	if c.GetPredictedStopNs() > 0 {
		text += ", downtime of its applications " + expected(c.GetPredictedStopNs(), c.GetStop(), lasted)
	}
	return text + notMeasured(c.GetTotal())
}

// between returns a prediction for a table.
func between(likely int64, p *gpuctlv1.Prediction) string {
	if likely == 0 {
		return ""
	}
	return expected(likely, p, lasted)
}

func (a *app) printCandidates(all []*gpuctlv1.MachineCandidate) error {
	var rows, steps [][]string
	for _, c := range all {
		rows = append(rows, []string{
			c.GetHost(), strings.TrimPrefix(c.GetGpu(), c.GetHost()+"/"), c.GetModel(), between(c.GetPredictedNs(), c.GetTotal()), between(c.GetPredictedStopNs(), c.GetStop()), bytesOr(c.GetBytes(), ""),
		})
	}
	for i, s := range all[0].GetSteps() {
		steps = append(steps, []string{strconv.Itoa(i + 1), s.GetName(), between(s.GetPredictedNs(), s.GetPrediction()), bytesOr(s.GetBytes(), ""), s.GetWhat(), s.GetUndo()})
	}
	if err := a.section("Candidates, the best first", []string{"HOST", "GPU", "MODEL", "TAKES", "DOWNTIME", "COPIES"}, rows); err != nil {
		return err
	}
	return a.section("Steps of the best", []string{"STEP", "NAME", "TAKES", "COPIES", "WHAT", "UNDO"}, steps)
}

// section prints a table with a title. Without rows, it prints nothing.
func (a *app) section(title string, heading []string, rows [][]string) error {
	if len(rows) == 0 {
		return nil
	}
	if err := a.say("\n" + title + ":"); err != nil {
		return err
	}
	return table(a.Out, heading, rows)
}
