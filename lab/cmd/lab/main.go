// Command lab starts, reaches and stops the two Xen hosts of package lab.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpuctl/gpuctl/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := root().ExecuteContext(ctx)
	var run *lab.RunError
	switch {
	case err == nil:
	case errors.As(err, &run) && run.Status > 0:
		os.Exit(run.Status) // it has said why
	default:
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

func root() *cobra.Command {
	var cache string
	c := &cobra.Command{
		Use: "lab", Short: "Two Xen hosts in QEMU on this machine",
		SilenceUsage: true, SilenceErrors: true,
	}
	c.PersistentFlags().StringVar(&cache, "cache", "", "folder of images and running hosts ($GPUCTL_LAB_CACHE; .cache/lab in the repository)")
	// with opens the lab for a command.
	with := func(do func(context.Context, *lab.Lab, []string) error) func(*cobra.Command, []string) error {
		return func(c *cobra.Command, args []string) error {
			l, err := lab.Open(cache, lab.NewProgress(c.ErrOrStderr()))
			if err != nil {
				return err
			}
			defer l.Close()
			return do(c.Context(), l, args)
		}
	}
	var cold bool
	up := &cobra.Command{
		Use: "up", Short: "Start both hosts: from snapshots in seconds, else by booting them", Args: cobra.NoArgs,
		RunE: with(func(ctx context.Context, l *lab.Lab, _ []string) error { return l.Up(ctx, cold) }),
	}
	up.Flags().BoolVar(&cold, "cold", false, "stop what runs, boot and make new snapshots")
	ssh := &cobra.Command{
		Use: "ssh HOST [COMMAND...]", Short: "Run a command on a host as root, or log in", Args: cobra.MinimumNArgs(1),
		RunE: with(sshTo),
	}
	ssh.Flags().SetInterspersed(false)
	c.AddCommand(up, ssh,
		&cobra.Command{
			Use: "put HOST FILE DEST", Short: "Copy a file to a host, quickly", Args: cobra.ExactArgs(3),
			RunE: with(func(ctx context.Context, l *lab.Lab, args []string) error {
				h, err := l.Host(args[0])
				if err != nil {
					return err
				}
				return h.Put(ctx, args[1], args[2])
			}),
		},
		&cobra.Command{
			Use: "down", Short: "End both hosts and forget what they did", Args: cobra.NoArgs,
			RunE: with(func(ctx context.Context, l *lab.Lab, _ []string) error { return l.Down(ctx) }),
		},
		&cobra.Command{
			Use: "image", Short: "Build the image and stop there", Args: cobra.NoArgs,
			RunE: with(func(ctx context.Context, l *lab.Lab, _ []string) error { return l.Build(ctx) }),
		},
		&cobra.Command{
			Use: "snapshot", Short: "Keep the hosts as they are as what later labs start from", Args: cobra.NoArgs,
			RunE: with(func(ctx context.Context, l *lab.Lab, _ []string) error { return l.Snapshot(ctx) }),
		},
		power("off", "Cut a host's power", with, (*lab.Host).PowerOff),
		power("on", "Boot a host whose power was cut", with, (*lab.Host).PowerOn),
		link(with),
		&cobra.Command{
			Use: "status", Short: "Tell which hosts run, how to reach them and what cards they have", Args: cobra.NoArgs,
			RunE: func(c *cobra.Command, args []string) error {
				return with(func(_ context.Context, l *lab.Lab, _ []string) error { return status(c, l) })(c, args)
			},
		},
	)
	return c
}

type opener = func(func(context.Context, *lab.Lab, []string) error) func(*cobra.Command, []string) error

func power(name, short string, with opener, do func(*lab.Host, context.Context) error) *cobra.Command {
	return &cobra.Command{
		Use: name + " HOST", Short: short, Args: cobra.ExactArgs(1),
		RunE: with(func(ctx context.Context, l *lab.Lab, args []string) error {
			h, err := l.Host(args[0])
			if err != nil {
				return err
			}
			return do(h, ctx)
		}),
	}
}

func link(with opener) *cobra.Command {
	return &cobra.Command{
		Use: "link HOST up|down", Short: "Connect a host to the other, or cut it off", Args: cobra.ExactArgs(2),
		RunE: with(func(ctx context.Context, l *lab.Lab, args []string) error {
			h, err := l.Host(args[0])
			if err != nil {
				return err
			}
			if args[1] != "up" && args[1] != "down" {
				return fmt.Errorf("a link goes up or down, not %q", args[1])
			}
			return h.Link(ctx, args[1] == "up")
		}),
	}
}

// sshTo runs a command itself, and leaves a terminal to the ssh program.
func sshTo(ctx context.Context, l *lab.Lab, args []string) error {
	h, err := l.Host(args[0])
	if err != nil {
		return err
	}
	if len(args) > 1 {
		return h.Stream(ctx, strings.Join(args[1:], " "), os.Stdin, os.Stdout, os.Stderr)
	}
	port, err := h.SSHPort()
	if err != nil {
		return err
	}
	key, err := h.Key()
	if err != nil {
		return err
	}
	c := exec.Command("ssh", "-i", key, "-p", strconv.Itoa(port), "-o", "StrictHostKeyChecking=no",
		"-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "root@127.0.0.1")
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	return c.Run()
}

func status(c *cobra.Command, l *lab.Lab) error {
	out := c.OutOrStdout()
	for _, h := range l.Hosts() {
		port, err := h.SSHPort()
		if err != nil {
			fmt.Fprintf(out, "%s  down\n", h.Name)
			continue
		}
		fmt.Fprintf(out, "%s  up    %s between the hosts, ssh on 127.0.0.1:%d, console %s\n", h.Name, h.Address, port, h.Console())
	}
	fmt.Fprintln(out, "\ncards of each host:")
	for _, card := range lab.Cards() {
		fmt.Fprintf(out, "  %s  %-27s %-20s %s\n", card.Slot, card.Model, strings.Join(card.IDs, " "), card.What)
	}
	return nil
}
