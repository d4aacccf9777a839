package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/expr"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

// gpuView is a GPU in the output for programs. Names are those of expressions.
type gpuView struct {
	ID           string      `json:"id"`
	Model        string      `json:"model"`
	Vendor       string      `json:"vendor"`
	Type         string      `json:"type"`
	Runtime      string      `json:"runtime"`
	Memory       uint64      `json:"memory"`
	FreeMemory   uint64      `json:"free_memory"`
	MaxAlloc     uint64      `json:"max_alloc"`
	LocalMemory  uint64      `json:"local_memory"`
	ComputeUnits uint32      `json:"compute_units"`
	ClockMHz     uint32      `json:"clock_mhz"`
	MaxWorkGroup uint64      `json:"max_work_group_size"`
	Images       bool        `json:"images"`
	FP64         bool        `json:"fp64"`
	Version      string      `json:"version"`
	Driver       string      `json:"driver"`
	Platform     string      `json:"platform"`
	PCIAddress   string      `json:"pci_address,omitempty"`
	UUID         string      `json:"uuid,omitempty"`
	Engines      []string    `json:"engines"`
	Rank         uint32      `json:"rank"`
	Free         bool        `json:"free"`
	Declared     bool        `json:"declared"`
	Owners       []ownerView `json:"owners"`
	Extensions   []string    `json:"extensions"`
	Library      string      `json:"library"`
	Env          any         `json:"env,omitempty"`
}

type ownerView struct {
	Claim    string   `json:"claim"`
	Memory   uint64   `json:"memory"` // 0: the whole GPU
	Sessions []string `json:"sessions"`
	Host     string   `json:"host,omitempty"` // to which it is lent

	Owner  string     `json:"owner,omitempty"` // whose share of the GPU they use
	Weight uint32     `json:"weight,omitempty"`
	Share  *shareView `json:"share,omitempty"`
}

func viewGPU(g *gpuctlv1.GPU) gpuView {
	l := g.GetLimits()
	v := gpuView{
		ID: g.GetId(), Model: g.GetModel(), Vendor: g.GetVendor(), Type: g.GetType(), Runtime: g.GetRuntimeName(),
		Memory: l.GetGlobalMemory(), FreeMemory: g.GetFreeMemory(), MaxAlloc: l.GetMaxAlloc(), LocalMemory: l.GetLocalMemory(),
		ComputeUnits: l.GetComputeUnits(), ClockMHz: l.GetClockMhz(), MaxWorkGroup: l.GetMaxWorkGroupSize(), Images: l.GetImages(),
		FP64: l.GetFp64(), Version: l.GetVersion(), Driver: g.GetDriver(), Platform: g.GetPlatform(), PCIAddress: g.GetPciAddress(),
		UUID: g.GetUuid(), Rank: g.GetRank(), Free: g.GetFree(), Declared: g.GetDeclared(), Owners: []ownerView{},
		Engines: append([]string{}, expr.Engines(g)...), Extensions: append([]string{}, l.GetExtensions()...), Library: g.GetRuntime().GetLibrary(),
	}
	if env := g.GetRuntime().GetEnv(); len(env) > 0 {
		v.Env = env
	}
	for _, o := range g.GetOwners() {
		v.Owners = append(v.Owners, ownerView{
			Claim: o.GetClaim(), Memory: o.GetMemory(), Sessions: append([]string{}, o.GetSessions()...), Host: o.GetHost(),
			Owner: o.GetOwner(), Weight: o.GetWeight(), Share: viewShare(o.GetShare()),
		})
	}
	return v
}

// sessionView is a session in the output for programs.
type sessionView struct {
	ID           string `json:"id"`
	Engine       string `json:"engine"`
	Claim        string `json:"claim"`
	PID          uint32 `json:"pid"`
	Command      string `json:"command"`
	State        string `json:"state"`
	GPU          string `json:"gpu"`
	Model        string `json:"model"`
	Memory       uint64 `json:"memory"`
	LargestAlloc uint64 `json:"largest_alloc"`
	Dirty        uint64 `json:"dirty"`
	Buffers      uint32 `json:"buffers"`
	Images       uint32 `json:"images"`
	Programs     uint32 `json:"programs"`
	Kernels      uint32 `json:"kernels"`
	Queues       uint32 `json:"queues"`
	Contexts     uint32 `json:"contexts"`
	Calls        uint64 `json:"calls"`
	Launches     uint64 `json:"launches"`
	Generation   uint32 `json:"generation"`
	Started      string `json:"started,omitempty"`
	SuspendedTo  string `json:"suspended_to,omitempty"`
	Message      string `json:"message,omitempty"`
	DeviceName   string `json:"device_name,omitempty"`
	DeviceType   string `json:"device_type,omitempty"`

	Owner  string     `json:"owner,omitempty"` // whose share of the GPU it uses
	Weight uint32     `json:"weight,omitempty"`
	Share  *shareView `json:"share,omitempty"`

	ToFar   *trafficView `json:"to_far,omitempty"` // of a session whose GPU is another host's
	FromFar *trafficView `json:"from_far,omitempty"`
}

// trafficView is what one end of a carrier's connections has sent, in bytes.
type trafficView struct {
	Plain        uint64 `json:"plain"`
	Compressed   uint64 `json:"compressed"`    // before
	CompressedTo uint64 `json:"compressed_to"` // and after
}

func viewTraffic(t *gpuctlv1.Traffic) *trafficView {
	if t == nil {
		return nil
	}
	return &trafficView{t.GetPlain(), t.GetCompressed(), t.GetCompressedTo()}
}

func viewSession(s *gpuctlv1.Session) sessionView {
	u := s.GetUsage()
	v := sessionView{
		ID: s.GetId(), Engine: expr.Engine(s), Claim: s.GetClaim(), PID: s.GetPid(), Command: s.GetCommand(), State: expr.StateName(s.GetState()),
		GPU: s.GetTarget().GetGpu(), Model: s.GetTarget().GetModel(), Memory: u.GetMemory(), LargestAlloc: u.GetLargestAlloc(),
		Dirty: u.GetDirty(), Buffers: u.GetBuffers(), Images: u.GetImages(), Programs: u.GetPrograms(), Kernels: u.GetKernels(),
		Queues: u.GetQueues(), Contexts: u.GetContexts(), Calls: u.GetCalls(), Launches: u.GetLaunches(), Generation: s.GetGeneration(),
		SuspendedTo: s.GetSuspendedTo(), Message: s.GetMessage(), DeviceName: s.GetDevice().GetName(), DeviceType: s.GetDevice().GetType(),
		Owner: s.GetOwner(), Weight: s.GetWeight(), Share: viewShare(s.GetShare()),
		ToFar: viewTraffic(u.GetToFar()), FromFar: viewTraffic(u.GetFromFar()),
	}
	if ms := s.GetStartedUnixMs(); ms > 0 {
		v.Started = time.UnixMilli(ms).UTC().Format(time.RFC3339)
	}
	return v
}

func (a *app) inventoryCommand() *cobra.Command {
	var where string
	cmd := &cobra.Command{
		Use: "inventory", Aliases: []string{"inv", "gpus"}, Short: "List the GPUs and who holds them",
		Long: "List the GPUs and who holds them, the highest model first.\n\n" + fieldsHelp("GPU", expr.OfGPU(&gpuctlv1.GPU{})),
		Example: `  gpuctl inventory
  gpuctl inventory --where 'free && memory >= 4*GiB'
  gpuctl inventory -o json`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			filter, err := expr.Compile(where, expr.GPU())
			if err != nil {
				return cmdutil.Usage(err)
			}
			c, err := a.connect()
			if err != nil {
				return err
			}
			res, err := c.GetInventory(cmd.Context(), connect.NewRequest(&gpuctlv1.GetInventoryRequest{}))
			if err != nil {
				return err
			}
			gpus, err := keep(cmd.Context(), res.Msg.GetGpus(), filter, expr.OfGPU)
			if err != nil {
				return cmdutil.Usage(err)
			}
			slices.SortStableFunc(gpus, func(x, y *gpuctlv1.GPU) int { return int(y.GetRank()) - int(x.GetRank()) })
			if a.structured() {
				views := []gpuView{}
				for _, g := range gpus {
					views = append(views, viewGPU(g))
				}
				return a.print(views)
			}
			for _, w := range res.Msg.GetWarnings() {
				fmt.Fprintln(a.Err, "warning:", clean(w))
			}
			return a.printGPUs(gpus)
		},
	}
	cmd.Flags().StringVar(&where, "where", "", "only GPUs for which this CEL `expression` is true")
	return cmd
}

func (a *app) printGPUs(gpus []*gpuctlv1.GPU) error {
	heading := []string{"GPU", "MODEL", "TYPE", "RUNTIME", "MEMORY", "UNITS", "RANK", "STATE"}
	if a.wide() {
		heading = append(heading, "VENDOR", "MAX ALLOC", "LOCAL", "VERSION", "DRIVER", "PCI", "ENGINES", "LIBRARY")
	}
	var rows [][]string
	for _, g := range gpus {
		l := g.GetLimits()
		model := g.GetModel()
		if !a.wide() {
			model = cut(model, 40)
		}
		row := []string{
			g.GetId(), model, g.GetType(), g.GetRuntimeName(), size.Format(l.GetGlobalMemory()),
			strconv.Itoa(int(l.GetComputeUnits())), strconv.Itoa(int(g.GetRank())), gpuState(g),
		}
		if a.wide() {
			row = append(row, g.GetVendor(), size.Format(l.GetMaxAlloc()), size.Format(l.GetLocalMemory()), l.GetVersion(), g.GetDriver(),
				g.GetPciAddress(), strings.Join(expr.Engines(g), "+"), g.GetRuntime().GetLibrary())
		}
		rows = append(rows, row)
	}
	return table(a.Out, heading, rows)
}

func gpuState(g *gpuctlv1.GPU) string {
	if g.GetFree() {
		return "free"
	}
	var who []string
	for _, o := range g.GetOwners() {
		name := o.GetClaim()
		if strings.HasPrefix(o.GetOwner(), "vm:") {
			name = o.GetOwner()
		}
		if o.GetHost() != "" {
			name += ", lent to " + o.GetHost()
		}
		if len(o.GetSessions()) > 0 {
			name = strings.Join(o.GetSessions(), "+")
		}
		if o.GetMemory() > 0 {
			name += " (" + size.Format(o.GetMemory()) + ")"
		}
		who = append(who, name)
	}
	state := "held by " + strings.Join(who, ", ")
	if g.GetFreeMemory() > 0 {
		state += ", " + size.Format(g.GetFreeMemory()) + " left"
	}
	return state
}

func (a *app) sessionsCommand() *cobra.Command {
	var where string
	var watch bool
	cmd := &cobra.Command{
		Use: "sessions", Aliases: []string{"ps"}, Short: "List the applications and where they run",
		Long: "List the applications that use a GPU, and which one.\n\n" + fieldsHelp("session", expr.OfSession(&gpuctlv1.Session{})),
		Example: `  gpuctl sessions
  gpuctl sessions --watch
  gpuctl sessions --where 'state == "suspended"' -o json`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			filter, err := expr.Compile(where, expr.Session())
			if err != nil {
				return cmdutil.Usage(err)
			}
			c, err := a.connect()
			if err != nil {
				return err
			}
			if watch {
				return a.watchSessions(cmd.Context(), c, filter)
			}
			res, err := c.ListSessions(cmd.Context(), connect.NewRequest(&gpuctlv1.HostListSessionsRequest{}))
			if err != nil {
				return err
			}
			sessions, err := keep(cmd.Context(), res.Msg.GetSessions(), filter, expr.OfSession)
			if err != nil {
				return cmdutil.Usage(err)
			}
			if a.structured() {
				views := []sessionView{}
				for _, s := range sessions {
					views = append(views, viewSession(s))
				}
				return a.print(views)
			}
			if len(sessions) == 0 {
				fmt.Fprintln(a.Err, "no sessions; gpuctl run -- COMMAND starts one")
				return nil
			}
			var rows [][]string
			for _, s := range sessions {
				rows = append(rows, a.sessionRow(s))
			}
			return table(a.Out, a.sessionHeading(), rows)
		},
	}
	cmd.Flags().StringVar(&where, "where", "", "only sessions for which this CEL `expression` is true")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "go on and print every change")
	return cmd
}

func (a *app) sessionHeading() []string {
	h := []string{"SESSION", "PID", "COMMAND", "STATE", "GPU", "MODEL", "MEMORY", "LAUNCHES", "SWAPS"}
	if a.wide() {
		h = append(h, "ENGINE", "CLAIM", "DEVICE", "CALLS", "DIRTY", "STARTED", "MESSAGE")
	}
	return h
}

func (a *app) sessionRow(s *gpuctlv1.Session) []string {
	v := viewSession(s)
	command, model := v.Command, v.Model
	if !a.wide() {
		command, model = cut(command, 32), cut(model, 32)
	}
	state := v.State
	if v.SuspendedTo != "" {
		state += " (" + v.SuspendedTo + ")"
	}
	swaps := uint32(0)
	if v.Generation > 1 {
		swaps = v.Generation - 1
	}
	row := []string{
		v.ID, strconv.Itoa(int(v.PID)), command, state, v.GPU, model, size.Format(v.Memory),
		strconv.FormatUint(v.Launches, 10), strconv.Itoa(int(swaps)),
	}
	if a.wide() {
		row = append(row, v.Engine, v.Claim, strings.TrimSpace(v.DeviceName+" "+v.DeviceType), strconv.FormatUint(v.Calls, 10), size.Format(v.Dirty), v.Started, v.Message)
	}
	return row
}

// watchSessions prints changes: lines for people, JSON lines or YAML documents for
// programs.
func (a *app) watchSessions(ctx context.Context, c client, filter *expr.Expr) error {
	stream, err := c.WatchSessions(ctx, connect.NewRequest(&gpuctlv1.HostWatchSessionsRequest{}))
	if err != nil {
		return err
	}
	defer stream.Close()
	last := map[string]string{}
	for first := true; stream.Receive(); {
		s := stream.Msg()
		if ok, err := filter.Match(ctx, expr.OfSession(s)); err != nil {
			return cmdutil.Usage(err)
		} else if !ok {
			continue
		}
		if a.structured() {
			if err := a.printLine(viewSession(s)); err != nil {
				return err
			}
			continue
		}
		if first {
			first = false
			fmt.Fprintf(a.Out, "%-8s  %-12s  %-8s  %-24s  %-20s  %-16s  %s\n", "TIME", "SESSION", "PID", "STATE", "GPU", "MEMORY", "COMMAND")
		}
		r := a.sessionRow(s)
		line := fmt.Sprintf("%-12s  %-8s  %-24s  %-20s  %-16s  %s", clean(r[0]), r[1], clean(r[3]), clean(r[4]), r[6], clean(r[2]))
		if last[s.GetId()] == line {
			continue
		}
		last[s.GetId()] = line
		fmt.Fprintf(a.Out, "%s  %s\n", time.Now().Format("15:04:05"), line)
	}
	if ctx.Err() != nil {
		return nil
	}
	return stream.Err()
}

// keep returns the elements of a list for which the expression is true.
func keep[T any](ctx context.Context, all []T, filter *expr.Expr, fields func(T) map[string]any) ([]T, error) {
	var out []T
	for _, x := range all {
		ok, err := filter.Match(ctx, fields(x))
		if err != nil {
			return nil, err
		}
		if ok {
			out = append(out, x)
		}
	}
	return out, nil
}

func fieldsHelp(what string, fields map[string]any) string {
	var names []string
	for name := range fields {
		names = append(names, name)
	}
	slices.Sort(names)
	return fmt.Sprintf("A CEL expression can use these fields of a %s: %s;\nand KiB, MiB, GiB and TiB.", what, strings.Join(names, ", "))
}

func (a *app) describeGPU(ctx context.Context, c client, name string) error {
	res, err := c.GetInventory(ctx, connect.NewRequest(&gpuctlv1.GetInventoryRequest{}))
	if err != nil {
		return err
	}
	var names []string
	for _, g := range res.Msg.GetGpus() {
		names = append(names, g.GetId())
		if g.GetId() == name || name == "" && len(res.Msg.GetGpus()) == 1 {
			if a.structured() {
				return a.print(viewGPU(g))
			}
			l := g.GetLimits()
			var env []string
			for k, v := range g.GetRuntime().GetEnv() {
				env = append(env, k+"="+v)
			}
			slices.Sort(env)
			return a.pairs([][2]string{
				{"GPU", g.GetId()},
				{"Model", g.GetModel()},
				{"Vendor", g.GetVendor()},
				{"Type", g.GetType()},
				{"State", gpuState(g)},
				{"Shared by", sharedBy(g)},
				{"Rank", strconv.Itoa(int(g.GetRank()))},
				{"Memory", fmt.Sprintf("%s, %s in one piece, %s local", size.Format(l.GetGlobalMemory()), size.Format(l.GetMaxAlloc()), size.Format(l.GetLocalMemory()))},
				{"Compute", fmt.Sprintf("%d units at %d MHz, work-groups of up to %d, fp64 %s, images %s", l.GetComputeUnits(), l.GetClockMhz(), l.GetMaxWorkGroupSize(), yes(l.GetFp64()), yes(l.GetImages()))},
				{"Version", strings.TrimSpace(l.GetVersion()) + ", " + strings.TrimSpace(l.GetCVersion())},
				{"Platform", g.GetPlatform()},
				{"Driver", g.GetDriver()},
				{"PCI address", g.GetPciAddress()},
				{"UUID", g.GetUuid()},
				{"Engines", strings.Join(expr.Engines(g), ", ")},
				{"Library", g.GetRuntime().GetLibrary()},
				{"Environment", strings.Join(env, " ")},
				{"Extensions", strings.Join(l.GetExtensions(), " ")},
			})
		}
	}
	if name == "" {
		return cmdutil.Usage(fmt.Errorf("name one of the GPUs %s", strings.Join(names, ", ")))
	}
	return fmt.Errorf("%w %q%s; gpuctl inventory lists them", errNoGPU, name, suggest.Hint(name, names))
}

func (a *app) describeSession(ctx context.Context, c client, name string) error {
	res, err := c.DescribeSession(ctx, connect.NewRequest(&gpuctlv1.DescribeSessionRequest{Session: name}))
	if err != nil {
		return err
	}
	s, u := res.Msg.GetSession(), res.Msg.GetSession().GetUsage()
	if a.structured() {
		var last *resultView
		if r := res.Msg.GetLast(); r != nil {
			last = new(viewResult(r))
		}
		return a.print(struct {
			sessionView
			Operation string      `json:"operation,omitempty"`
			Last      *resultView `json:"last,omitempty"`
		}{viewSession(s), res.Msg.GetOperation(), last})
	}
	v := viewSession(s)
	state := v.State
	if op := res.Msg.GetOperation(); op != "" {
		state += ", " + op + " in progress"
	}
	memory := bytesOr(res.Msg.GetClaim().GetMinMemory(), "the whole GPU")
	if p := res.Msg.GetClaim().GetPreferMemory(); p > 0 {
		memory += ", " + size.Format(p) + " preferred"
	}
	rows := [][2]string{
		{"Session", v.ID},
		{"Engine", v.Engine},
		{"Elsewhere", elsewhere(v.GPU, res.Msg.GetClaim())},
		{"Process", fmt.Sprintf("%d (%s)", v.PID, v.Command)},
		{"State", state},
		{"Message", v.Message},
		{"Suspended to", v.SuspendedTo},
		{"GPU", v.GPU},
		{"Model", v.Model},
		{"Sees", strings.TrimSpace(v.DeviceName + " " + v.DeviceType + " " + bytesOr(s.GetDevice().GetGlobalMemory(), ""))},
		{"Claim", v.Claim + ", " + memory},
		{"Started", v.Started},
	}
	if s.GetDriver() != nil {
		rows = append(rows, [2]string{"Memory", size.Format(v.Memory)})
		rows = append(rows, driverRows(s)...)
	} else {
		rows = append(rows, portableRows(v, u)...)
	}
	rows = append(rows,
		[2]string{"Generation", strconv.Itoa(int(v.Generation))},
		[2]string{"Owner", ownerText(s.GetOwner(), s.GetWeight())},
		[2]string{"Share", shareText(s.GetShare())},
	)
	if r := res.Msg.GetLast(); r != nil {
		rows = append(rows, [2]string{"Last operation", summary(r)})
	}
	return a.pairs(rows)
}

// portableRows describes what a session of OpenCL has.
func portableRows(v sessionView, u *gpuctlv1.Usage) [][2]string {
	rows := [][2]string{
		{"Memory", fmt.Sprintf("%s, largest %s, %s not copied yet", size.Format(v.Memory), size.Format(v.LargestAlloc), size.Format(v.Dirty))},
		{"Objects", fmt.Sprintf("%d contexts, %d queues, %d buffers, %d images, %d programs, %d kernels", v.Contexts, v.Queues, v.Buffers, v.Images, v.Programs, v.Kernels)},
		{"Calls", fmt.Sprintf("%d, %d launches, largest work-group %d", v.Calls, v.Launches, u.GetLargestWorkGroup())},
	}
	if u.GetToFar() != nil {
		rows = append(rows, [2]string{"Sent to the GPU", trafficText(u.GetToFar())}, [2]string{"Sent by the GPU", trafficText(u.GetFromFar())})
	}
	return rows
}

// trafficText returns in words what a carrier, or its far executor, has sent.
func trafficText(t *gpuctlv1.Traffic) string {
	text := size.Format(t.GetPlain())
	if t.GetCompressed() > 0 {
		text += fmt.Sprintf(", and %s compressed to %s", size.Format(t.GetCompressed()), size.Format(t.GetCompressedTo()))
	}
	return text
}

// elsewhere returns in words that a session computes on a GPU of another host, and
// whether it comes home; empty: it does not.
func elsewhere(gpu string, c *gpuctlv1.Claim) string {
	host, _, ok := strings.Cut(gpu, "/")
	switch {
	case !ok:
		return ""
	case c.GetStays() || c.GetRemote() == "only":
		return "on host " + host + ", where it stays"
	}
	return "on host " + host + ", until a GPU is free here (if the cluster's queue is mrq)"
}

func (a *app) pairs(rows [][2]string) error {
	for _, r := range rows {
		if r[1] == "" {
			continue
		}
		if _, err := fmt.Fprintf(a.Out, "%-15s %s\n", r[0]+":", clean(r[1])); err != nil {
			return err
		}
	}
	return nil
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
