package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/hostd/cards/libvirthook"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
)

const xml = `<domain type='xen'><name>vm1</name><devices><hostdev mode='subsystem' type='pci' managed='yes'><source><address domain='0x0000' bus='0x65' slot='0x00' function='0x0'/></source></hostdev></devices></domain>`

// maxSize is of the program as it is shipped, stripped.
const maxSize = 4 << 20

// install builds the program into the hooks folder of a machine of its own, of
// which a real server's socket is part.
func install(t testing.TB, h libvirthook.HandlerFunc) (program string) {
	t.Helper()
	root := t.TempDir()
	program = filepath.Join(root, "etc/libvirt/hooks/qemu.d/50-gpuctl")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := os.MkdirAll(filepath.Join(root, "etc/gpuctl"), 0o755); err != nil {
		t.Fatal(err)
	}
	run := filepath.Join(root, "run")
	if err := os.Mkdir(run, 0o700); err != nil {
		t.Fatal(err)
	}
	config := "socket: " + filepath.Join(run, wire.SocketName) + "\n"
	if err := os.WriteFile(filepath.Join(root, "etc/gpuctl/hook.yaml"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	l, err := libvirthook.Listen(run)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- libvirthook.New(h, libvirthook.WithUser(os.Getuid())).Serve(ctx, l) }()
	t.Cleanup(func() { stop(); <-ended })
	return program
}

func call(program, operation, stdin string) (out, said string, err error) {
	cmd := exec.Command(program, "vm1", operation, "begin", "-")
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LC_ALL=C"} // as libvirt does
	err = cmd.Run()
	return stdout.String(), stderr.String(), err
}

func TestProgram(t *testing.T) {
	program := install(t, func(_ context.Context, e libvirthook.Event) (libvirthook.Answer, error) {
		switch {
		case e.Driver != "qemu" || e.Domain != "vm1" || e.Sub != "begin" || e.Extra != "-" || string(e.XML) != xml:
			return libvirthook.Answer{}, errors.New("that is not what libvirt said")
		case e.Operation == wire.Prepare:
			return libvirthook.Answer{}, errors.New("GPU 0000:65:00.0 is vm2's")
		}
		return libvirthook.Answer{XML: []byte("<domain/>")}, nil
	})
	_, said, err := call(program, wire.Prepare, xml)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || said != "gpuctl: GPU 0000:65:00.0 is vm2's\n" {
		t.Errorf("prepare: %v, %q", err, said)
	}
	if out, said, err := call(program, wire.Migrate, xml); err != nil || out != "<domain/>" || said != "" {
		t.Errorf("migrate: %v, %q, %q", err, out, said)
	}
	if out, said, err := call(program, wire.Release, xml); err != nil || out != "" || said != "" {
		t.Errorf("release: %v, %q, %q", err, out, said)
	}
	// With all three streams closed, as a daemon may leave them.
	if out, err := exec.Command("sh", "-c", `exec "$0" vm1 reconnect begin - <&- >&- 2>&-`, program).CombinedOutput(); err != nil {
		t.Errorf("closed streams: %v, %s", err, out)
	}
	info, err := os.Stat(program)
	if err != nil || info.Size() > maxSize {
		t.Errorf("%d bytes, more than %d (%v)", info.Size(), maxSize, err)
	}
}

// BenchmarkHook starts the program as libvirt does, for a domain with a GPU,
// against a server that agrees at once. p99-ms is what libvirtd waits at most,
// one call in a hundred excepted; version-ms the same without the round trip.
func BenchmarkHook(b *testing.B) {
	program := install(b, func(context.Context, libvirthook.Event) (libvirthook.Answer, error) { return libvirthook.Answer{}, nil })
	measure := func(f func() error) []time.Duration {
		var all []time.Duration
		for range b.N {
			began := time.Now()
			if err := f(); err != nil {
				b.Fatal(err)
			}
			all = append(all, time.Since(began))
		}
		slices.Sort(all)
		return all
	}
	ms := func(all []time.Duration, percent int) float64 {
		return all[min(len(all)-1, len(all)*percent/100)].Seconds() * 1000
	}
	b.ResetTimer()
	took := measure(func() error { _, _, err := call(program, wire.Prepare, xml); return err })
	b.StopTimer()
	alone := measure(func() error { return exec.Command(program, "--version").Run() })
	b.ReportMetric(ms(took, 50), "p50-ms")
	b.ReportMetric(ms(took, 99), "p99-ms")
	b.ReportMetric(ms(took, 100), "max-ms")
	b.ReportMetric(ms(alone, 50), "version-p50-ms")
}
