package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/internal/wait"
)

const (
	members      = 3
	memberPort   = 7661 // and each second one that follows: a host lends at the next port
	memberGPUs   = 100  // of two runtimes: hostd takes no note of more than 64 of one
	claimRounds  = 12
	claimsARound = 50
	leaderKills  = 10
	restTime     = 30 * time.Second // before and while hosts at rest are watched
	settled      = 90 * time.Second // for members to be as they should be
)

// process is a program that serves until its standard input, or it, is ended.
type process struct {
	name, log string
	cmd       *exec.Cmd
	ended     chan error
}

func startProcess(log, name string, args ...string) (*process, io.Closer, error) {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	p := &process{name: filepath.Base(name), log: log, cmd: exec.Command(name, args...), ended: make(chan error, 1)}
	p.cmd.Stdout, p.cmd.Stderr = f, f
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, nil, err
	}
	go func() { p.ended <- p.cmd.Wait() }()
	return p, stdin, nil
}

// await returns when it is ready.
func (p *process) await(ctx context.Context, patience time.Duration, ready func() bool) error {
	for end := time.Now().Add(patience); !ready(); {
		select {
		case err := <-p.ended:
			text, _ := os.ReadFile(p.log)
			p.ended <- err
			return fmt.Errorf("%s ended (%w): %s", p.name, errors.Join(err), tail(text))
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(end) {
			text, _ := os.ReadFile(p.log)
			return fmt.Errorf("%s is not ready after %v: %s", p.name, patience, tail(text))
		}
	}
	return nil
}

func (p *process) end(s syscall.Signal) {
	_ = p.cmd.Process.Signal(s)
	select {
	case <-p.ended:
	case <-time.After(15 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

func tail(text []byte) string {
	const most = 2000
	return strings.TrimSpace(string(text[max(0, len(text)-most):]))
}

// clusterHost is a hostd of its own on this machine.
type clusterHost struct {
	name, dir, hostd string
	client           clusterv1connect.ClusterServiceClient
	*process
	stdin io.Closer // its end is hostd's and gpuguest's
}

// memberConfig declares many GPUs that cost next to nothing.
func memberConfig(name string, port int) []byte {
	basic := strings.TrimSpace(strings.Repeat("basic ", memberGPUs/2))
	c := fmt.Sprintf("version: 1\ndiscover: false\ncluster: {host: %s, listen: \"127.0.0.1:%d\"}\ngpus:\n", name, port)
	for _, id := range []string{"a", "b"} {
		c += fmt.Sprintf("  - {id: %s, runtime: pocl, env: {POCL_DEVICES: %q, POCL_MEMORY_LIMIT: \"1\"}, model: Small 1 GiB}\n", id, basic)
	}
	return []byte(c)
}

func newClusterHost(hostd, dir string, i int) (*clusterHost, error) {
	h := &clusterHost{name: fmt.Sprint("node", i+1), dir: dir, hostd: hostd}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, err
	}
	h.client = clusterv1connect.NewClusterServiceClient(unixrpc.Client(h.path("hostd.sock")), "http://hostd")
	return h, os.WriteFile(h.path("hostd.yaml"), memberConfig(h.name, memberPort+2*i), 0o600)
}

func (h *clusterHost) path(name string) string { return filepath.Join(h.dir, name) }

func (h *clusterHost) start(ctx context.Context) (err error) {
	h.process, h.stdin, err = startProcess(h.path("hostd.log"), h.hostd,
		"--private", "--config", h.path("hostd.yaml"), "--rundir", h.dir, "--data-dir", h.path("data"))
	if err != nil {
		return err
	}
	return h.await(ctx, 30*time.Second, func() bool { return rundir.Answers(h.path("hostd.sock")) })
}

// close ends hostd and gpuguest.
func (h *clusterHost) close() {
	if h.process == nil {
		return
	}
	_ = h.stdin.Close()
	h.end(syscall.SIGTERM)
	if peer, err := unixrpc.PeerOf(h.path("guest.sock")); err == nil { // hostd had been killed
		_ = syscall.Kill(int(peer.PID), syscall.SIGTERM)
	}
}

func (h *clusterHost) status(ctx context.Context) (*clusterv1.StatusResponse, error) {
	res, err := h.client.Status(ctx, connect.NewRequest(&clusterv1.StatusRequest{}))
	if err != nil {
		return nil, fmt.Errorf("status of %s: %w", h.name, err)
	}
	return res.Msg, nil
}

// claim makes one and says how long it took until it was bound.
func (h *clusterHost) claim(ctx context.Context, c *clusterv1.Claim) (*clusterv1.CreateClaimResponse, time.Duration, error) {
	begin := time.Now()
	res, err := h.client.CreateClaim(ctx, connect.NewRequest(&clusterv1.CreateClaimRequest{Claim: c}))
	took := time.Since(begin)
	if err != nil {
		return nil, took, fmt.Errorf("claim %s through %s: %w", c.GetId(), h.name, err)
	}
	if len(res.Msg.GetAssignments()) != 1 {
		return nil, took, fmt.Errorf("claim %s through %s: not bound: %v", c.GetId(), h.name, res.Msg)
	}
	return res.Msg, took, nil
}

// benchCluster is three of them.
type benchCluster struct{ hosts []*clusterHost }

func (b *bench) startCluster(ctx context.Context, dir string) (*benchCluster, error) {
	c := &benchCluster{}
	for i := range members {
		h, err := newClusterHost(filepath.Join(b.root, "bin", "hostd"), filepath.Join(dir, fmt.Sprint("h", i+1)), i)
		if err != nil {
			return c, err
		}
		c.hosts = append(c.hosts, h)
		if err := h.start(ctx); err != nil {
			return c, err
		}
	}
	first := c.hosts[0]
	if _, err := first.client.Init(ctx, connect.NewRequest(&clusterv1.InitRequest{})); err != nil {
		return c, fmt.Errorf("init: %w", err)
	}
	for _, h := range c.hosts[1:] {
		token, err := first.client.CreateToken(ctx, connect.NewRequest(&clusterv1.CreateTokenRequest{Role: clusterv1.Role_ROLE_HOST, Name: h.name}))
		if err != nil {
			return c, fmt.Errorf("token for %s: %w", h.name, err)
		}
		if _, err := h.client.Join(ctx, connect.NewRequest(&clusterv1.JoinRequest{Token: token.Msg.GetToken()})); err != nil {
			return c, fmt.Errorf("join of %s: %w", h.name, err)
		}
	}
	return c, c.settle(ctx)
}

func (c *benchCluster) close() {
	for _, h := range c.hosts {
		h.close()
	}
}

// leader finds it, and the others.
func (c *benchCluster) leader(ctx context.Context) (leader *clusterHost, others []*clusterHost, err error) {
	s, err := c.hosts[0].status(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, h := range c.hosts {
		if h.name == s.GetLeader() {
			leader = h
		} else {
			others = append(others, h)
		}
	}
	if leader == nil {
		return nil, nil, errors.New("the cluster has no leader")
	}
	return leader, others, nil
}

// settle waits until all vote, are healthy and have reported their GPUs.
func (c *benchCluster) settle(ctx context.Context) error {
	var last error
	for end := time.Now().Add(settled); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if last = c.whole(ctx); last == nil || ctx.Err() != nil {
			return last
		}
	}
	return fmt.Errorf("the cluster is not whole after %v: %w", settled, last)
}

func (c *benchCluster) whole(ctx context.Context) error {
	leader, _, err := c.leader(ctx)
	if err != nil {
		return err
	}
	s, err := leader.status(ctx)
	if err != nil {
		return err
	}
	healthy := 0
	for _, m := range s.GetMembers() {
		if m.GetVoter() && m.GetHealthy() {
			healthy++
		}
	}
	if healthy != members {
		return fmt.Errorf("%d healthy voters", healthy)
	}
	gpus, err := leader.client.List(ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_GPU}))
	if err != nil {
		return err
	}
	present := 0
	for _, o := range gpus.Msg.GetObjects() {
		if o.GetGpu().GetPresent() {
			present++
		}
	}
	if present != members*memberGPUs {
		return fmt.Errorf("%d GPUs are known", present)
	}
	return nil
}

// cluster measures three hosts on this machine, and etcd beside them.
func (b *bench) cluster(ctx context.Context) error {
	dir, fsys, err := b.disk()
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	fmt.Fprintf(b.out, "  native is etcd; data and logs of both are on %s; load of the machine %s\n", fsys, load())
	b.report.Disk = fsys
	c, err := b.startCluster(ctx, dir)
	defer c.close()
	if err != nil {
		return err
	}
	if err := b.atRest(ctx, c); err != nil {
		return err
	}
	if err := b.claims(ctx, c, dir); err != nil {
		return err
	}
	err = b.kills(ctx, c)
	fmt.Fprintf(b.out, "  load of the machine at the end %s\n", load())
	return err
}

// disk is a folder where fsync means something, and its file system.
func (b *bench) disk() (dir, fsys string, err error) {
	for _, parent := range []string{b.tmp, "/var/tmp"} {
		if dir, err = os.MkdirTemp(parent, "gc"); err != nil {
			continue
		}
		if err = os.Chmod(dir, 0o711); err != nil { // the users of executors pass through it
			_ = os.Remove(dir)
			continue
		}
		kind, device, mountErr := mountOf(dir)
		if mountErr == nil && kind != "tmpfs" && kind != "ramfs" {
			return dir, kind + " (" + device + ")", nil
		}
		_ = os.RemoveAll(dir)
		err = errors.Join(mountErr, fmt.Errorf("%s is on %s: fsync costs nothing there", parent, kind))
	}
	return "", "", fmt.Errorf("no disk: %w", err)
}

// mountOf is the file system that a path is on.
func mountOf(path string) (kind, device string, err error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", "", err
	}
	longest := -1
	for line := range strings.Lines(string(text)) {
		before, after, ok := strings.Cut(line, " - ")
		point, what := strings.Fields(before), strings.Fields(after)
		if !ok || len(point) < 5 || len(what) < 2 {
			continue
		}
		at := strings.TrimSuffix(point[4], "/")
		if (path == at || strings.HasPrefix(path, at+"/")) && len(at) >= longest { // the last mount covers earlier ones
			longest, kind, device = len(at), what[0], what[1]
		}
	}
	if longest < 0 {
		return "", "", fmt.Errorf("%s is on no known file system", path)
	}
	return kind, device, nil
}

func load() string {
	text, _ := os.ReadFile("/proc/loadavg")
	if f := strings.Fields(string(text)); len(f) >= 3 {
		return strings.Join(f[:3], " ")
	}
	return "unknown"
}

// atRest watches what hosts use when nothing happens.
func (b *bench) atRest(ctx context.Context, c *benchCluster) error {
	leader, others, err := c.leader(ctx)
	if err != nil {
		return err
	}
	if err := wait.For(ctx, restTime); err != nil {
		return err
	}
	hosts := append([]*clusterHost{leader}, others...)
	before := make([]time.Duration, len(hosts))
	begin := time.Now()
	for i, h := range hosts {
		if before[i], err = cpuTime(h.cmd.Process.Pid); err != nil {
			return err
		}
	}
	if err := wait.For(ctx, restTime); err != nil {
		return err
	}
	var rss, cpu []float64
	for i, h := range hosts {
		after, err := cpuTime(h.cmd.Process.Pid)
		if err != nil {
			return err
		}
		mib, err := resident(h.cmd.Process.Pid)
		if err != nil {
			return err
		}
		cpu = append(cpu, 100*(after-before[i]).Seconds()/time.Since(begin).Seconds())
		rss = append(rss, mib)
	}
	for i, who := range []string{"leader", "followers"} {
		r, p := rss[i], cpu[i]
		if i > 0 {
			r, p = slices.Max(rss[1:]), slices.Max(cpu[1:])
		}
		b.report.add(fmt.Sprintf("at rest, %d GPUs: memory (RSS), %s", memberGPUs, who), "MiB", 0, r, "60", func() bool { return r <= 60 })
		b.report.add(fmt.Sprintf("at rest, %d GPUs: share of a core, %s", memberGPUs, who), "%", 0, p, "1", func() bool { return p <= 1 })
	}
	return nil
}

// resident is VmRSS, in MiB.
func resident(pid int) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			kib, err := strconv.ParseFloat(f[1], 64)
			return kib / 1024, err
		}
	}
	return 0, fmt.Errorf("process %d: no VmRSS", pid)
}

// cpuTime of a process and its threads, so far.
func cpuTime(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	const tick = 10 * time.Millisecond // as /proc counts
	f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(f) < 13 {
		return 0, fmt.Errorf("process %d: stat is short", pid)
	}
	user, err1 := strconv.ParseInt(f[11], 10, 64)
	system, err2 := strconv.ParseInt(f[12], 10, 64)
	return time.Duration(user+system) * tick, errors.Join(err1, err2)
}

// lane is one way of writing something that is then committed.
type lane struct {
	name  string
	write func(ctx context.Context, i int) (time.Duration, error)
	ms    []float64
}

// claims measures them through the leader and through a follower, and puts of
// the same size into etcd, in turns.
func (b *bench) claims(ctx context.Context, c *benchCluster, dir string) error {
	leader, _, err := c.leader(ctx)
	if err != nil {
		return err
	}
	claim := func(id string) *clusterv1.Claim {
		return &clusterv1.Claim{Id: id, Holder: "bench", MinMemory: size.MiB, CreatedUnixMs: time.Now().UnixMilli()}
	}
	first, _, err := leader.claim(ctx, claim("first"))
	if err != nil {
		return err
	}
	// The entry in the log holds the claim and where it goes.
	a := first.GetAssignments()[0]
	entry := proto.Size(&clusterv1.Command{Actor: first.GetClaim().GetOwner(), Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
		Claim:   claim("leader-000"),
		Choices: []*clusterv1.Choice{{Gpu: a.GetGpu(), Memory: a.GetMemory(), Kind: clusterv1.VGPUKind_VGPU_KIND_SHARE}},
	}}})
	var lanes []*lane
	for _, through := range []string{"leader", "follower"} {
		lanes = append(lanes, &lane{name: through, write: func(ctx context.Context, i int) (time.Duration, error) {
			leader, others, err := c.leader(ctx)
			if err != nil {
				return 0, err
			}
			h := leader
			if through == "follower" {
				h = others[0]
			}
			_, took, err := h.claim(ctx, claim(fmt.Sprintf("%s-%03d", through, i)))
			return took, err
		}})
	}
	if e, err := startEtcd(ctx, filepath.Join(dir, "etcd")); errors.Is(err, exec.ErrNotFound) {
		fmt.Fprintln(b.out, "  etcd is not installed (Debian: etcd-server): nothing to compare with")
	} else {
		defer e.close()
		if err != nil {
			return err
		}
		for _, through := range []string{"leader", "follower"} {
			lanes = append(lanes, &lane{name: "etcd " + through, write: func(ctx context.Context, i int) (time.Duration, error) {
				key := fmt.Sprintf("%s-%03d", through, i)
				return e.put(ctx, through == "leader", key, make([]byte, max(0, entry-len(key))))
			}})
		}
	}
	from, err := leader.status(ctx)
	if err != nil {
		return err
	}
	if err := takeTurns(ctx, lanes); err != nil {
		return err
	}
	to, err := leader.status(ctx)
	if err != nil {
		return err
	}
	sync, err := syncTimes(filepath.Join(dir, "sync"), claimRounds*claimsARound, entry)
	if err != nil {
		return err
	}
	got := map[string][]float64{}
	for _, l := range lanes {
		got[l.name] = l.ms
	}
	b.claimTimes(got)
	b.report.add("entries in the log for each claim", "", 0, float64(to.GetLastIndex()-from.GetLastIndex())/(2*claimRounds*claimsARound), "", nil)
	for _, at := range []float64{0.5, 0.99} {
		b.report.add(fmt.Sprintf("write and fsync of %d B, p%.0f", entry, at*100), "ms", 0, quantile(sync, at), "", nil)
	}
	var rss float64
	for _, h := range c.hosts {
		mib, err := resident(h.cmd.Process.Pid)
		if err != nil {
			return err
		}
		rss = math.Max(rss, mib)
	}
	b.report.add(fmt.Sprintf("memory (RSS) with %d claims", 2*claimRounds*claimsARound), "MiB", 0, rss, "", nil)
	return nil
}

// claimTimes reports how long claims took, in ms, by lane.
func (b *bench) claimTimes(got map[string][]float64) {
	for _, through := range []string{"leader", "follower"} {
		ours, native := got[through], got["etcd "+through]
		for _, q := range []struct {
			name string
			at   float64
		}{{"p50", 0.5}, {"p99", 0.99}, {"max", 1}} {
			o, n := quantile(ours, q.at), 0.0
			if len(native) > 0 {
				n = quantile(native, q.at)
			}
			target, pass := "", func() bool { return o <= 10 && (n == 0 || o <= 1.5*n) }
			switch {
			case q.name != "p99":
				pass = nil
			case n == 0:
				target = "10"
			default:
				target = "10 and 1.5 x etcd"
			}
			b.report.add(fmt.Sprintf("claim to assignment through the %s, %s of %d", through, q.name, len(ours)), "ms", n, o, target, pass)
		}
	}
}

// takeTurns lets all lanes feel the machine's noise alike.
func takeTurns(ctx context.Context, lanes []*lane) error {
	for round := range claimRounds {
		for i := range lanes {
			l := lanes[(i+round)%len(lanes)]
			for n := range claimsARound {
				took, err := l.write(ctx, round*claimsARound+n)
				if err != nil {
					return err
				}
				l.ms = append(l.ms, took.Seconds()*1e3)
			}
			if err := wait.For(ctx, 100*time.Millisecond); err != nil { // hosts confirm what they got
				return err
			}
		}
	}
	return nil
}

// syncTimes appends to a file, as a log does.
func syncTimes(path string, n, length int) (ms []float64, err error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for range n {
		begin := time.Now()
		if _, err := f.Write(make([]byte, length)); err != nil {
			return nil, err
		}
		if err := f.Sync(); err != nil {
			return nil, err
		}
		ms = append(ms, time.Since(begin).Seconds()*1e3)
	}
	return ms, nil
}

// kills measures how long a cluster needs to go on without its leader.
func (b *bench) kills(ctx context.Context, c *benchCluster) error {
	var ms []float64
	for i := range leaderKills {
		if err := c.settle(ctx); err != nil {
			return err
		}
		leader, others, err := c.leader(ctx)
		if err != nil {
			return err
		}
		asked := others[i%len(others)]
		if _, err := asked.status(ctx); err != nil { // the connection is there
			return err
		}
		claim := &clusterv1.Claim{Id: fmt.Sprint("after-kill-", i), Holder: "bench", MinMemory: size.MiB, Host: asked.name}
		begin := time.Now()
		if err := leader.cmd.Process.Kill(); err != nil {
			return fmt.Errorf("kill %s: %w", leader.name, err)
		}
		for {
			call, cancel := context.WithTimeout(ctx, 10*time.Second)
			_, _, err = asked.claim(call, claim)
			cancel()
			if err == nil || ctx.Err() != nil || time.Since(begin) > 30*time.Second {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
		if err != nil {
			return fmt.Errorf("kill %d, of %s: %w", i+1, leader.name, err)
		}
		ms = append(ms, time.Since(begin).Seconds()*1e3)
		<-leader.ended
		if err := leader.start(ctx); err != nil {
			return err
		}
	}
	b.report.add(fmt.Sprintf("leader killed, to the next assignment, p50 of %d", len(ms)), "ms", 0, median(ms), "", nil)
	worst := slices.Max(ms)
	b.report.add(fmt.Sprintf("leader killed, to the next assignment, max of %d", len(ms)), "ms", 0, worst, "1500", func() bool { return worst <= 1500 })
	return nil
}
