package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/simulate"
)

const (
	honestVM, hostileVM = mmio.VM(1), mmio.VM(2)
	window              = 100 * time.Millisecond
	windows             = 8
	secretAt            = 0x3ff000
	secret              = 0x5ec4e75ec4e75ec4
)

var (
	errResults   = errors.New("the honest VM had wrong results")
	errIsolation = errors.New("a VM reached what is not its own")
	errShare     = errors.New("the honest VM had less than its share")
	errTame      = errors.New("the hostile VM did not do what this is to show")
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "demo failed:", err)
		os.Exit(1)
	}
}

func run(out io.Writer) error {
	fmt.Fprint(out, "One GPU, two VMs. The honest one has commands of 1 ms, the hostile one keeps commands of 10 ms queued and attacks.\n"+
		"Each line is 100 ms of the GPU's time.\n")
	for _, mode := range []mediate.Mode{mediate.Eager, mediate.Lazy, mediate.Para} {
		if err := show(out, mode); err != nil {
			return fmt.Errorf("%s: %w", mode, err)
		}
	}
	fmt.Fprintln(out, "\nResults right, shares fair, nobody reached what is another's.")
	return nil
}

// stage is one showing.
type stage struct {
	out     io.Writer
	m       *simulate.Machine
	honest  *honest
	hostile *hostile
	shares  []float64 // the honest VM's, of each window
}

func show(out io.Writer, mode mediate.Mode) error {
	policy := timeshare.DefaultConfig(timeshare.Fair)
	policy.Overdue = time.Second
	m, err := simulate.New(24*simulate.MiB, 8*simulate.MiB, policy, nil)
	if err != nil {
		return err
	}
	s := &stage{out: out, m: m}
	if s.honest, err = newHonest(m, mode); err != nil {
		return err
	}
	if s.hostile, err = newHostile(m); err != nil {
		return err
	}
	fmt.Fprintf(out, "\n%s shadows\n%-7s %-42s %-16s %s\n", mode, "", "share of the GPU: honest █  hostile ░", "shadow updates", "attacks refused")
	s.m.Settle()
	for range windows {
		if err := s.window(); err != nil {
			return err
		}
	}
	return s.verdict()
}

// window lets 100 ms pass, and draws a line.
func (s *stage) window() error {
	usage := func(vm mmio.VM) time.Duration {
		u, err := s.m.GPU.Usage(vm)
		if err != nil {
			return 0
		}
		return u.Busy
	}
	a, b := usage(honestVM), usage(hostileVM)
	scans, refused := s.updates(), s.hostile.v.Stats().Total().Refusals()
	if err := s.hostile.attack(); err != nil {
		return err
	}
	for end := s.m.Clock + window; s.m.Clock < end; {
		if err := s.honest.act(); err != nil {
			return err
		}
		if err := s.hostile.act(); err != nil {
			return err
		}
		s.m.TickTo(min(end, s.honest.next()))
	}
	a, b = usage(honestVM)-a, usage(hostileVM)-b
	share := a.Seconds() / max(a+b, 1).Seconds()
	s.shares = append(s.shares, share)
	n := int(share*30 + 0.5)
	fmt.Fprintf(s.out, "%5d ms %s%s %3.0f %%     %-16s %d\n", (s.m.Clock / time.Millisecond), strings.Repeat("█", n), strings.Repeat("░", 30-n), 100*share,
		strings.Repeat("▪", int(min(s.updates()-scans, 15))), s.hostile.v.Stats().Total().Refusals()-refused)
	return nil
}

// updates counts what brought the honest VM's shadows up to date: scans, or calls.
func (s *stage) updates() uint64 {
	c := s.honest.v.Stats().Total()
	return c.Scans + c.Hypercalls
}

func (s *stage) verdict() error {
	if err := s.honest.finish(); err != nil {
		return err
	}
	fmt.Fprintf(s.out, "honest: %d results, all right", s.honest.checked)
	c := s.hostile.v.Stats().Total()
	fmt.Fprintf(s.out, "; hostile: %d exits, refused", c.Exits())
	var reasons []string
	for r, n := range c.Refused {
		if n > 0 {
			reasons = append(reasons, fmt.Sprintf("%v %d", mmio.Reason(r), n))
		}
	}
	fmt.Fprintf(s.out, ": %s\n", strings.Join(reasons, ", "))
	if n := len(s.m.Violations); n > 0 {
		return fmt.Errorf("%w: %d times, the first was %v", errIsolation, n, s.m.Violations[0])
	}
	if !s.honest.hasSecret() {
		return fmt.Errorf("%w: the honest VM's memory was changed", errIsolation)
	}
	if len(reasons) < 6 {
		return errTame
	}
	var mean float64
	for _, x := range s.shares {
		mean += x / float64(len(s.shares))
	}
	if mean < 0.42 || slices.Min(s.shares) < 0.3 { // it computes for less than it launches: its thinking is not all hidden
		return fmt.Errorf("%w: %.0f %% on average", errShare, 100*mean)
	}
	return nil
}
