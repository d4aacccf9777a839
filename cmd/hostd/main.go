// Command hostd manages the GPUs of one host.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/gpuctl/gpuctl/hostd/command"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

func main() {
	err := command.Run(context.Background(), os.Args[1:], cmdutil.Stdio{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	if err != nil {
		fmt.Fprintln(os.Stderr, "hostd:", err)
	}
	os.Exit(cmdutil.Code(err))
}
