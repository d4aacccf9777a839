package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

// say prints a line of data.
func (a *app) say(line string) error {
	_, err := fmt.Fprintln(a.Out, line)
	return err
}

// sayNone prints that a list is empty, for people.
func (a *app) sayNone(what string) error {
	_, err := fmt.Fprintln(a.Err, "no", what)
	return err
}

// result prints the result: v for programs, a line for people.
func (a *app) result(v any, format string, args ...any) error {
	if a.structured() {
		return a.print(v)
	}
	return a.say(clean(fmt.Sprintf(format, args...)))
}

// confirm asks a person. Without a terminal, --yes is required.
func (a *app) confirm(yes bool, question string) error {
	if yes {
		return nil
	}
	if !isTerminal(a.In) {
		return cmdutil.Usage(errors.New("there is no terminal to ask for confirmation: say --yes"))
	}
	fmt.Fprint(a.Err, clean(question), " [y/N] ")
	answer, err := bufio.NewReader(a.In).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("confirmation: %w", err)
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return nil
	}
	return errors.New("not confirmed: nothing was changed")
}

// isTerminal reports whether a stream is a terminal.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
