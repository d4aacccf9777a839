package cli_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/gpuctl/gpuctl/hostd/command"
	"github.com/gpuctl/gpuctl/hostd/guesttest"
	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
)

// The scripts run gpuctl and hostd as processes; gpuguest is the fake, and app
// an application that uses a GPU until the file it is told exists.
func TestMain(m *testing.M) {
	exit := func(name string, run func(context.Context, []string, cmdutil.Stdio) error) func() {
		return func() {
			err := run(context.Background(), os.Args[1:], cmdutil.Stdio{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
			if err != nil && !errors.As(err, new(cmdutil.Status)) {
				fmt.Fprintln(os.Stderr, name+":", err)
			}
			os.Exit(cmdutil.Code(err))
		}
	}
	testscript.Main(m, map[string]func(){
		"gpuctl":   exit("gpuctl", gpuctl),
		"hostd":    exit("hostd", command.Run),
		"gpuguest": exit("gpuguest", gpuguest),
		"app":      exit("app", app),
		"cudaapp":  exit("cudaapp", cudaApp),
		"await":    exit("await", await),

		nvml.Program: exit(nvml.Program, driver),
	})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "../../test/script",
		Setup: func(e *testscript.Env) error {
			// A socket's path must be short, and the library be somewhere.
			dir, err := os.MkdirTemp("", "gx")
			if err != nil {
				return err
			}
			e.Defer(func() { _ = os.RemoveAll(dir) })
			icd := filepath.Join(dir, "libgpuctl-opencl.so")
			e.Setenv("XDG_RUNTIME_DIR", dir)
			e.Setenv("RUN", filepath.Join(dir, "gpuctl"))
			e.Setenv("GPUCTL_ICD", icd)
			e.Setenv("NO_COLOR", "1")
			e.Setenv("GORACE", "atexit_sleep_ms=0") // else a second for every command
			return os.WriteFile(icd, nil, 0o600)
		},
	})
}

// gpuguest has the flags of the real one.
func gpuguest(ctx context.Context, args []string, _ cmdutil.Stdio) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	flags := flag.NewFlagSet("gpuguest", flag.ContinueOnError)
	api, apps := flags.String("socket", "", ""), flags.String("app-socket", "", "")
	flags.String("rundir", "", "")
	if len(args) == 0 || args[0] != "serve" {
		return fmt.Errorf("unknown command %q", args)
	}
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	g := guesttest.New()
	_ = os.Remove(*apps)
	l, err := net.Listen("unix", *apps)
	if err != nil {
		return err
	}
	defer l.Close()
	go g.Serve(l)
	server := unixrpc.Server(g.Handler(), nil)
	a, err := rundir.Listen(*api)
	if err != nil {
		return err
	}
	go func() { _ = server.Serve(a) }()
	// A test that fails must not leave us behind. Otherwise ctx ends first.
	_ = testkit.Poll(ctx, "the end of its folder", func() error {
		_, err := os.Stat(*api)
		return testkit.Want(err != nil)
	})
	return server.Close()
}

func app(ctx context.Context, args []string, _ cmdutil.Stdio) error {
	vendors, err := filepath.Glob(filepath.Join(os.Getenv("OCL_ICD_VENDORS"), "*.icd"))
	if err != nil || len(vendors) != 1 {
		return fmt.Errorf("vendors: %v, %w", vendors, err)
	}
	line, err := os.ReadFile(vendors[0])
	if err != nil || strings.TrimSpace(string(line)) != os.Getenv("GPUCTL_ICD") {
		return fmt.Errorf("the vendors folder names %q, %w", line, err)
	}
	c, id, err := guesttest.Connect(os.Getenv("GPUCTL_SOCKET"), os.Getenv("GPUCTL_TOKEN"))
	if err != nil {
		return err
	}
	defer c.Close()
	if len(args) < 2 {
		return nil
	}
	if err := os.WriteFile(args[0], []byte(id), 0o600); err != nil {
		return err
	}
	return await(ctx, args[1:2], cmdutil.Stdio{})
}

// driver is NVIDIA's, with the cards whose addresses $CARDS has.
func driver(_ context.Context, _ []string, stdio cmdutil.Stdio) error {
	for {
		var r nvml.Request
		if err := nvml.ReadMessage(stdio.In, &r, nvml.MaxRequest); err != nil {
			return nil //nolint:nilerr // hostd has ended
		}
		answer := nvml.Response{Version: nvml.Version, Number: r.Number, Status: nvml.NoDriver, Message: "no driver here"}
		for i, address := range strings.Fields(os.Getenv("CARDS")) {
			memory := uint64(80 << 30)
			answer.Status, answer.Driver = nvml.OK, "580.159.04"
			answer.GPUs = append(answer.GPUs, nvml.GPU{UUID: cardUUID(i), Name: "NVIDIA H100", PCIAddress: address, Memory: &memory})
		}
		if err := nvml.WriteMessage(stdio.Out, answer, nvml.MaxResponse); err != nil {
			return err
		}
		if r.Op == nvml.Release {
			return nil
		}
	}
}

func cardUUID(i int) string { return fmt.Sprintf("GPU-734814f7-e8f5-4d3a-ac70-00000000000%d", i) }

// cudaApp uses CUDA until the file that it is told exists. It was started by gpuctl run, or
// is told a socket and the GPUs.
func cudaApp(ctx context.Context, args []string, stdio cmdutil.Stdio) error {
	if len(args) < 2 {
		return errors.New("usage: cudaapp FILE END [SOCKET GPUS]")
	}
	socket, gpus := os.Getenv("GPUCTL_SOCKET"), os.Getenv("CUDA_VISIBLE_DEVICES")
	if len(args) == 4 {
		socket, gpus = args[2], args[3]
	}
	c, err := guesttest.OpenCUDA(socket, os.Getenv("GPUCTL_TOKEN"), strings.Split(gpus, ","))
	if err != nil {
		return err
	}
	defer c.Close()
	fmt.Fprintln(stdio.Out, "uses", gpus)
	if err := os.WriteFile(args[0], []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
		return err
	}
	return await(ctx, args[1:2], cmdutil.Stdio{})
}

// await returns when a file exists; a socket, when somebody answers: one whose
// daemon was killed is still there.
func await(ctx context.Context, args []string, _ cmdutil.Stdio) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute) // whoever started it may have been killed
	defer cancel()
	return testkit.Poll(ctx, args[0], func() error {
		if _, err := os.Stat(args[0]); err != nil {
			return err
		}
		return testkit.Want(filepath.Ext(args[0]) != ".sock" || rundir.Answers(args[0]), "no answer")
	})
}
