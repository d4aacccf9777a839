package cli_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/internal/cli"
	"github.com/gpuctl/gpuctl/internal/cli/clitest"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/migrate"
)

// gpuctl is the command with a way to one other cluster, prod, whose socket
// is $PROD.
func gpuctl(ctx context.Context, args []string, stdio cmdutil.Stdio) error {
	return cli.Run(ctx, args, stdio, cli.WithRemote(remote{}), cli.WithTimeline(migrate.SVG))
}

type remote struct{}

func (remote) Client(host string) (*http.Client, string, error) {
	if host != "prod" && host != "https://prod:7480" {
		return nil, "", errors.New("no credentials for " + host)
	}
	return unixrpc.Client(os.Getenv("PROD")), "http://prod", nil
}

func (remote) Clusters() ([]string, error) { return []string{"prod"}, nil }

func (remote) Login(_ context.Context, token, as string) (string, error) {
	if token != "good" {
		return "", errors.New("the token was used already")
	}
	if as == "" {
		as = "c0ffee"
	}
	return as, nil
}

// TestClusterScripts runs gpuctl against a fake cluster, one for each script.
func TestClusterScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/cluster", UpdateScripts: os.Getenv("UPDATE") != "", ContinueOnError: true,
		Setup: func(e *testscript.Env) error {
			dir, err := os.MkdirTemp("", "gx") // a socket's path must be short
			if err != nil {
				return err
			}
			e.Defer(func() { _ = os.RemoveAll(dir) })
			socket := filepath.Join(dir, "h.sock")
			c := clitest.New(compile)
			seed(c)
			stop, err := serve(c.Handler(), socket)
			if err != nil {
				return err
			}
			e.Defer(stop)
			e.Values["cluster"] = c
			e.Setenv("XDG_RUNTIME_DIR", dir)
			e.Setenv("GPUCTL_HOST", "unix://"+socket)
			e.Setenv("PROD", socket)
			e.Setenv("NO_COLOR", "1")
			e.Setenv("GORACE", "atexit_sleep_ms=0") // else a second for every command
			e.Setenv("TZ", "UTC")
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"cluster": control, "until": until},
	})
}

func serve(h http.Handler, socket string) (stop func(), err error) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	server := unixrpc.Server(h, nil)
	go func() { _ = server.Serve(l) }()
	return func() { _ = server.Close() }, nil
}

// control changes the fake cluster: what no command of gpuctl can bring about.
func control(ts *testscript.TestScript, _ bool, args []string) {
	c, ok := ts.Value("cluster").(*clitest.Cluster)
	if !ok || len(args) != 2 {
		ts.Fatalf("usage: cluster role|leader|joined|drop|free|forget|releasing|lost VALUE")
	}
	switch args[0] {
	case "role":
		c.SetRole(map[string]clusterv1.Role{"viewer": clusterv1.Role_ROLE_VIEWER, "operator": clusterv1.Role_ROLE_OPERATOR, "admin": clusterv1.Role_ROLE_ADMIN}[args[1]])
	case "leader":
		c.SetLeader(map[string]string{"none": ""}[args[1]])
		if args[1] != "none" {
			c.SetLeader(args[1])
		}
	case "joined":
		c.SetJoined(args[1] == "yes")
	case "drop":
		c.Drop()
	case "releasing":
		c.Put(&clusterv1.Claim{Id: args[1], State: clusterv1.ClaimState_CLAIM_STATE_RELEASING})
	case "lost":
		c.Put(&clusterv1.Claim{Id: args[1], State: clusterv1.ClaimState_CLAIM_STATE_PENDING, Message: "its assignments have been released"})
	case "forget":
		c.Delete(clusterv1.Kind_KIND_GPU, args[1])
	default:
		ts.Fatalf("unknown word %s", args[0])
	}
}

// nap gives what runs in the background time to see something, and nothing to
// depend on it.
func nap(ts *testscript.TestScript, _ bool, args []string) {
	d, err := time.ParseDuration(args[0])
	ts.Check(err)
	time.Sleep(d)
}

// compile is what the real service does with expressions.
func compile(kind clusterv1.Kind, where string) (func(*clusterv1.Object) (bool, error), error) {
	q, err := query.Compile(kind, where)
	if err != nil {
		return nil, err
	}
	return q.Match, nil
}

const gib = 1 << 30

// seed makes three hosts, one of them down, with five GPUs of three models.
func seed(c *clitest.Cluster) {
	now := time.Now()
	ago := func(d time.Duration) int64 { return now.Add(-d - 10*time.Second).UnixMilli() }
	for _, h := range []*clusterv1.Host{
		{Name: "h1", State: clusterv1.HostState_HOST_STATE_READY, Labels: map[string]string{"rack": "r7", "site": "fra"}},
		{Name: "h2", State: clusterv1.HostState_HOST_STATE_READY, Nics: []*clusterv1.NIC{{Name: "eth0", Speed: 25e9, Mtu: 9000, NumaNode: -1, Ips: []string{"192.0.2.2/24"}}}},
		{Name: "h3", State: clusterv1.HostState_HOST_STATE_DOWN, Down: true, Message: "not heard of for 30 s"},
	} {
		h.Id, h.Address, h.Version, h.Protocol = "id-"+h.GetName(), h.GetName()+":7480", "1.2.0", 1
		h.Hypervisor, h.Cpus, h.Memory, h.JoinedUnixMs = "xen", 64, 256*gib, ago(5*24*time.Hour)
		c.Put(h)
	}
	for _, g := range []*clusterv1.GPU{
		{Id: "h1/big", Model: "NVIDIA H200", Rank: 3, Type: "gpu", Limits: &gpuctlv1.Limits{GlobalMemory: 141 * gib}},
		{Id: "h1/small", Model: "pthread", Rank: 1, Type: "cpu", Limits: &gpuctlv1.Limits{GlobalMemory: 4 * gib, ComputeUnits: 2}},
		{Id: "h2/a", Model: "NVIDIA A100", Rank: 2, Type: "gpu", Limits: &gpuctlv1.Limits{GlobalMemory: 80 * gib}, Health: clusterv1.Health_HEALTH_DEGRADED, HealthReason: "3 ECC errors"},
		{Id: "h2/evil", Model: "\x1b[31mred", Rank: 1, Type: "cpu", Limits: &gpuctlv1.Limits{GlobalMemory: gib}},
		{Id: "h3/x", Model: "NVIDIA A100", Rank: 2, Type: "gpu", Limits: &gpuctlv1.Limits{GlobalMemory: 80 * gib}},
	} {
		g.Host, g.Name = g.GetId()[:2], g.GetId()[3:]
		g.Present, g.Free, g.FreeMemory, g.Runtime, g.NumaNode = true, true, g.GetLimits().GetGlobalMemory(), "nvidia", -1
		if g.GetType() == "cpu" {
			g.Runtime = "pocl"
		}
		if g.GetHealth() == 0 {
			g.Health = clusterv1.Health_HEALTH_OK
		}
		c.Put(g)
	}
	c.Put(&clusterv1.Model{Name: "NVIDIA H200", Vendor: "NVIDIA", Rank: 3, Memory: 141 * gib, Gpus: 1, Free: 1})
	c.Put(&clusterv1.Model{Name: "NVIDIA A100", Vendor: "NVIDIA", Rank: 2, Memory: 80 * gib, Gpus: 2, Free: 2})
	c.Put(&clusterv1.Session{
		Id: "h1/3f2a", Host: "h1", Claim: "c9", Pid: 77, Command: "train\x07er", State: gpuctlv1.SessionState_SESSION_STATE_RUNNING, Gpus: []string{"h1/big"},
		Model: "NVIDIA H200", Generation: 3, StartedUnixMs: ago(3 * time.Hour),
	})
	c.Put(&clusterv1.Migration{
		Id: "m1", Verb: "upgrade", Object: "h1/3f2a", From: "h1/small", To: "h1/big", Driver: "h1", State: clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK,
		Step: "copy", Done: []string{"prepare", "freeze"}, StartedUnixMs: ago(time.Hour), StoppedNs: 12_000_000, Bytes: 64 << 20,
	})
	c.Put(&clusterv1.Reservation{Id: "r1", Owner: "m1", Gpu: "h1/big", Host: "h1", TtlMs: 30_000})
	c.Put(&clusterv1.Link{Id: "h1/h2", From: "h1", To: "h2", RttNs: 45_000, Rate: 1 << 30, Samples: 2, Moves: 1, PredictedStopNs: 12_000_000, StoppedNs: 15_000_000})
	c.AddIdentity(&clusterv1.Identity{Id: "ada", Role: clusterv1.Role_ROLE_ADMIN, CreatedUnixMs: ago(5 * 24 * time.Hour)})
	c.AddIdentity(&clusterv1.Identity{Id: "bob", Role: clusterv1.Role_ROLE_VIEWER, CreatedUnixMs: ago(3 * time.Hour)})
}

func match(pattern, text string) bool { return regexp.MustCompile(pattern).MatchString(text) }
