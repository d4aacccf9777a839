// Command gpuctl runs applications on GPUs that can be swapped under them.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/gpuctl/gpuctl/cluster/remote"
	"github.com/gpuctl/gpuctl/internal/cli"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/migrate"
)

func main() {
	options := []cli.Option{cli.WithTimeline(migrate.SVG)}
	// Who has no home has no credentials, and can do without.
	if user, err := remote.NewUser(os.Getenv); err == nil {
		options = append(options, cli.WithRemote(user))
	}
	err := cli.Run(context.Background(), os.Args[1:], cmdutil.Stdio{In: os.Stdin, Out: os.Stdout, Err: os.Stderr}, options...)
	if err != nil && !errors.As(err, new(cmdutil.Status)) {
		fmt.Fprintln(os.Stderr, "gpuctl:", err)
	}
	os.Exit(cmdutil.Code(err))
}
