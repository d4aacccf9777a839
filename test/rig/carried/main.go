// Command gpuguest-carried is gpuguest for tests of carriers: executors of the GPUs
// that it is asked for run as far executors of leases of its own, which carriers
// reach over loopback. So everything that runs on the GPUs of a rig runs over TCP,
// and swaps go between local and remote GPUs.
//
// GPUCTL_TEST_CARRIER says how: tcp; tls; cut for TLS over connections that are cut
// again and again; mixed for a carrier in every other generation of a session's
// executors, and an executor in the rest; roam for the same over TLS; relay for that as from a VM without
// a network; rdma for that over connections as RDMA has them; break for that over connections of
// contents that break; zstd with everything compressed that can be; older for executors of an earlier release, whose gpuguest
// GPUCTL_TEST_OLDER names, and of this one by turns; or straight for TLS to two lease managers in turn, as of
// two hosts, with contents that go straight from one to the other. GPUCTL_TEST_CARRIER_CUT says
// which of those connections are cut: never; early, while the application runs; final, while
// it is frozen; some of them, if it is not set. GPUCTL_TEST_CARRIER_AT is an address at which
// somebody else takes the carriers' connections, and hands them over as hostd does;
// GPUCTL_TEST_CARRIER_OUTAGE is how long a connection may be broken, 60s if it is not set.
package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/guest/lease"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/service"
	"github.com/gpuctl/gpuctl/guest/session"
	"github.com/gpuctl/gpuctl/internal/relay"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpuguest-carried:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	var api, apps, dir, users, memory string
	var anew bool
	cmd := &cobra.Command{Use: "gpuguest-carried serve", SilenceUsage: true, SilenceErrors: true}
	serve := &cobra.Command{Use: "serve", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return serveCarried(cmd.Context(), api, apps, dir, users, anew)
	}}
	cmd.PersistentFlags().Bool("verbose", false, "")
	f := serve.Flags()
	f.StringVar(&api, "socket", "", "")
	f.StringVar(&apps, "app-socket", "", "")
	f.StringVar(&dir, "rundir", "", "")
	f.StringVar(&users, "executor-users", confine.DefaultRange().String(), "")
	f.StringVar(&memory, "executor-memory", "", "")
	f.BoolVar(&anew, "compile-anew", false, "")
	cmd.AddCommand(serve)
	cmd.SetArgs(args)
	return cmd.ExecuteContext(ctx)
}

func serveCarried(ctx context.Context, api, apps, dir, users string, anew bool) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	self, err := os.Executable()
	if err != nil {
		return err
	}
	real := &session.ExecLauncher{Binary: filepath.Join(filepath.Dir(self), "gpuguest"), Dir: dir}
	if os.Geteuid() == 0 {
		r, err := confine.ParseRange(users)
		if err != nil {
			return err
		}
		real.Users = &confine.Users{Range: r, Dir: "/run/gpuctl/users"}
	}
	mode := os.Getenv("GPUCTL_TEST_CARRIER")
	if !slices.Contains([]string{"tcp", "tls", "cut", "mixed", "roam", "relay", "rdma", "break", "zstd", "older", "straight"}, mode) {
		return fmt.Errorf("GPUCTL_TEST_CARRIER is %q", mode)
	}
	outage := time.Minute
	if text := os.Getenv("GPUCTL_TEST_CARRIER_OUTAGE"); text != "" {
		if outage, err = time.ParseDuration(text); err != nil {
			return fmt.Errorf("GPUCTL_TEST_CARRIER_OUTAGE: %w", err)
		}
	}
	at := os.Getenv("GPUCTL_TEST_CARRIER_AT")
	// hostd is not told of these leases: it would end them, as it has not asked for them.
	far := lease.Config{Launcher: real, Logger: log, Most: 4096}
	leases, err := lends(far, dir, at == "")
	if err != nil {
		return err
	}
	defer leases.Close()
	if mode == "relay" {
		if real.Relay, err = relayed(ctx, dir, log); err != nil {
			return err
		}
	}
	if mode == "rdma" {
		if at, err = overRDMA(ctx, real, leases.Addresses()[0], log); err != nil {
			return err
		}
	}
	l := &launcher{ExecLauncher: real, leases: leases, mode: mode, at: at, outage: outage, ctx: ctx}
	if mode == "older" {
		if l.older, err = newOlder(real, far, filepath.Join(dir, "older")); err != nil {
			return err
		}
		defer l.older.leases.Close()
	}
	m, err := session.New(session.Config{
		Dir: dir, Launcher: l,
		Logger: log, Faults: os.Getenv("GPUCTL_FAULTS") == "1", CompileAnew: anew,
	})
	if err != nil {
		return err
	}
	defer m.Close()
	if mode != "straight" {
		return service.Serve(ctx, log, api, apps, m, m)
	}
	others, err := lends(far, filepath.Join(dir, "second"), at == "")
	if err != nil {
		return err
	}
	defer others.Close()
	l.hosts = newHosts(leases, others)
	return service.Serve(ctx, log, api, apps, m, &straight{Manager: m, l: l, log: log})
}

// lends returns a lease manager with a folder of its own. If it listens, that is where the one before did, as carriers come
// back to it.
func lends(c lease.Config, dir string, listens bool) (*lease.Manager, error) {
	c.Dir = dir
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, err
	}
	port := filepath.Join(dir, "carrier-port")
	if listens {
		c.Listen = []string{sameAs(port)}
	}
	m, err := lease.New(c)
	if err != nil || !listens {
		return m, err
	}
	return m, os.WriteFile(port, []byte(m.Addresses()[0]), 0o600)
}

// sameAs returns the address that a file has from before, to which carriers come back, or a free one.
func sameAs(file string) string {
	if before, err := os.ReadFile(file); err == nil {
		return string(before)
	}
	return "127.0.0.1:0"
}

// launcher starts carriers where executors are asked for.
type launcher struct {
	*session.ExecLauncher
	leases *lease.Manager
	mode   string
	at     string
	outage time.Duration
	ctx    context.Context
	hosts  *hosts // of the mode straight
	older  *older // of the mode older
}

// Launch implements session.Launcher.
func (l *launcher) Launch(ctx context.Context, spec session.Spec, journal func(session.Process) error) (session.Process, error) {
	if slices.Contains([]string{"mixed", "roam", "relay", "rdma", "break", "zstd"}, l.mode) && spec.Generation%2 == 0 {
		return l.ExecLauncher.Launch(ctx, spec, journal)
	}
	exec, leases, id := l.ExecLauncher, l.leases, ""
	if l.older != nil {
		if exec, leases = l.older.of(l, spec.Generation); leases == nil {
			return exec.Launch(ctx, spec, journal)
		}
	}
	if lent, of := l.hosts.of(&spec); lent != nil {
		leases, id = lent, of
	} else {
		rt, lent, err := l.lend(ctx, leases, spec.Runtime, spec.Device)
		if err != nil {
			return nil, err
		}
		spec.Runtime, id = rt, lent
	}
	p, err := exec.Launch(ctx, spec, journal)
	if err != nil {
		return nil, errors.Join(err, leases.EndLease(context.WithoutCancel(ctx), id))
	}
	l.hosts.runs(&spec, p, leases, id)
	go func() {
		select {
		case <-p.Done():
			// A carrier that has retired has told its far executor so.
			time.Sleep(100 * time.Millisecond)
			_ = leases.EndLease(context.Background(), id)
		case <-l.ctx.Done():
		}
	}()
	return p, nil
}

// lend makes a lease for an executor, and returns the runtime with which its carrier starts.
func (l *launcher) lend(ctx context.Context, leases *lease.Manager, rt *gpuctlv1.Runtime, device *gpuctlv1.VirtualDevice) (*gpuctlv1.Runtime, string, error) {
	var b [8]byte
	_, _ = rand.Read(b[:])
	id := hex.EncodeToString(b[:])
	req := &gpuctlv1.LendRequest{Lease: id, Runtime: rt, Plain: l.mode == "tcp" || l.mode == "mixed", Device: device, OutageMs: l.outage.Milliseconds(), CompressAlways: l.mode == "zstd"}
	r := &gpuctlv1.Remote{Plain: req.Plain, OutageMs: req.OutageMs, CompressAlways: req.CompressAlways}
	if !req.Plain {
		own, err := remote.NewIdentity("carrier")
		if err != nil {
			return nil, "", err
		}
		req.PeerCertSha256, r.Certificate, r.PrivateKey = own.Hash(), own.Certificate, own.Key
	}
	resp, err := leases.Lend(ctx, req)
	if err != nil {
		return nil, "", err
	}
	r.Token, r.PeerCertSha256, r.Addresses = resp.Token, resp.CertSha256, resp.Addresses
	if l.at != "" {
		r.Addresses = []string{l.at}
	}
	if l.mode == "relay" {
		r.Addresses = []string{relay.Prefix + r.Addresses[0]}
	}
	if l.mode == "cut" || l.mode == "break" {
		a, err := cutting(r.Addresses[0], l.mode)
		if err != nil {
			return nil, "", err
		}
		r.Addresses = []string{a}
	}
	return &gpuctlv1.Runtime{Remote: r}, id, nil
}
