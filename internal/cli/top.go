package cli

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/size"
)

const leastInterval = 100 * time.Millisecond

func (a *app) topCommand() *cobra.Command {
	var once bool
	interval := time.Second
	cmd := &cobra.Command{
		Use: "top [HOST]", Short: "Show what the GPUs do, live",
		Long: "Show what hosts, GPUs and sessions do, and go on. On a terminal the picture is\ndrawn anew; elsewhere tables follow each other, with -o json one document a line.",
		Example: `  gpuctl top
  gpuctl top h1 --interval 5s
  gpuctl top --once -o json`,
		Args: arguments(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeArgs(clusterv1.Kind_KIND_HOST),
		RunE: func(cmd *cobra.Command, args []string) error {
			if interval < leastInterval || interval > time.Hour {
				return cmdutil.Usage(fmt.Errorf("--interval: %v is not between %v and %v", interval, leastInterval, time.Hour))
			}
			req := &clusterv1.TopRequest{IntervalMs: uint32(interval.Milliseconds())}
			if len(args) > 0 {
				req.Host = args[0]
			}
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			return a.top(cmd.Context(), c, req, once)
		},
	}
	cmd.Flags().BoolVar(&once, "once", false, "show it once and end")
	cmd.Flags().DurationVar(&interval, "interval", interval, "time between two pictures")
	return cmd
}

func (a *app) top(ctx context.Context, c clusterClient, req *clusterv1.TopRequest, once bool) error {
	ctx, stop := interruptible(ctx)
	defer stop()
	if req.GetHost() != "" { // Check the name, as a wrong one would only be shown as missing.
		o, err := resolve(ctx, c, a.must(clusterv1.Kind_KIND_HOST), req.GetHost(), true)
		if err != nil {
			return err
		}
		req.Host = o.GetHost().GetName()
	}
	capacity := a.capacities(ctx, c, req.GetHost())
	ended := false
	return a.stay(ctx, c, func() (bool, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := c.Top(ctx, connect.NewRequest(req))
		if err != nil {
			return false, err
		}
		defer stream.Close()
		answered := false
		for stream.Receive() {
			answered = true
			if err := a.printTop(stream.Msg(), capacity); err != nil {
				return true, err
			}
			if once {
				ended = true
				stop()
				return true, nil
			}
		}
		if ended {
			return true, nil
		}
		return answered, stream.Err()
	})
}

// capacities returns the known GPUs by id, for their memory and model, which do not
// change.
func (a *app) capacities(ctx context.Context, c clusterClient, host string) map[string]*clusterv1.GPU {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	out := map[string]*clusterv1.GPU{}
	req := &clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_GPU, Stale: true}
	if host != "" {
		req.Where = "host == " + strconv.Quote(host)
	}
	res, err := c.List(ctx, connect.NewRequest(req))
	if err != nil {
		return out
	}
	for _, o := range res.Msg.GetObjects() {
		out[o.GetGpu().GetId()] = o.GetGpu()
	}
	return out
}

func (a *app) printTop(m *clusterv1.TopResponse, capacity map[string]*clusterv1.GPU) error {
	if a.structured() {
		return a.printLine(view.Of(m))
	}
	var b bytes.Buffer
	for _, h := range m.GetHosts() {
		fmt.Fprintf(&b, "%s: load %.2f, %s free\n", clean(h.GetHost()), h.GetLoad1(), size.Format(h.GetFreeMemory()))
	}
	if len(m.GetMissing()) > 0 {
		fmt.Fprintf(&b, "no answer from %s\n", clean(strings.Join(m.GetMissing(), ", ")))
	}
	fmt.Fprintln(&b)
	if err := table(&b, []string{"GPU", "MODEL", "BUSY", "MEMORY", "TEMP", "POWER", "HEALTH", "SESSIONS"}, a.topRows(m, capacity)); err != nil {
		return err
	}
	lines, columns, ok := screen(a.Out)
	if !ok || a.getenv("TERM") == "dumb" {
		fmt.Fprintln(&b)
		_, err := a.Out.Write(b.Bytes())
		return err
	}
	_, err := a.Out.Write(picture(b.String(), lines, columns))
	return err
}

func (a *app) topRows(m *clusterv1.TopResponse, capacity map[string]*clusterv1.GPU) [][]string {
	var rows [][]string
	for _, h := range m.GetHosts() {
		for _, g := range h.GetGpus() {
			known := capacity[g.GetGpu()]
			row := []string{g.GetGpu(), a.cut(known.GetModel(), 32), "", "", "", "", view.Word(g.GetHealth()), ""}
			if g.Utilization != nil {
				row[2] = fmt.Sprintf("%d %%", g.GetUtilization())
			}
			if g.UsedMemory != nil {
				row[3] = size.Format(g.GetUsedMemory())
				if all := known.GetLimits().GetGlobalMemory(); all > 0 {
					row[3] += " of " + size.Format(all)
				}
			}
			if g.Temperature != nil {
				row[4] = fmt.Sprintf("%d °C", g.GetTemperature())
			}
			if g.Power != nil {
				row[5] = fmt.Sprintf("%.0f W", float64(g.GetPower())/1000)
				if limit := g.GetPowerLimit(); limit > 0 {
					row[5] += fmt.Sprintf(" of %.0f W", float64(limit)/1000)
				}
			}
			if why := g.GetHealthReason(); why != "" {
				row[6] += " (" + why + ")"
			}
			var sessions []string
			for _, s := range g.GetSessions() {
				text := fmt.Sprintf("%s %s %s", s.GetSession(), a.cut(s.GetCommand(), 20), size.Format(s.GetMemory()))
				if s.GetShare().GetShared() {
					text += fmt.Sprintf(" (%s: %s)", ownerText(s.GetOwner(), s.GetWeight()), shareText(s.GetShare()))
				}
				sessions = append(sessions, text)
			}
			row[7] = strings.Join(sessions, "; ")
			rows = append(rows, row)
		}
	}
	slices.SortStableFunc(rows, func(x, y []string) int { return strings.Compare(x[0], y[0]) })
	return rows
}

// picture returns a text that replaces the content of a screen, cut to its size.
func picture(text string, lines, columns int) []byte {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if len(all) >= lines {
		rest := len(all) - lines + 2
		all = append(all[:max(0, lines-2)], fmt.Sprintf("… %d more lines; name a host, or use --once", rest))
	}
	var b bytes.Buffer
	b.WriteString("\x1b[H")
	for _, line := range all {
		b.WriteString(cut(line, columns))
		b.WriteString("\x1b[K\r\n") // clear the rest of the line
	}
	b.WriteString("\x1b[J")
	return b.Bytes()
}

// screen returns a terminal's size.
func screen(w any) (lines, columns int, ok bool) {
	f, isFile := w.(*os.File)
	if !isFile {
		return 0, 0, false
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0, false
	}
	lines, columns = int(size.Row), int(size.Col)
	if lines == 0 || columns == 0 { // a terminal that does not report its size
		lines, columns = 24, 80
	}
	return max(4, lines), max(20, columns), true
}
