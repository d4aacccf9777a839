package dropin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
)

const (
	stdinTime = 3 * time.Second // short, as libvirt writes it at once, if at all
	patience  = 5 * time.Second // time for hostd to start
	pause     = 50 * time.Millisecond
	maxSaid   = 500 // longest message, in bytes
)

// Run runs the hook and returns the exit status. args are those of the process, including
// its own path.
func Run(args []string, in io.Reader, out, err io.Writer) int {
	switch {
	case len(args) == 2 && args[1] == "--version":
		fmt.Fprintln(out, "gpuctl-hook", cmdutil.Version())
		return 0
	case len(args) < 4:
		fmt.Fprintln(err, "gpuctl-hook is called by libvirt, as DRIVER.d/50-gpuctl DOMAIN OPERATION SUB EXTRA; gpuctl hook install puts it there")
		return 2
	}
	h := hook{root: Root(args[0]), in: in, out: out, err: err}
	h.event = wire.Event{Driver: Driver(args[0]), Domain: args[1], Operation: args[2], Sub: args[3]}
	if len(args) > 4 {
		h.event.Extra = args[4]
	}
	if !wire.Known(h.event.Driver, h.event.Operation) {
		return 0 // an operation of a newer libvirt, or of another driver
	}
	return h.run()
}

// Driver returns the driver in whose folder, or under whose name, the program is
// installed.
func Driver(program string) string {
	for _, name := range []string{filepath.Base(filepath.Dir(program)), filepath.Base(program)} {
		if driver := strings.TrimSuffix(name, ".d"); slices.Contains(wire.Drivers(), driver) {
			return driver
		}
	}
	return ""
}

// Root returns the folder below which the system's files are.
func Root(program string) string {
	const hooks = "/etc/libvirt/hooks/"
	if i := strings.LastIndex(program, hooks); i > 0 {
		root := program[:i]
		if _, err := os.Stat(filepath.Join(root, ConfigFile)); err == nil {
			return root
		}
	}
	return "/"
}

type hook struct {
	root     string
	event    wire.Event
	in       io.Reader
	out, err io.Writer
}

func (h hook) run() int {
	files := os.DirFS(h.root)
	config, err := LoadConfig(files)
	if err != nil {
		h.say("%v; the defaults hold", err)
	}
	var readErr error
	h.event.XML, readErr = readXML(h.in)
	if readErr != nil {
		h.say("%v", readErr)
	}
	var ours []string
	known := newKnown(files, config.SocketBelow(h.root))
	switch {
	case h.event.Operation == wire.Started && known.arrives(h.event.XML):
		ours = []string{mediatedGPU}
	case h.event.Refusable():
		ours = known.managed(h.event.XML)
		if readErr != nil && len(ours) == 0 && !errors.Is(readErr, errNoInput) {
			ours = []string{"of an XML that can't be read"}
		}
	}
	limit := config.NotifyTimeout
	if len(ours) > 0 || h.event.Filters() {
		limit = config.Timeout
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	answer, err := h.ask(ctx, config, len(ours) > 0)
	var denied *wire.DeniedError
	switch {
	case err == nil:
		return h.done(answer)
	case errors.As(err, &denied):
		h.say("%s", denied.Message)
		if h.event.Refusable() || h.event.Operation == wire.Started {
			return 1
		}
		return 0
	}
	return h.silent(config, ours, limit, err)
}

// ask calls hostd. If patient, it waits for a hostd that is starting: at boot, domains
// may start before it. hostd may get an event twice.
func (h hook) ask(ctx context.Context, c Config, patient bool) (wire.Answer, error) {
	client := wire.Client{Socket: c.SocketBelow(h.root)}
	until := time.Now().Add(patience)
	var before error
	for {
		answer, err := client.Call(ctx, h.event)
		// If the time limit ended this attempt, the error before is more useful.
		end, limited := ctx.Deadline()
		if before != nil && limited && time.Until(end) < pause && errors.Is(err, wire.ErrUnreachable) {
			err = before
		}
		before = err
		if !errors.Is(err, wire.ErrUnreachable) || !patient || c.OnUnreachable == Allow || time.Now().After(until) {
			return answer, err
		}
		select {
		case <-ctx.Done():
			return answer, err
		case <-time.After(pause):
		}
	}
}

func (h hook) done(a wire.Answer) int {
	if !h.event.Filters() || len(a.XML) == 0 {
		return 0
	}
	if _, err := h.out.Write(a.XML); err != nil {
		// libvirt may have received an incomplete definition.
		h.say("the changed XML could not be handed over: %v", err)
		return 1
	}
	return 0
}

// silent decides what happens without an answer of hostd.
func (h hook) silent(c Config, ours []string, limit time.Duration, err error) int {
	what := fmt.Sprintf("%v", err)
	if errors.Is(err, wire.ErrLate) {
		what = fmt.Sprintf("hostd did not finish within %v; its log says why", limit)
	}
	starts := h.event.Operation == wire.Prepare || h.event.Operation == wire.Start
	switch {
	case h.event.Operation == wire.Started && c.OnUnreachable != Allow && len(ours) > 0: // it has not run yet
		h.say("%s, and domain %s, which arrives, has GPU %s: start hostd, or set on-unreachable: allow in /%s", what, h.event.Domain, mediatedGPU, ConfigFile)
		return 1
	case starts && c.OnUnreachable == Deny:
		h.say("%s, and on-unreachable is deny: start hostd, or change /%s", what, ConfigFile)
		return 1
	case starts && c.OnUnreachable == DenyManaged && len(ours) > 0:
		h.say("%s, and domain %s has GPU %s: start hostd, or set on-unreachable: allow in /%s", what, h.event.Domain, strings.Join(ours[:min(len(ours), 4)], ", "), ConfigFile)
		return 1
	}
	h.say("%s; %s of %s goes on without it", what, h.event.Operation, h.event.Domain)
	return 0
}

// say prints one line for the operator.
func (h hook) say(format string, args ...any) {
	line := strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(fmt.Sprintf(format, args...), "?"))
	if len(line) > maxSaid {
		line = strings.ToValidUTF8(line[:maxSaid], "") + "…"
	}
	fmt.Fprintln(h.err, "gpuctl:", line)
}

// errNoInput means that standard input is closed.
var errNoInput = errors.New("standard input can't be read")

// readXML reads standard input to its end, which may never come. Then the goroutine is
// left behind, and ends with the process.
func readXML(in io.Reader) ([]byte, error) {
	type read struct {
		data []byte
		err  error
	}
	got := make(chan read, 1)
	go func() {
		data, err := io.ReadAll(io.LimitReader(in, wire.MaxXML+1))
		got <- read{data, err}
	}()
	select {
	case r := <-got:
		switch {
		case len(r.data) > wire.MaxXML:
			return nil, fmt.Errorf("the domain's XML has more than %d bytes", wire.MaxXML)
		case r.err != nil && len(r.data) == 0:
			return nil, fmt.Errorf("%w: %w", errNoInput, r.err)
		case r.err != nil:
			return nil, fmt.Errorf("the domain's XML can't be read: %w", r.err)
		}
		return r.data, nil
	case <-time.After(stdinTime):
		return nil, fmt.Errorf("the domain's XML did not come within %v", stdinTime)
	}
}
