package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	hosts     = 3
	limit     = 1500 * time.Millisecond // for the next assignment after the leader is lost
	voting    = time.Minute
	rejoining = time.Minute
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "cluster demo failed:", err)
		os.Exit(1)
	}
}

type demo struct {
	out   io.Writer
	hosts []*host
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	fs := flag.NewFlagSet("cluster", flag.ContinueOnError)
	bin := fs.String("bin", "bin", "`folder` of gpuctl, hostd and gpuguest")
	lend := fs.Bool("remote", false, "show two hosts of which one lends the other its GPU")
	encoder := fs.String("x264", "x264", "with --remote: the `program` x264; if there is none, that of --program runs")
	program := fs.String("program", "test/cl/bin/stream", "OpenCL `program` to run meanwhile")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if os.Getuid() != 0 {
		return errors.New("network namespaces need root")
	}
	for _, p := range []*string{bin, program} {
		if *p, err = filepath.Abs(*p); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp("", "gc")
	if err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o711); err != nil { // the users of sessions pass through it
		return err
	}
	number, gpus := hosts, bothGPUs
	if *lend {
		number, gpus = 2, smallGPU
	}
	w, err := newNetwork(ctx, number)
	if err != nil {
		return err
	}
	d := &demo{out: out}
	defer func() {
		for _, h := range d.hosts {
			err = errors.Join(err, h.stop())
		}
		if err = errors.Join(err, w.close()); err == nil {
			err = os.RemoveAll(dir)
		} else {
			fmt.Fprintln(out, "the hosts' logs are in", dir)
		}
	}()
	for i := 1; i <= number; i++ {
		h, err := newHost(gpus, fmt.Sprintf("node%d", i), w.space(i), w.address(i), *bin, filepath.Join(dir, fmt.Sprint(i)))
		if err != nil {
			return err
		}
		d.hosts = append(d.hosts, h)
		if err := h.start(ctx); err != nil {
			return err
		}
	}
	if *lend {
		return d.lend(ctx, *program, *encoder, dir)
	}
	return d.show(ctx, *program)
}

func (d *demo) say(format string, args ...any) { fmt.Fprintf(d.out, "\n== "+format+"\n", args...) }

// print runs gpuctl and shows command and answer.
func (d *demo) print(ctx context.Context, h *host, args ...string) error {
	text, err := h.gpuctl(ctx, args...)
	fmt.Fprintf(d.out, "%s$ gpuctl %s\n%s", h.name, strings.Join(args, " "), text)
	return err
}

func (d *demo) show(ctx context.Context, program string) error {
	first := d.hosts[0]
	d.say("three hosts become one cluster")
	if err := d.print(ctx, first, "cluster", "init"); err != nil {
		return err
	}
	for _, h := range d.hosts[1:] {
		token, err := first.gpuctl(ctx, "cluster", "token", "create", "--name", h.name)
		if err != nil {
			return err
		}
		text, err := h.gpuctl(ctx, "cluster", "join", strings.TrimSpace(token))
		fmt.Fprintf(d.out, "%s$ gpuctl cluster join TOKEN\n%s", h.name, text)
		if err != nil {
			return err
		}
	}
	d.say("they watch each other until all three may vote")
	if err := d.await(ctx, voting, func(s status) bool { return s.voters() == hosts }); err != nil {
		return err
	}
	for _, args := range [][]string{{"cluster", "status"}, {"get", "gpus"}} {
		if err := d.print(ctx, d.hosts[1], args...); err != nil {
			return err
		}
	}
	return d.lose(ctx, program)
}

// lose kills the leader while an application runs on it.
func (d *demo) lose(ctx context.Context, program string) error {
	leader, others, err := d.leader(ctx)
	if err != nil {
		return err
	}
	d.say("an application runs on %s, which leads", leader.name)
	app := leader.command(ctx, "run", "--gpu", "model == 'Small 1 GiB'", "--", program, "--mib", "8", "--buffers", "2", "--seconds", "25")
	var result strings.Builder
	app.Stdout = &result
	if err := app.Start(); err != nil {
		return err
	}
	appEnded := make(chan error, 1)
	go func() { appEnded <- app.Wait() }()
	if err := d.session(ctx, others[0]); err != nil {
		return err
	}
	if err := d.print(ctx, others[0], "get", "assignments"); err != nil {
		return err
	}
	d.say("%s's hostd is killed (kill -9)", leader.name)
	if err := leader.kill(); err != nil {
		return err
	}
	start := time.Now()
	if err := d.print(ctx, others[0], "claim", "create", "after-the-kill", "--min-memory", "1GiB", "--on", others[1].name); err != nil {
		return err
	}
	took := time.Since(start)
	fmt.Fprintf(d.out, "the next assignment was committed after %d ms\n", took.Milliseconds())
	if took > limit {
		return fmt.Errorf("the cluster took %v to go on, more than %v", took, limit)
	}
	for _, args := range [][]string{{"cluster", "status"}, {"get", "gpus"}} {
		if err := d.print(ctx, others[1], args...); err != nil {
			return err
		}
	}
	d.say("%s comes back; its application never stopped and is still the only owner", leader.name)
	if err := leader.start(ctx); err != nil {
		return err
	}
	if err := d.await(ctx, rejoining, func(s status) bool { return s.healthy() == hosts }); err != nil {
		return err
	}
	for _, args := range [][]string{{"get", "sessions"}, {"get", "assignments"}, {"get", "hosts"}} {
		if err := d.print(ctx, others[0], args...); err != nil {
			return err
		}
	}
	select {
	case err := <-appEnded:
		if err != nil {
			return fmt.Errorf("the application failed: %w", err)
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	fmt.Fprintf(d.out, "the application ended well: %s", firstLine(result.String()))
	return d.print(ctx, others[0], "events", "--last", "12")
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line + "\n"
}

// session waits until the cluster knows of one.
func (d *demo) session(ctx context.Context, h *host) error {
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		text, err := h.gpuctl(ctx, "get", "sessions", "-o", "name")
		if err != nil {
			return err
		}
		if strings.TrimSpace(text) != "" {
			return nil
		}
	}
	return errors.New("no session appeared")
}

// status is what gpuctl says of the cluster.
type status struct {
	Leader  string `json:"leader"`
	Members []struct {
		Host    string `json:"host"`
		Voter   bool   `json:"voter"`
		Healthy bool   `json:"healthy"`
	} `json:"members"`
}

func (s status) voters() (n int) {
	for _, m := range s.Members {
		if m.Voter && m.Healthy {
			n++
		}
	}
	return n
}

func (s status) healthy() (n int) {
	for _, m := range s.Members {
		if m.Healthy {
			n++
		}
	}
	return n
}

func (d *demo) status(ctx context.Context, h *host) (s status, err error) {
	text, err := h.gpuctl(ctx, "cluster", "status", "-o", "json")
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal([]byte(text), &s)
}

// leader finds it, and the others.
func (d *demo) leader(ctx context.Context) (leader *host, others []*host, err error) {
	s, err := d.status(ctx, d.hosts[1])
	if err != nil {
		return nil, nil, err
	}
	for _, h := range d.hosts {
		if h.name == s.Leader {
			leader = h
		} else {
			others = append(others, h)
		}
	}
	if leader == nil {
		return nil, nil, errors.New("there is no leader")
	}
	return leader, others, nil
}

// await asks the leader until what it says is as wanted.
func (d *demo) await(ctx context.Context, patience time.Duration, ok func(status) bool) error {
	var last status
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if err := ctx.Err(); err != nil {
			return err
		}
		leader, _, err := d.leader(ctx)
		if err != nil {
			continue
		}
		if last, err = d.status(ctx, leader); err == nil && ok(last) {
			return nil
		}
	}
	return fmt.Errorf("the cluster is not as it should be after %v: %+v", patience, last)
}
