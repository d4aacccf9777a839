// Command mmiolab tries mediated GPUs on real Xen: in dom0 it gives domains of the lab a
// part of one, and a function that does nothing; in a guest it computes, measures, or does
// what it may not. It is no part of the product.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"
)

// Slots of the two functions on the guests' PCI bus 0.
const (
	slotMediated = 0x1f
	slotNull     = 0x1e
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := root().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "mmiolab:", err)
		os.Exit(1)
	}
}

func root() *cobra.Command {
	c := &cobra.Command{Use: "mmiolab", Short: "Try mediated GPUs on Xen", SilenceUsage: true, SilenceErrors: true}
	number := func(use, short string, do func(context.Context, int) error) *cobra.Command {
		return &cobra.Command{
			Use: use + " N", Short: short, Args: cobra.ExactArgs(1),
			RunE: func(c *cobra.Command, args []string) error {
				n, err := strconv.Atoi(args[0])
				if err != nil {
					return err
				}
				return do(c.Context(), n)
			},
		}
	}
	c.AddCommand(
		&cobra.Command{
			Use: "serve DIR [DOMAIN...]", Short: "In dom0: have a GPU, until a signal comes", Args: cobra.MinimumNArgs(1),
			RunE: func(c *cobra.Command, args []string) error { return serve(c.Context(), args[0], args[1:]) },
		},
		&cobra.Command{
			Use: "read", Short: "In a guest: read the id of the mediated GPU", Args: cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error { return read() },
		},
		number("compute", "In a guest: compute N times and check the results", compute),
		number("endure", "In a guest: compute with N words from round to round, until a signal comes", endure),
		number("measure", "In a guest: time N reads of each function", measure),
		number("hostile", "In a guest: do N things that it may not", hostile),
	)
	return c
}
