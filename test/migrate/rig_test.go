package migrate

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/test/libvirt"
	"github.com/gpuctl/gpuctl/test/rig"
)

const hostConfig = `version: 1
discover: false
cluster: {host: %s, listen: "%s:7650"}
devices: {libvirt: "qemu:///system", migrateURI: "%s", unsafeDisks: true, migrationTLS: true}
`

// host is a libvirtd with a hostd.
type host struct {
	*libvirt.Host
	t    *testing.T
	bin  string
	dir  string
	cmd  *exec.Cmd
	log  *testkit.Log
	virt *virt.Client
}

// build makes hostd as the sources are; gpuguest comes from the last make.
func build(t *testing.T, dir string) {
	t.Helper()
	root, err := rig.Root()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "hostd"), "./cmd/hostd")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("hostd: %v: %s", err, out)
	}
	guest := filepath.Join(root, "bin", "gpuguest")
	data, err := os.ReadFile(guest)
	if err != nil {
		t.Fatalf("no gpuguest (%v): run make", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "gpuguest"), data, 0o755); err != nil {
		t.Fatal(err)
	}
}

// cluster starts two hosts, each with a hostd, as one cluster.
func cluster(t *testing.T) (r *libvirt.Rig, a, b *host) {
	t.Helper()
	return clusterBy(t, libvirt.NoLocks, direct)
}

// direct is how libvirtds reach each other.
const direct = "qemu+tcp://{address}/system"

// clusterBy is the same with a lock manager, and another way from libvirtd to libvirtd.
func clusterBy(t *testing.T, locks libvirt.Locks, uri string) (r *libvirt.Rig, a, b *host) {
	t.Helper()
	r, err := libvirt.StartLocked(locks, "hosta", "hostb")
	libvirt.Need(t, err)
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	build(t, r.Dir)
	var hosts []*host
	for _, l := range r.Hosts {
		h := &host{Host: l, t: t, bin: r.Dir, dir: filepath.Join(r.Dir, l.Name+"-gpuctl"), log: &testkit.Log{}}
		if err := os.MkdirAll(h.dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(h.dir, "hostd.yaml"), fmt.Appendf(nil, hostConfig, l.Name, l.Address, uri), 0o600); err != nil {
			t.Fatal(err)
		}
		patient := virt.Timeouts{Query: time.Minute, Change: 5 * time.Minute} // on a busy machine
		if h.virt, err = virt.Open("qemu:///system", virt.WithSocket(l.Socket()), virt.WithTimeouts(patient)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = h.virt.Close() })
		t.Cleanup(func() {
			h.kill()
			if t.Failed() {
				text := h.log.String()
				t.Logf("hostd of %s:\n%s", h.Name, text[max(0, len(text)-8<<10):])
			}
		})
		h.start()
		hosts = append(hosts, h)
	}
	a, b = hosts[0], hosts[1]
	ctx := t.Context()
	if _, err := a.api().Init(ctx, connect.NewRequest(&clusterv1.InitRequest{})); err != nil {
		t.Fatal(err)
	}
	token, err := a.api().CreateToken(ctx, connect.NewRequest(&clusterv1.CreateTokenRequest{Role: clusterv1.Role_ROLE_HOST}))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.api().Join(ctx, connect.NewRequest(&clusterv1.JoinRequest{Token: token.Msg.GetToken()})); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "both hosts are ready", func() error {
		for _, h := range hosts {
			res, err := h.api().List(ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_HOST, Where: `state == "ready"`, Stale: true}))
			if err != nil || len(res.Msg.GetObjects()) != 2 {
				return testkit.Want(false, h.Name, res, err)
			}
		}
		return nil
	})
	return r, a, b
}

func (h *host) socket() string { return filepath.Join(h.dir, "hostd.sock") }

func (h *host) start() {
	h.t.Helper()
	h.cmd = h.Command(context.WithoutCancel(h.t.Context()), filepath.Join(h.bin, "hostd"), "--config", filepath.Join(h.dir, "hostd.yaml"), "--rundir", h.dir, "--data-dir", filepath.Join(h.dir, "data"))
	h.cmd.Stdout, h.cmd.Stderr = h.log, h.log
	h.cmd.WaitDelay = time.Second
	if err := h.cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	testkit.Until(h.t, h.Name+" answers", func() error {
		ctx, cancel := context.WithTimeout(h.t.Context(), time.Second)
		defer cancel()
		_, err := h.api().Status(ctx, connect.NewRequest(&clusterv1.StatusRequest{}))
		return err
	})
}

// kill ends hostd as kill -9 does. It is the child of the command that entered
// the host's namespaces, or took its place.
func (h *host) kill() {
	if h.cmd == nil {
		return
	}
	_ = exec.Command("pkill", "-KILL", "-f", filepath.Join(h.bin, "hostd")+" --config "+filepath.Join(h.dir, "hostd.yaml")).Run()
	_ = h.cmd.Process.Kill()
	_ = h.cmd.Wait()
	h.cmd = nil
}

func (h *host) http() *http.Client { return unixrpc.Client(h.socket()) }

func (h *host) api() clusterv1connect.ClusterServiceClient {
	return clusterv1connect.NewClusterServiceClient(h.http(), "http://host")
}

func (h *host) migrations() gpuctlv1connect.MigrationServiceClient {
	return gpuctlv1connect.NewMigrationServiceClient(h.http(), "http://host")
}

// where says on which hosts a VM runs.
func where(ctx context.Context, name string, hosts ...*host) (on []string, err error) {
	for _, h := range hosts {
		d, err := h.virt.Lookup(ctx, name)
		if errors.Is(err, virt.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		s, err := h.virt.State(ctx, d)
		if err == nil && s == virt.Running {
			on = append(on, h.Name)
		}
	}
	return on, nil
}

// migrate starts a migration and follows it to its end.
func (h *host) migrate(ctx context.Context, r *gpuctlv1.MachinePlanRequest, watch func(*gpuctlv1.MachineProgress)) (*gpuctlv1.MachineProgress, error) {
	if r.Verb == "" {
		r.Verb = "migrate"
	}
	in, err := h.migrations().Start(ctx, connect.NewRequest(&gpuctlv1.MachineStartRequest{Plan: r}))
	if err != nil {
		return nil, err
	}
	defer in.Close()
	var last *gpuctlv1.MachineProgress
	for in.Receive() {
		last = in.Msg()
		if watch != nil {
			watch(last)
		}
	}
	if last.GetEnd() == "" && in.Err() == nil {
		return last, errors.New("it has no end")
	}
	return last, in.Err()
}

func says(t *testing.T, err error, words string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("%v; want %q", err, words)
	}
}
