package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
)

// network is a bridge with a namespace for each host.
type network struct {
	prefix string // of everything that it makes
	undo   [][]string
}

const subnet = "10.213.77."

// newNetwork makes it, of n hosts. What it made before an error is undone.
func newNetwork(ctx context.Context, n int) (w *network, err error) {
	w = &network{prefix: fmt.Sprintf("gx%d", os.Getpid()%100000)}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	bridge := w.prefix + "b"
	steps := [][2]string{
		{"link add " + bridge + " type bridge", "link del " + bridge},
		{"link set " + bridge + " up", ""},
	}
	for i := 1; i <= n; i++ {
		space, outer, inner := w.space(i), fmt.Sprintf("%so%d", w.prefix, i), fmt.Sprintf("%si%d", w.prefix, i)
		steps = append(steps,
			[2]string{"netns add " + space, "netns del " + space},
			[2]string{"link add " + outer + " type veth peer name " + inner + " netns " + space, "link del " + outer},
			[2]string{"link set " + outer + " master " + bridge + " up", ""},
			[2]string{"-n " + space + " link set lo up", ""},
			[2]string{"-n " + space + " addr add " + w.address(i) + "/24 dev " + inner, ""},
			[2]string{"-n " + space + " link set " + inner + " up", ""},
		)
	}
	for _, s := range steps {
		if s[1] != "" {
			w.undo = append(w.undo, strings.Fields(s[1]))
		}
		if err := ip(ctx, strings.Fields(s[0])...); err != nil {
			return w, err
		}
	}
	return w, nil
}

func (w *network) space(i int) string   { return fmt.Sprintf("%sn%d", w.prefix, i) }
func (w *network) address(i int) string { return fmt.Sprintf("%s%d", subnet, i) }

// close takes everything away, the last first.
func (w *network) close() error {
	var errs []error
	for i := len(w.undo) - 1; i >= 0; i-- {
		if err := ip(context.Background(), w.undo[i]...); err != nil && there(w.undo[i]) {
			errs = append(errs, err)
		}
	}
	w.undo = nil
	return errors.Join(errs...)
}

// there reports whether an undo that failed has left something: a step may have
// failed before, or a namespace have taken its end of a pair with it.
func there(undo []string) bool {
	what, name := undo[0], undo[len(undo)-1]
	if what == "netns" {
		_, err := os.Stat("/run/netns/" + name)
		return err == nil
	}
	_, err := net.InterfaceByName(name)
	return err == nil
}

func ip(ctx context.Context, args ...string) error {
	if out, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
