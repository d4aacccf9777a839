// Command gpuctl-hook is what libvirt calls when domains start, end and move.
package main

import (
	"os"

	"github.com/gpuctl/gpuctl/internal/hook/dropin"
)

func main() { os.Exit(dropin.Run(os.Args, os.Stdin, os.Stdout, os.Stderr)) }
