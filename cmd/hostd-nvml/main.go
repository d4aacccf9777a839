package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

func main() {
	err := run(os.Args[1:], cmdutil.Stdio{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	if err != nil {
		fmt.Fprintln(os.Stderr, "hostd-nvml:", err)
	}
	os.Exit(cmdutil.Code(err))
}

// run is the program. With --once its error says that the library did not
// work; that there is none is no error.
func run(args []string, std cmdutil.Stdio) error {
	flags := flag.NewFlagSet("hostd-nvml", flag.ContinueOnError)
	flags.SetOutput(std.Err)
	once := flags.String("once", "", "print `list` or facts as JSON and end")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return cmdutil.Usage(err)
	}
	if flags.NArg() > 0 {
		return cmdutil.Usage(fmt.Errorf("unexpected argument %q", flags.Arg(0)))
	}
	collector := newCollector(open)
	if *once != "" {
		return printOnce(collector, nvml.Op(*once), std.Out)
	}
	// Interrupts of a terminal are for hostd, which then ends us.
	signal.Ignore(syscall.SIGINT)
	out, err := ownOutput(std.Out)
	if err != nil {
		return err
	}
	return serve(collector, std.In, out)
}

func printOnce(c *collector, op nvml.Op, out io.Writer) error {
	if op != nvml.List && op != nvml.Facts {
		return cmdutil.Usage(fmt.Errorf("--once %q: say list or facts", op))
	}
	answer := c.answer(nvml.Request{Version: nvml.Version, Op: op})
	c.answer(nvml.Request{Version: nvml.Version, Op: nvml.Release})
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(answer); err != nil {
		return err
	}
	if answer.Status == nvml.Failed {
		return errors.New(answer.Message)
	}
	return nil
}

// ownOutput keeps what the library may print out of the answers.
func ownOutput(out io.Writer) (io.Writer, error) {
	file, ok := out.(*os.File)
	if !ok || file.Fd() != 1 {
		return out, nil
	}
	fd, err := unix.FcntlInt(1, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("keep standard output: %w", err)
	}
	if err := unix.Dup3(2, 1, 0); err != nil {
		return nil, fmt.Errorf("redirect standard output: %w", err)
	}
	return os.NewFile(uintptr(fd), "answers"), nil
}
