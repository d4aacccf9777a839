package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/size"
)

// describeCommand shows everything about one object. Sessions and GPUs of the host itself
// have names without a slash. The host knows more about them than the cluster.
func (a *app) describeCommand() *cobra.Command {
	var stale, isolation bool
	cmd := &cobra.Command{
		Use: "describe KIND NAME | KIND/NAME", Short: "Show all about one object, what belongs to it and its events",
		Long: `Show all about one object of the inventory, what belongs to it and its events. The
sessions and GPUs of the host itself are named as gpuctl sessions and gpuctl
inventory do; of a kind that there is only one of, the name can be left out. With
-o svg the timeline of a VM's migration is drawn: its steps, the bytes that were
copied and the downtime of the applications.`,
		Example: `  gpuctl describe session
  gpuctl describe session 3f2a
  gpuctl describe gpu oclgrind -o yaml
  gpuctl describe host h1
  gpuctl describe gpu/h1/0000:65:00.0
  gpuctl describe gpu 0000:65:00.0 --isolation
  gpuctl describe migration m7
  gpuctl describe migration m7 -o svg >m7.svg`,
		Annotations:       map[string]string{outputSVG: "yes"},
		Args:              arguments(cobra.RangeArgs(1, 2)),
		ValidArgsFunction: a.completeDescribe,
		RunE: func(cmd *cobra.Command, args []string) error {
			word, name, _ := strings.Cut(args[0], "/")
			k, err := a.kind(word)
			if err != nil {
				return err
			}
			if len(args) > 1 {
				if name != "" {
					return cmdutil.Usage(errors.New("want KIND NAME or KIND/NAME, not both"))
				}
				name = args[1]
			}
			if a.output == "svg" && (isolation || k.kind != clusterv1.Kind_KIND_MIGRATION) {
				return cmdutil.Usage(errors.New("only a migration has a timeline: gpuctl describe migration ID -o svg"))
			}
			if isolation {
				if k.kind != clusterv1.Kind_KIND_GPU || name == "" {
					return cmdutil.Usage(errors.New("--isolation is about a gpu: gpuctl describe gpu NAME --isolation"))
				}
				return a.printIsolation(cmd.Context(), name)
			}
			return a.describe(cmd.Context(), k, name, stale)
		},
	}
	cmd.Flags().BoolVar(&stale, "stale", false, "as the asked host knows it, even without a leader")
	cmd.Flags().BoolVar(&isolation, "isolation", false, "say whether the GPU may be given to a VM, and why not")
	return cmd
}

func (a *app) describe(ctx context.Context, k kind, name string, stale bool) error {
	local := (k.kind == clusterv1.Kind_KIND_GPU || k.kind == clusterv1.Kind_KIND_SESSION) && !strings.Contains(name, "/")
	if !local && name == "" {
		return cmdutil.Usage(fmt.Errorf("name a %s; gpuctl get %s lists them", k.one, k.many))
	}
	c, err := a.connectCluster()
	if err != nil {
		return err
	}
	if local {
		h, err := a.connect()
		if err != nil {
			return err
		}
		if k.kind == clusterv1.Kind_KIND_GPU {
			err = a.describeGPU(ctx, h, name)
		} else {
			err = a.describeSession(ctx, h, name)
		}
		if err == nil || name == "" || !notThere(err) {
			return err
		}
		res, clusterErr := c.Describe(ctx, connect.NewRequest(&clusterv1.DescribeRequest{Kind: k.kind, Name: name, Stale: stale}))
		if clusterErr != nil {
			if connect.CodeOf(err) == connect.CodeNotFound || errors.Is(err, errNoGPU) {
				return err // the error already contains similar names
			}
			return advise(ctx, c, clusterErr)
		}
		return a.printDescription(k, res.Msg)
	}
	res, err := callOn(ctx, c, k, name, c.Describe, &clusterv1.DescribeRequest{Kind: k.kind, Name: name, Stale: stale})
	if err != nil {
		return err
	}
	return a.printDescription(k, res)
}

// errNoGPU means that the host has no such GPU.
var errNoGPU = errors.New("no GPU")

func notThere(err error) bool {
	switch connect.CodeOf(err) {
	case connect.CodeNotFound, connect.CodeUnimplemented, connect.CodePermissionDenied, connect.CodeUnauthenticated:
		return true // another computer's host answers for the cluster only
	default:
	}
	return errors.Is(err, errNoGPU)
}

func (a *app) printDescription(k kind, res *clusterv1.DescribeResponse) error {
	o := inner(res.GetObject())
	if o == nil {
		return fmt.Errorf("hostd described a %s that this gpuctl does not know; it is newer", k.one)
	}
	migration := res.GetObject().GetMigration()
	if a.output == "svg" {
		return a.printTimeline(migration)
	}
	if a.structured() {
		related := []view.Object{}
		for _, r := range inners(res.GetRelated()) {
			related = append(related, view.Object{{Name: "kind", Value: a.kindOf(r).one}, {Name: "object", Value: view.Of(r)}})
		}
		return a.print(view.Object{
			{Name: "kind", Value: k.one},
			{Name: "object", Value: view.Of(o)},
			{Name: "related", Value: related},
			{Name: "events", Value: view.List(res.GetEvents())},
			{Name: "index", Value: res.GetIndex()},
		})
	}
	d := &describer{a: a, w: a.Out}
	fields := view.Of(o)
	if migration != nil { // its steps, and the sessions that it has lost, are shown as tables
		shown := proto.CloneOf(migration)
		if shown.Machine != nil {
			shown.Machine.Lost = nil
		}
		fields = slices.DeleteFunc(view.Of(shown), func(m view.Member) bool { return m.Name == "steps" })
	}
	d.object(fields, "")
	if migration != nil {
		d.moved(migration)
	}
	for _, rk := range a.kinds() {
		var rows [][]string
		for _, r := range inners(res.GetRelated()) {
			if a.kindOf(r).kind == rk.kind {
				rows = append(rows, a.row(rk, r))
			}
		}
		d.table(rk.many, a.heading(rk), rows)
	}
	var rows [][]string
	for _, e := range res.GetEvents() {
		rows = append(rows, []string{a.age(e.GetUnixMs()) + " ago", e.GetType(), e.GetActor(), e.GetMessage()})
	}
	d.table("events", []string{"WHEN", "WHAT", "BY", "MESSAGE"}, rows)
	return d.err
}

// describer writes an object as sections of names and values. Empty values are omitted.
type describer struct {
	a   *app
	w   io.Writer
	err error
}

func (d *describer) line(format string, args ...any) {
	if d.err == nil {
		_, d.err = fmt.Fprintf(d.w, format+"\n", args...)
	}
}

func (d *describer) object(o view.Object, indent string) {
	var sections []view.Member
	width := 0
	for _, m := range o {
		width = max(width, utf8.RuneCountInString(label(m.Name)))
	}
	for _, m := range o {
		if _, nested := m.Value.(view.Object); nested {
			sections = append(sections, m)
			continue
		}
		lines := d.values(m)
		for i, text := range lines {
			name := label(m.Name) + ":"
			if i > 0 {
				name = ""
			}
			d.line("%s%-*s %s", indent, width+1, name, clean(text))
		}
	}
	for _, s := range sections {
		if nested, ok := s.Value.(view.Object); ok && !blank(nested) {
			d.line("\n%s%s:", indent, label(s.Name))
			d.object(nested, indent+"  ")
		}
	}
}

func blank(o view.Object) bool {
	return !slices.ContainsFunc(o, func(m view.Member) bool { return !zero(m.Name, m.Value) })
}

func zero(name string, v any) bool {
	switch v := v.(type) {
	case nil:
		return true
	case bool:
		return !v
	case string:
		return v == ""
	case int64:
		if name == "numa_node" {
			return v < 0
		}
		return v == 0
	case uint64:
		return v == 0
	case float64:
		return v == 0
	case []any:
		return len(v) == 0
	case view.Map:
		return len(v) == 0
	}
	return false
}

// values returns the lines of a field.
func (d *describer) values(m view.Member) []string {
	if zero(m.Name, m.Value) {
		return nil
	}
	list, ok := m.Value.([]any)
	if !ok {
		return []string{d.value(m.Name, m.Value)}
	}
	var lines, words []string
	for _, e := range list {
		o, ok := e.(view.Object)
		if !ok {
			words = append(words, d.value(m.Name, e))
			continue
		}
		var parts []string
		for _, f := range o {
			if !zero(f.Name, f.Value) {
				if text := strings.Join(d.values(f), ", "); f.Name == "name" {
					parts = append(parts, text)
				} else {
					parts = append(parts, strings.ReplaceAll(f.Name, "_", " ")+" "+text)
				}
			}
		}
		lines = append(lines, strings.Join(parts, ", "))
	}
	if len(words) > 0 {
		lines = append(lines, strings.Join(words, ", "))
	}
	return lines
}

func (d *describer) value(name string, v any) string {
	switch v := v.(type) {
	case bool:
		return yes(v)
	case view.Map:
		var parts []string
		for _, m := range v {
			parts = append(parts, fmt.Sprintf("%s=%v", m.Name, m.Value))
		}
		return strings.Join(parts, ", ")
	case uint64:
		switch {
		case isBytes(name):
			return size.Format(v)
		case name == "speed":
			return bits(v)
		case name == "ttl_ms":
			return (time.Duration(v) * time.Millisecond).String()
		}
		return strconv.FormatUint(v, 10)
	case int64:
		switch {
		case strings.HasSuffix(name, "_unix_ms"):
			return fmt.Sprintf("%s (%s ago)", time.UnixMilli(v).Format(time.DateTime), d.a.age(v))
		case strings.HasSuffix(name, "_ns"):
			return duration(v)
		}
		return strconv.FormatInt(v, 10)
	}
	return fmt.Sprint(v)
}

// isBytes reports whether a number with this name is a size in bytes.
func isBytes(name string) bool {
	return strings.HasSuffix(name, "memory") || slices.Contains([]string{"bytes", "max_alloc", "max_constant_buffer", "max_parameter_size"}, name)
}

// label returns a field's name as words.
func label(name string) string {
	for _, suffix := range []string{"_unix_ms", "_ns", "_ms"} {
		name = strings.TrimSuffix(name, suffix)
	}
	short := []string{"id", "uuid", "pci", "gpu", "gpus", "vgpu", "numa", "cpus", "nics", "pid", "fp64", "il", "ttl"}
	parts := strings.Split(name, "_")
	for i, p := range parts {
		switch {
		case p == "gpus", p == "cpus", p == "nics":
			parts[i] = strings.ToUpper(p[:len(p)-1]) + "s"
		case slices.Contains(short, p):
			parts[i] = strings.ToUpper(p)
		case i == 0 && p != "":
			parts[i] = string(unicode.ToUpper(rune(p[0]))) + p[1:]
		}
	}
	return strings.Join(parts, " ")
}

func (d *describer) table(title string, heading []string, rows [][]string) {
	if len(rows) == 0 || d.err != nil {
		return
	}
	d.line("\n%s:", label(title))
	if d.err == nil {
		heading = slices.Clone(heading)
		heading[0] = "  " + heading[0]
		for _, r := range rows {
			r[0] = "  " + r[0]
		}
		d.err = table(d.w, heading, rows)
	}
}
