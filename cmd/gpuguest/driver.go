package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/driver"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
)

// driverCommand has what asks NVIDIA's driver: the helper that gpuguest starts, and the same
// by hand, without hostd.
func driverCommand(log *slog.Logger) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "driver",
		Short: "Ask NVIDIA's driver about processes that use CUDA",
		Args:  cobra.NoArgs,
	}
	cmd.AddCommand(
		&cobra.Command{
			Use:    "call OPERATION",
			Short:  "Carry out one request from standard input (started by serve)",
			Hidden: true,
			Args:   cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				return driver.Serve(ask.Op(args[0]), cmd.InOrStdin(), cmd.OutOrStdout())
			},
		},
		&cobra.Command{
			Use:    "canary UUID",
			Short:  "Keep a pattern on a GPU (started by serve)",
			Hidden: true,
			Args:   cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				return driver.Canary(ask.UUID(args[0]), cmd.InOrStdin(), cmd.OutOrStdout())
			},
		},
	)
	for _, o := range []ask.Op{ask.Devices, ask.GetState, ask.Lock, ask.Checkpoint, ask.Restore, ask.Unlock} {
		cmd.AddCommand(driverCall(o))
	}
	for _, kind := range []string{"adopt", "plan", "rehearse", "suspend", "resume", "swap"} {
		cmd.AddCommand(driverOperation(kind, log))
	}
	return cmd
}

// driverCall asks the driver for one thing, for people. It checks nothing before.
func driverCall(o ask.Op) *cobra.Command {
	var pid int
	var timeout, deadline time.Duration
	var pairs []string
	cmd := &cobra.Command{
		Use:   string(o),
		Short: "One call of the driver, without any check",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			req := ask.Request{Op: o, PID: pid, TimeoutMS: timeout.Milliseconds()}
			for _, p := range pairs {
				from, to, ok := strings.Cut(p, "=")
				if !ok {
					return fmt.Errorf("%q is no pair OLD=NEW", p)
				}
				req.Pairs = append(req.Pairs, ask.Pair{Old: ask.UUID(from), New: ask.UUID(to)})
			}
			a, err := (&ask.Client{}).Call(cmd.Context(), req, deadline)
			if a != nil {
				b, jerr := json.MarshalIndent(a, "", "\t")
				if jerr != nil {
					return jerr
				}
				fmt.Fprintln(cmd.OutOrStdout(), string(b))
			}
			return err
		},
	}
	f := cmd.Flags()
	f.DurationVar(&deadline, "deadline", time.Minute, "kill the helper after this time")
	if o == ask.Devices {
		return cmd
	}
	f.IntVar(&pid, "pid", 0, "the process")
	if err := cmd.MarkFlagRequired("pid"); err != nil {
		panic(err) // no such flag
	}
	if o == ask.Lock {
		f.DurationVar(&timeout, "timeout", 10*time.Second, "how long the driver may wait for kernels")
	}
	if o == ask.Restore {
		f.StringArrayVar(&pairs, "pair", nil, "OLD=NEW UUID of a GPU, for each that the driver shows")
	}
	return cmd
}

// driverOperation runs one operation with its checks, undos and journal.
func driverOperation(kind string, log *slog.Logger) *cobra.Command {
	var pid uint32
	var dir, fail, dev, folder string
	var to []string
	var canary, detach bool
	var parallel int
	var lock time.Duration
	cmd := &cobra.Command{
		Use:   kind + " --pid PID",
		Short: "The same as gpuctl does, for one process and without hostd",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			m, err := cuda.New(cuda.Config{
				Dir: dir, Logger: log, NoCanary: !canary, Detach: detach, Parallel: parallel, UID: uint32(os.Geteuid()),
				Faults: os.Getenv("GPUCTL_FAULTS") == "1", Roots: holders.Roots{Dev: dev},
			})
			if err != nil {
				return err
			}
			defer m.Close()
			out := cmd.OutOrStdout()
			began := time.Now()
			target := &gpuctlv1.Target{}
			for _, u := range to {
				target.Driver = append(target.Driver, &gpuctlv1.DriverGPU{Uuid: u})
			}
			if kind == "resume" && folder != "" {
				res, err := m.Revive(cmd.Context(), folder, target, fail, nil)
				if err != nil {
					return err
				}
				return show(out, res, time.Since(began), res.GetError() != "")
			}
			if pid == 0 {
				return errors.New("name a process of the job with --pid")
			}
			resp, err := m.Adopt(cmd.Context(), &gpuctlv1.AdoptRequest{Pid: pid})
			if err != nil {
				return err
			}
			if kind == "adopt" || len(resp.GetSessions()) != 1 {
				return show(out, resp, time.Since(began), len(resp.GetSessions()) != 1)
			}
			id := resp.GetSessions()[0].GetId()
			began = time.Now()
			var res *gpuctlv1.SwapResult
			switch kind {
			case "plan":
				p, err := m.Plan(cmd.Context(), &gpuctlv1.PlanRequest{Session: id, Target: target})
				if err != nil {
					return err
				}
				return show(out, p, time.Since(began), len(p.GetReasons()) > 0)
			case "suspend":
				res, err = m.Suspend(cmd.Context(), &gpuctlv1.SuspendRequest{
					Session: id, File: folder, WithProcess: folder != "", FreezeTimeoutMs: lock.Milliseconds(), FailAt: fail,
				}, nil)
			case "resume":
				res, err = m.Resume(cmd.Context(), &gpuctlv1.ResumeRequest{Session: id, Target: target, FailAt: fail}, nil)
			default:
				res, err = m.Swap(cmd.Context(), &gpuctlv1.SwapRequest{
					Session: id, Target: target, FreezeTimeoutMs: lock.Milliseconds(), Rehearse: kind == "rehearse", FailAt: fail,
				}, nil)
			}
			if err != nil {
				return err
			}
			return show(out, res, time.Since(began), res.GetError() != "")
		},
	}
	f := cmd.Flags()
	f.Uint32Var(&pid, "pid", 0, "a process of the job")
	f.StringVar(&dir, "rundir", "/run/gpuctl/driver", "folder for sessions, made if missing")
	f.StringArrayVar(&to, "gpu", nil, "UUID of the GPU to go to; several in the order of those that the job has")
	f.BoolVar(&canary, "canary", true, "have a test process go first")
	f.BoolVar(&detach, "detach", false, "refuse if the card could not be taken away from the suspended job")
	f.IntVar(&parallel, "parallel", 4, "how many processes of the job are moved at once")
	f.DurationVar(&lock, "freeze-timeout", 10*time.Second, "how long the driver may wait for kernels")
	switch kind {
	case "suspend":
		f.StringVar(&folder, "to", "", "new folder for the job's processes, which end (needs root, and criu 4.1)")
	case "resume":
		f.StringVar(&folder, "from", "", "folder that suspend --to has made; instead of --pid")
	}
	f.StringVar(&fail, "fail-at", "", "")
	f.StringVar(&dev, "dev", "", "folder of the driver's nodes")
	for _, hidden := range []string{"fail-at", "dev"} {
		if err := f.MarkHidden(hidden); err != nil {
			panic(err) // no such flag
		}
	}
	return cmd
}

// show prints an answer as JSON, with how long it took.
func show(out io.Writer, msg proto.Message, took time.Duration, failed bool) error {
	b, err := protojson.MarshalOptions{Multiline: true, Indent: "\t"}.Marshal(msg)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s\n", b)
	fmt.Fprintf(out, "took %.1f ms\n", float64(took.Microseconds())/1000)
	if failed {
		return errors.New("it was not done")
	}
	return nil
}
