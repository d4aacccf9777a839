package cli

import (
	"context"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
)

func (a *app) eventsCommand() *cobra.Command {
	var follow bool
	var last uint32
	cmd := &cobra.Command{
		Use: "events [KIND/NAME]", Short: "Say what happened in the cluster",
		Long: "Say what happened in the cluster, or to one object: what was done, when and by\nwhom. The oldest come first.",
		Example: `  gpuctl events
  gpuctl events host/h1 --last 10
  gpuctl events --follow -o json`,
		Args: arguments(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeKindName,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &clusterv1.EventsRequest{Follow: follow, Last: last}
			if len(args) > 0 {
				word, name, _ := strings.Cut(args[0], "/") // a kind alone means all its objects
				k, err := a.kind(word)
				if err != nil {
					return err
				}
				req.Kind, req.Object = k.kind, name
			}
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			if follow {
				return a.followEvents(cmd.Context(), c, req)
			}
			return a.listEvents(cmd.Context(), c, req)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on and print what happens")
	cmd.Flags().Uint32Var(&last, "last", 50, "how many of the past (0: all that are kept)")
	return cmd
}

func (a *app) listEvents(ctx context.Context, c clusterClient, req *clusterv1.EventsRequest) error {
	stream, err := c.Events(ctx, connect.NewRequest(req))
	if err != nil {
		return advise(ctx, c, err)
	}
	defer stream.Close()
	var events []*clusterv1.Event
	for stream.Receive() {
		events = append(events, proto.CloneOf(stream.Msg()))
	}
	if err := stream.Err(); err != nil {
		return advise(ctx, c, err)
	}
	if a.structured() {
		return a.print(view.List(events))
	}
	if len(events) == 0 {
		return a.sayNone("events")
	}
	var rows [][]string
	for _, e := range events {
		rows = append(rows, a.eventRow(e))
	}
	return table(a.Out, a.eventHeading(), rows)
}

// followEvents prints events. If the stream breaks, it continues where it was.
func (a *app) followEvents(ctx context.Context, c clusterClient, req *clusterv1.EventsRequest) error {
	ctx, stop := interruptible(ctx)
	defer stop()
	var index uint64
	var part uint32
	var widths []int
	shown := false
	return a.stay(ctx, c, func() (bool, error) {
		stream, err := c.Events(ctx, connect.NewRequest(req))
		if err != nil {
			return false, err
		}
		defer stream.Close()
		answered := false
		for stream.Receive() {
			answered = true
			e := stream.Msg()
			if shown && (e.GetIndex() < index || e.GetIndex() == index && e.GetPart() <= part) {
				continue // already printed before the break
			}
			index, part = e.GetIndex(), e.GetPart()
			if a.structured() {
				if err := a.printLine(view.Of(e)); err != nil {
					return true, err
				}
				shown = true
				continue
			}
			if !shown {
				widths = widen([]int{19, 24, 12}, a.eventHeading())
				if err := a.say(padded(a.eventHeading(), widths)); err != nil {
					return true, err
				}
				shown = true
			}
			if err := a.say(padded(a.eventRow(e), widths)); err != nil {
				return true, err
			}
		}
		if shown || stream.Err() == nil { // in order: those that were stored have been sent, if there were any
			req.Last = 0 // all that are stored, so that none is missed
		}
		return answered, stream.Err()
	})
}

func (a *app) eventHeading() []string {
	h := []string{"TIME", "OBJECT", "WHAT", "BY", "MESSAGE"}
	if a.wide() {
		h = append(h, "INDEX", "ABOUT")
	}
	return h
}

func (a *app) eventRow(e *clusterv1.Event) []string {
	row := []string{
		time.UnixMilli(e.GetUnixMs()).Format(time.DateTime), view.Word(e.GetKind()) + "/" + e.GetObject(), e.GetType(), e.GetActor(), e.GetMessage(),
	}
	if a.wide() {
		row = append(row, strconv.FormatUint(e.GetIndex(), 10), strings.Join(e.GetAbout(), ","))
	}
	return row
}
