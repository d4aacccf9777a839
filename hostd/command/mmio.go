package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/server"
	"github.com/gpuctl/gpuctl/mmio/xen"
)

// mmioCommand is the process that has one mediated GPU. hostd starts it.
func mmioCommand(stdio cmdutil.Stdio) *cobra.Command {
	var dir, name, policy string
	m := server.Model{}
	cmd := &cobra.Command{
		Use: "mmio-server", Short: "Have one mediated GPU, and serve VMs of Xen", Hidden: true,
		Long: `Have one mediated GPU and serve the VMs that have a part of it. hostd starts this
process for each GPU of its configuration (mmio.gpus), and it outlives hostd. If it
is killed, the contents of its GPU are lost, and the VMs that have a part read ones.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			m.Policy = timeshare.Policy(policy)
			return serveMMIO(cmd.Context(), dir, name, m, slog.New(slog.NewTextHandler(stdio.Err, nil)))
		},
	}
	f := cmd.Flags()
	f.StringVar(&dir, "dir", "", "`folder` of its socket and journal")
	f.StringVar(&name, "gpu", "", "its `name`")
	f.Uint64Var(&m.Memory, "memory", 0, "`bytes` of all parts")
	f.IntVar(&m.Parts, "parts", 0, "the most parts")
	f.StringVar(&policy, "policy", string(timeshare.Fair), "how VMs share its time")
	for _, name := range []string{"dir", "gpu", "memory", "parts"} {
		_ = cmd.MarkFlagRequired(name) // fails only if the flag does not exist
	}
	return cmd
}

func serveMMIO(ctx context.Context, dir, name string, m server.Model, log *slog.Logger) (err error) {
	hv, err := xen.OpenLinux("/dev/xen")
	if err != nil {
		return fmt.Errorf("mediated gpu %s: %w", name, err)
	}
	defer func() { err = errors.Join(err, hv.Close()) }()
	gpu, err := server.NewGPU(m, func(e mediate.Event) {
		log.Info("mediated", "gpu", name, "vm", e.Name, "refused", e.Reason.String(), "what", e.Text, "count", e.Count)
	})
	if err != nil {
		return fmt.Errorf("mediated gpu %s: %w", name, err)
	}
	s := &server.Server{Dir: dir, Name: name, Model: m, GPU: gpu, Xen: hv, Log: log}
	err = s.Run(ctx, func() { log.Info("ready", "gpu", name, "socket", server.Socket(dir, name)) })
	if errors.Is(err, context.Canceled) {
		err = nil
	}
	return err
}
