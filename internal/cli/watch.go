package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
)

const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = 2 * time.Second
	giveUp     = 30 * time.Second // electing a new leader takes less
)

// interruptible makes an interrupt end a command without an error, for commands that run
// until somebody stops them.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	return signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
}

// stay opens a stream again that broke, because the leader has changed or a host was
// restarted. once reports whether the stream had begun to answer.
func (a *app) stay(ctx context.Context, c clusterClient, once func() (answered bool, err error)) error {
	wait, since, began := firstRetry, time.Now(), false
	for {
		answered, err := once()
		if ctx.Err() != nil {
			return nil //nolint:nilerr // whoever asked it to end is no error
		}
		if answered {
			wait, since, began = firstRetry, time.Now(), true
		}
		var e *connect.Error
		ours := err != nil && !errors.As(err, &e) // an error of the output, not of the stream
		refused := ours || e != nil && connect.IsWireError(e) && e.Code() != connect.CodeUnavailable
		if err != nil && (!began || refused || time.Since(since) > giveUp) {
			return advise(ctx, c, err)
		}
		if err == nil && time.Since(since) > giveUp {
			return unavailable("hostd ends the stream again and again")
		}
		if answered {
			fmt.Fprintln(a.Err, "hostd went away; trying again")
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil
		}
		wait = min(2*wait, lastRetry)
	}
}

// watcher remembers the objects, so that only differences are printed after a break.
type watcher struct {
	a      *app
	k      kind
	names  []string // only these names; nil: all
	known  map[string]proto.Message
	widths []int
	held   []change // not printed before the complete list has arrived
}

type change struct {
	what   string // present, added, changed or gone
	index  uint64
	object proto.Message
}

// watch prints the existing objects, then each change.
func (a *app) watch(ctx context.Context, c clusterClient, k kind, where string, names []string) error {
	ctx, stop := interruptible(ctx)
	defer stop()
	w := &watcher{a: a, k: k, names: names, known: map[string]proto.Message{}}
	req := &clusterv1.WatchRequest{Kind: k.kind, Where: where}
	if len(names) == 1 {
		req.Name = names[0]
	}
	first := true
	return a.stay(ctx, c, func() (bool, error) {
		stream, err := c.Watch(ctx, connect.NewRequest(req))
		if err != nil {
			return false, err
		}
		defer stream.Close()
		synced, err := w.follow(stream, first)
		if synced {
			first = false
		}
		return synced, err
	})
}

// follow prints the changes of one stream. synced reports whether the complete list of
// objects had arrived.
func (w *watcher) follow(stream *connect.ServerStreamForClient[clusterv1.WatchResponse], first bool) (synced bool, err error) {
	listed := map[string]bool{}
	for stream.Receive() {
		m := stream.Msg()
		if o := inner(m.GetObject()); o != nil && w.wants(w.k.name(o)) {
			listed[w.k.name(o)] = true
			w.learn(o, m.GetDeleted(), m.GetIndex(), first && !synced)
		}
		if m.GetSynced() && !synced {
			synced = true
			for _, name := range slices.Sorted(maps.Keys(w.known)) {
				if !listed[name] {
					w.learn(w.known[name], true, m.GetIndex(), false)
				}
			}
		}
		if synced || !first {
			if err := w.flush(); err != nil {
				return synced, err
			}
		}
	}
	return synced, stream.Err()
}

func (w *watcher) wants(name string) bool {
	return len(w.names) == 0 || slices.Contains(w.names, name)
}

func (w *watcher) learn(o proto.Message, gone bool, index uint64, present bool) {
	name := w.k.name(o)
	old, was := w.known[name]
	what := "added"
	switch {
	case gone && !was:
		return
	case gone:
		delete(w.known, name)
		w.held = append(w.held, change{"gone", index, o})
		return
	case was && proto.Equal(old, o):
		return
	case was && present: // an earlier stream broke before the complete list had arrived
		w.known[name] = o
		w.held = slices.DeleteFunc(w.held, func(c change) bool { return w.k.name(c.object) == name })
		what = "present"
	case present:
		what = "present"
	case was:
		what = "changed"
	}
	w.known[name] = o
	w.held = append(w.held, change{what, index, o})
}

func (w *watcher) flush() error {
	held := w.held
	w.held = nil
	a := w.a
	switch {
	case a.structured():
		for _, c := range held {
			line := view.Object{{Name: "change", Value: c.what}, {Name: "index", Value: c.index}, {Name: "object", Value: view.Of(c.object)}}
			if err := a.printLine(line); err != nil {
				return err
			}
		}
		return nil
	case a.output == "name":
		for _, c := range held {
			if _, err := fmt.Fprintf(a.Out, "%s %s/%s\n", c.what, w.k.one, clean(w.k.name(c.object))); err != nil {
				return err
			}
		}
		return nil
	}
	now := a.now().Format("15:04:05")
	rows := [][]string{}
	for _, c := range held {
		rows = append(rows, append([]string{now, c.what}, a.row(w.k, c.object)...))
	}
	if w.widths == nil {
		rows = slices.Insert(rows, 0, append([]string{"TIME", "CHANGE"}, a.heading(w.k)...))
		w.widths = []int{0, len("present")}
		for _, row := range rows {
			w.widths = widen(w.widths, row)
		}
	}
	for _, row := range rows {
		if _, err := fmt.Fprintln(a.Out, padded(row, w.widths)); err != nil {
			return err
		}
	}
	return nil
}

func widen(widths []int, row []string) []int {
	for i, cell := range row {
		if i == len(widths) {
			widths = append(widths, 0)
		}
		widths[i] = max(widths[i], utf8.RuneCountInString(cell), 1)
	}
	return widths
}

// padded returns a row of a table whose column widths were set by earlier rows.
func padded(row []string, widths []int) string {
	var b strings.Builder
	for i, cell := range row {
		if cell == "" {
			cell = "-"
		}
		b.WriteString(clean(cell))
		if i < len(row)-1 {
			b.WriteString(strings.Repeat(" ", max(0, widths[i]-utf8.RuneCountInString(cell))+2))
		}
	}
	return b.String()
}
