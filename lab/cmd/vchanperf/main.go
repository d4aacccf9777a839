// Command vchanperf tries package vchan on real Xen: as a server in a guest of
// the lab, and in dom0 as a client that checks what comes back and says how fast
// it was. It is no part of the product.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/xenstore"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := root().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "vchanperf:", err)
		os.Exit(1)
	}
}

func root() *cobra.Command {
	c := &cobra.Command{Use: "vchanperf", Short: "Try vchan on Xen", SilenceUsage: true, SilenceErrors: true}
	var ring int
	var xenbus string
	serve := &cobra.Command{
		Use: "serve PATH", Short: "Answer domain 0 until a signal comes, over migrations, too", Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			ctx := c.Context()
			xs, err := xenstore.Dial(ctx, xenbus)
			if err != nil {
				return err
			}
			defer func() { _ = xs.Close() }()
			l, err := vchan.Listen(ctx, xs, args[0], 0, vchan.Options{FromPeer: ring, ToPeer: ring})
			if err != nil {
				return err
			}
			fmt.Fprintln(os.Stderr, "listening at", l.Addr())
			return serve(ctx, l, func(err error) { fmt.Fprintln(os.Stderr, err) })
		},
	}
	serve.Flags().StringVar(&xenbus, "store", "/dev/xen/xenbus", "xenstore")
	serve.Flags().IntVar(&ring, "ring", vchan.DefaultRing, "bytes of each ring")

	// dial is a command that does something with a connection.
	dial := func(use, short string, do func(context.Context, *vchan.Conn) error) *cobra.Command {
		var wait time.Duration
		var store string
		c := &cobra.Command{
			Use: use + " DOMAIN PATH", Short: short, Args: cobra.ExactArgs(2),
			RunE: func(c *cobra.Command, args []string) error {
				domain, err := strconv.ParseUint(args[0], 10, 16)
				if err != nil {
					return fmt.Errorf("domain: %w", err)
				}
				xs, err := xenstore.Dial(c.Context(), store)
				if err != nil {
					return err
				}
				defer func() { _ = xs.Close() }()
				ctx, cancel := context.WithTimeout(c.Context(), wait)
				defer cancel()
				conn, err := vchan.Dial(ctx, xs, uint16(domain), args[1], vchan.Options{Wait: true})
				if err != nil {
					return err
				}
				defer func() { _ = conn.Close() }()
				defer context.AfterFunc(c.Context(), func() { _ = conn.Close() })()
				return do(c.Context(), conn)
			},
		}
		c.Flags().DurationVar(&wait, "wait", 30*time.Second, "for a server")
		c.Flags().StringVar(&store, "store", "/run/xenstored/socket", "xenstore")
		return c
	}
	var size int64
	try := dial("try", "Send and receive, check every byte, and write down how fast it was", func(_ context.Context, conn *vchan.Conn) error {
		r, err := try(conn, size)
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(r)
	})
	try.Flags().Int64Var(&size, "bytes", 16<<20, "to move each way")
	hold := dial("hold", "Stay connected and say why it ended", func(_ context.Context, conn *vchan.Conn) error {
		fmt.Fprintln(os.Stdout, "connected")
		_, err := conn.Read(make([]byte, 1))
		fmt.Fprintln(os.Stdout, "ended:", err)
		if errors.Is(err, vchan.ErrMoved) {
			return nil
		}
		return err
	})
	c.AddCommand(serve, try, hold)
	return c
}
