// Command gpuctl runs applications on GPUs that can be swapped under them.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/gpuctl/gpuctl/internal/cli"
	"github.com/gpuctl/gpuctl/internal/program"
)

func main() {
	err := cli.Run(context.Background(), os.Args[1:], program.Stdio{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	if err != nil && !errors.As(err, new(program.Status)) {
		fmt.Fprintln(os.Stderr, "gpuctl:", err)
	}
	os.Exit(program.Code(err))
}
