package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/remote"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/test/chaos"
	"github.com/gpuctl/gpuctl/test/hostile"
	"github.com/gpuctl/gpuctl/test/rig"
)

// What the part hostile allows. Memory is of one daemon.
const (
	memoryMost   = 256.0 // MiB more than before, at any time
	memoryAfter  = 96.0  // MiB more than before, when the hostile have gone
	memoryGrowth = 48.0  // MiB that the last quarter's most may be above the second's
	filesAfter   = 32.0  // descriptors more than before, when the hostile have gone
	answerIn     = 10 * time.Second
	recovery     = 3 * time.Minute // for what the hostile left to be given up
)

// strangers marks the executors of hostile applications.
const strangers = "GPUCTL_BENCH_STRANGER"

const hostileConfig = `version: 1
discover: false
cluster: {host: node1, listen: "%s"}
access: {operatorGroups: [nogroup], others: viewer}
gpus:
  - {id: calls, runtime: pocl, env: {POCL_DEVICES: basic, POCL_MEMORY_LIMIT: "1"}, model: Small}
  - {id: small, runtime: pocl, env: {POCL_DEVICES: basic, POCL_MEMORY_LIMIT: "2"}, model: Small}
  - {id: large, runtime: pocl, env: {POCL_DEVICES: basic, POCL_MEMORY_LIMIT: "4"}, model: Large}
  - {id: new, runtime: pocl, env: {POCL_DEVICES: basic, POCL_MEMORY_LIMIT: "3"}, model: Small}
  - {id: bad, runtime: pocl, env: {POCL_DEVICES: basic basic basic basic, POCL_MEMORY_LIMIT: "1", ` + strangers + `: "1"}, model: Small}
models:
  - {name: Large, rank: 2}
  - {name: Small, rank: 1}
`

// soak is one run of the part hostile.
type soak struct {
	*bench
	host    *clusterHost
	rig     *rig.Rig
	address string
	local   gpuctlv1connect.HostServiceClient
	group   *hostile.Group // of the hostile and their executors

	mu     sync.Mutex
	took   map[string][]float64 // ms, of honest clients, in this phase
	failed []string             // what an honest client was refused
}

// hostile has honest clients at work, first alone and then beside hostile ones,
// and judges what the honest get.
func (b *bench) hostile(ctx context.Context) (err error) {
	s := &soak{bench: b, group: hostile.NewGroup(), took: map[string][]float64{}}
	defer func() { err = errors.Join(err, s.group.Close()) }()
	if err := s.start(ctx); err != nil {
		return err
	}
	defer s.host.close()
	if !s.group.Idle() {
		fmt.Fprintln(b.out, "  no control group for processors: calls wait for hostile clients that have one")
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w; hostd: %s", err, hostLog(s.host))
		}
	}()
	ask, endCalls, err := s.latency(ctx)
	if err != nil {
		return err
	}
	honest, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	endModel, err := s.model(honest, &wg)
	if err != nil {
		return err
	}
	if err := s.clients(honest, &wg); err != nil {
		return err
	}
	wg.Go(func() { s.idle(honest) })
	if err := wait.For(ctx, 5*time.Second); err != nil { // caches are warm
		return err
	}

	quiet, _, err := s.phase(ctx, b.soak/5, ask)
	if err != nil {
		return err
	}
	before := s.daemons()
	target := hostile.Target{Root: b.root, Dir: s.host.dir, Address: s.address, GPUs: []string{"bad-0", "bad-1", "bad-2", "bad-3"}}
	loud, seen, done, err := s.beside(ctx, b.soak, ask, target)
	if err != nil {
		return err
	}
	after := s.recovered(ctx, before)
	// The hostile are on the same processors as the honest. What that does by
	// itself shows beside neighbours who compute as much and attack nothing.
	target.Compute = loud.clients
	near, _, _, err := s.beside(ctx, b.soak/5, ask, target)
	if err != nil {
		return err
	}
	stop()
	wg.Wait()
	err = errors.Join(endCalls(), endModel())

	idle := 0
	for _, name := range slices.Sorted(maps.Keys(done)) {
		fmt.Fprintf(b.out, "  %s: %d times\n", name, done[name])
		if done[name] == 0 {
			idle++
		}
	}
	b.report.add("hostile clients that could do nothing", "of "+strconv.Itoa(len(done)), 0, float64(idle), "0", func() bool { return idle == 0 })
	s.judge(quiet, near, loud, before, after, seen)
	return err
}

// beside watches for a time while clients are at work, and says how often each
// of them did what it does.
func (s *soak) beside(ctx context.Context, d time.Duration, ask func() (calls, error), t hostile.Target) (h honest, seen []usage, done map[string]int64, err error) {
	clients, err := hostile.Start(s.group, t, s.against...)
	if err != nil {
		_, _ = clients.Stop()
		return h, nil, nil, err
	}
	begin := time.Now()
	h, seen, err = s.phase(ctx, d, ask)
	h.clients = clients.Processor()
	for name := range h.clients {
		h.clients[name] /= time.Since(begin).Seconds()
	}
	done, stopped := clients.Stop()
	return h, seen, done, errors.Join(err, stopped)
}

func (s *soak) start(ctx context.Context) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.address = l.Addr().String()
	_ = l.Close()
	dir := filepath.Join(s.tmp, "s")
	if s.host, err = newClusterHost(filepath.Join(s.root, "bin", "hostd"), dir, 0); err != nil {
		return err
	}
	if err := rig.Passable(dir); err != nil {
		return err
	}
	if err := os.WriteFile(s.host.path("hostd.yaml"), fmt.Appendf(nil, hostileConfig, s.address), 0o600); err != nil {
		return err
	}
	if err := s.host.start(ctx); err != nil {
		return err
	}
	s.rig = &rig.Rig{Root: s.root, Dir: dir}
	s.local = gpuctlv1connect.NewHostServiceClient(unixrpc.Client(s.host.path("hostd.sock")), "http://hostd")
	if _, err := s.host.client.Init(ctx, connect.NewRequest(&clusterv1.InitRequest{})); err != nil {
		s.host.close()
		return fmt.Errorf("init: %w", err)
	}
	return nil
}

func hostLog(h *clusterHost) string {
	text, _ := os.ReadFile(h.log)
	return tail(text)
}

// calls is what test/cl/latency prints.
type calls struct {
	Calls          float64
	P50, P99, Most float64 // µs
}

// latency starts an application whose calls are measured. ask returns the
// figures since it was last called.
func (s *soak) latency(ctx context.Context) (ask func() (calls, error), end func() error, err error) {
	cmd := s.rig.Command(ctx, "calls", s.rig.Program("latency"))
	stdin, lines, errs, err := piped(cmd)
	if err != nil {
		return nil, nil, err
	}
	ask = func() (c calls, err error) {
		if _, err := io.WriteString(stdin, "\n"); err != nil {
			return c, fmt.Errorf("latency: %w", err)
		}
		line, err := lines.ReadBytes('\n')
		if err == nil {
			err = json.Unmarshal(line, &c)
		}
		if err != nil {
			_ = cmd.Process.Kill()
			return c, fmt.Errorf("latency: %w: %s", errors.Join(err, cmd.Wait()), errs.String())
		}
		return c, nil
	}
	end = func() error {
		_ = stdin.Close()
		text, _ := io.ReadAll(lines)
		if err := cmd.Wait(); err != nil || !bytes.Contains(text, []byte("right ")) {
			return fmt.Errorf("latency: %w: %s", err, errs.String())
		}
		return nil
	}
	return ask, end, nil
}

// model starts a program that checks all it reads, and swaps it to and fro.
func (s *soak) model(ctx context.Context, wg *sync.WaitGroup) (end func() error, err error) {
	cmd := s.rig.Command(context.WithoutCancel(ctx), "small", s.rig.Program("model"), "--kib", "1024", "--no-images")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	id, err := s.session(ctx, "small")
	if err != nil {
		_ = cmd.Process.Kill()
		return nil, errors.Join(err, cmd.Wait())
	}
	wg.Go(func() {
		for to, other := "large", "small"; ctx.Err() == nil; to, other = other, to {
			s.try(ctx, "swaps", time.Minute, func(ctx context.Context) error {
				r, err := s.rig.Operate(ctx, "migrate", id, "--to", to)
				switch {
				case err != nil:
					return err
				case r.Error != "" || r.Refused || r.RolledBack:
					return fmt.Errorf("to %s: %+v", to, r)
				}
				return nil
			})
			_ = wait.For(ctx, time.Second)
		}
	})
	return func() error {
		_ = stdin.Close()
		late := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
		defer late.Stop()
		err := cmd.Wait()
		if wrong := chaos.Wrong(out.String()); err != nil || len(wrong) > 0 {
			return fmt.Errorf("model: %w: %s", errors.Join(err, errors.New(strings.Join(wrong, "; "))), ending(out.String(), 1000))
		}
		return nil
	}, nil
}

// session waits for the one on a GPU.
func (s *soak) session(ctx context.Context, gpu string) (string, error) {
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		res, err := s.local.ListSessions(ctx, connect.NewRequest(&gpuctlv1.HostListSessionsRequest{}))
		if err != nil {
			return "", err
		}
		for _, session := range res.Msg.GetSessions() {
			if session.GetTarget().GetGpu() == gpu {
				return session.GetId(), nil
			}
		}
		if err := wait.For(ctx, 100*time.Millisecond); err != nil {
			return "", err
		}
	}
	return "", fmt.Errorf("no session on %s after a minute", gpu)
}

// clients starts the honest who ask hostd, and start short programs.
func (s *soak) clients(ctx context.Context, wg *sync.WaitGroup) error {
	home := s.host.path("home")
	user, err := remote.NewUser(func(name string) string {
		return map[string]string{"HOME": home, "XDG_CONFIG_HOME": home}[name]
	})
	if err != nil {
		return err
	}
	token, err := s.host.client.CreateToken(ctx, connect.NewRequest(&clusterv1.CreateTokenRequest{Role: clusterv1.Role_ROLE_VIEWER, Name: "honest"}))
	if err != nil {
		return fmt.Errorf("token: %w", err)
	}
	if _, err := user.Login(ctx, token.Msg.GetToken(), "soak"); err != nil {
		return fmt.Errorf("login: %w", err)
	}
	overTLS, url, err := user.Client("soak")
	if err != nil {
		return err
	}
	cluster := clusterv1connect.NewClusterServiceClient(overTLS, url)
	program := []string{s.rig.Program("stream"), "--iterations", "30", "--kib", "256", "--buffers", "2"}
	env, err := rig.Native(s.tmp, rig.Basic)
	if err != nil {
		return err
	}
	native := exec.CommandContext(ctx, program[0], program[1:]...)
	native.Env = append(os.Environ(), env...)
	want, err := output(native)
	if err != nil {
		return fmt.Errorf("natively: %w", err)
	}
	for _, c := range []struct {
		name         string
		every, limit time.Duration
		f            func(context.Context) error
	}{
		{"local calls", 100 * time.Millisecond, answerIn, func(ctx context.Context) error {
			h := unixrpc.Client(s.host.path("hostd.sock"))
			defer h.CloseIdleConnections()
			res, err := gpuctlv1connect.NewHostServiceClient(h, "http://hostd").GetInventory(ctx, connect.NewRequest(&gpuctlv1.GetInventoryRequest{}))
			if err == nil && len(res.Msg.GetGpus()) != 8 {
				err = fmt.Errorf("%d GPUs", len(res.Msg.GetGpus()))
			}
			return err
		}},
		{"TLS calls", 250 * time.Millisecond, answerIn, func(ctx context.Context) error {
			defer overTLS.CloseIdleConnections() // the next one shakes hands, too
			res, err := cluster.List(ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_HOST}))
			if err == nil && len(res.Msg.GetObjects()) != 1 {
				err = fmt.Errorf("%d hosts", len(res.Msg.GetObjects()))
			}
			return err
		}},
		{"new sessions", 2 * time.Second, time.Minute, func(ctx context.Context) error {
			got, err := output(s.rig.Command(ctx, "new", program...))
			if err == nil && !bytes.Equal(got, want) {
				err = fmt.Errorf("WRONG RESULT: %q and not %q", got, want)
			}
			return err
		}},
	} {
		wg.Go(func() {
			for ctx.Err() == nil {
				s.try(ctx, c.name, c.limit, c.f)
				_ = wait.For(ctx, c.every)
			}
		})
	}
	return nil
}

// try counts how long an honest client waits, and what fails.
func (s *soak) try(ctx context.Context, name string, limit time.Duration, f func(context.Context) error) {
	inner, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	begin := time.Now()
	err := f(inner)
	if ctx.Err() != nil {
		return // it is all over
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.took[name] = append(s.took[name], float64(time.Since(begin).Microseconds())/1e3)
	if err != nil {
		s.failed = append(s.failed, fmt.Sprintf("%s: %v", name, err))
		fmt.Fprintf(s.out, "  FAILED, %s: %v\n", name, err)
	}
}

// honest is what honest clients got in a phase.
type honest struct {
	calls
	took    map[string][]float64
	failed  []string
	daemons [2]float64         // seconds of a processor each second
	clients map[string]float64 // the same, of the hostile at each boundary
}

// phase watches for a time.
func (s *soak) phase(ctx context.Context, d time.Duration, ask func() (calls, error)) (h honest, seen []usage, err error) {
	if _, err := ask(); err != nil {
		return h, nil, err
	}
	s.mu.Lock()
	s.took, s.failed = map[string][]float64{}, nil
	s.mu.Unlock()
	begin, before := time.Now(), s.daemons()
	for end := begin.Add(d); time.Now().Before(end); {
		if err := wait.For(ctx, min(500*time.Millisecond, time.Until(end))); err != nil {
			return h, nil, err
		}
		seen = append(seen, s.daemons())
	}
	after := s.daemons()
	for i := range h.daemons {
		h.daemons[i] = (after.processor[i] - before.processor[i]) / time.Since(begin).Seconds()
	}
	if h.calls, err = ask(); err != nil {
		return h, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	h.took, h.failed = s.took, s.failed
	s.took, s.failed = map[string][]float64{}, nil
	return h, seen, nil
}

// usage is what the daemons have: MiB, descriptors, and seconds of a processor so
// far, of hostd and gpuguest.
type usage struct{ memory, files, processor [2]float64 }

var daemonNames = [2]string{"hostd", "gpuguest"}

func (s *soak) daemons() (u usage) {
	pids := [2]int{s.host.cmd.Process.Pid, s.guest()}
	for i, pid := range pids {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if f := strings.Fields(string(text)); len(f) > 1 {
			pages, _ := strconv.ParseFloat(f[1], 64)
			u.memory[i] = pages * float64(os.Getpagesize()) / (1 << 20)
		}
		u.processor[i] = processor(pid)
		files, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		u.files[i] = float64(len(files))
	}
	return u
}

// processor is how many seconds of a processor a process has had, without its children.
func processor(pid int) (seconds float64) {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	// After the name, ticks of 10 ms: as user, as system.
	if f := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:])); len(f) > 12 {
		for _, ticks := range f[11:13] {
			n, _ := strconv.ParseFloat(ticks, 64)
			seconds += n / 100
		}
	}
	return seconds
}

func (s *soak) guest() int {
	peer, err := unixrpc.PeerOf(s.host.path("guest.sock"))
	if err != nil {
		return 0
	}
	return int(peer.PID)
}

// recovered waits for what the hostile left to be given up.
func (s *soak) recovered(ctx context.Context, before usage) (u usage) {
	for end := time.Now().Add(recovery); ; {
		u = s.daemons()
		ok := true
		for i := range daemonNames {
			ok = ok && u.memory[i] <= before.memory[i]+memoryAfter && u.files[i] <= before.files[i]+filesAfter
		}
		if ok || time.Now().After(end) || wait.For(ctx, time.Second) != nil {
			return u
		}
	}
}

// idle has the executors of hostile applications get processors that nobody else
// wants, as the hostile do: on a card their kernels would not be on processors.
func (s *soak) idle(ctx context.Context) {
	guest := strconv.Itoa(s.guest())
	done := map[int]bool{}
	for ; ctx.Err() == nil; _ = wait.For(ctx, 20*time.Millisecond) {
		lists, _ := filepath.Glob("/proc/" + guest + "/task/*/children")
		for _, list := range lists {
			text, _ := os.ReadFile(list)
			for _, f := range strings.Fields(string(text)) {
				pid, _ := strconv.Atoi(f)
				if done[pid] {
					continue
				}
				env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
				if !bytes.Contains(env, []byte(strangers)) {
					continue
				}
				done[pid] = true
				_ = s.group.Take(pid) // or it has ended
			}
		}
	}
}

// judge makes the figures. The target of a call is to its neighbours: how long it
// waits for a processor that another user's program has is the kernel's to say.
func (s *soak) judge(quiet, near, loud honest, before, after usage, seen []usage) {
	add := s.report.add
	add("call of a session, p50, undisturbed and beside the hostile", "µs", quiet.P50, loud.P50, "", nil)
	add("call of a session, p99, undisturbed and beside neighbours", "µs", quiet.P99, near.P99, "", nil)
	add("call of a session, p99, undisturbed and beside the hostile", "µs", quiet.P99, loud.P99, "", nil)
	add("call of a session, p99, beside neighbours and beside the hostile", "µs", near.P99, loud.P99, "2 x", func() bool { return loud.P99 <= 2*near.P99 })
	add("call of a session, longest", "µs", quiet.Most, loud.Most, "", nil)
	for i, name := range daemonNames {
		add("processor of "+name+", undisturbed and beside the hostile", "s/s", quiet.daemons[i], loud.daemons[i], "", nil)
	}
	for _, name := range slices.Sorted(maps.Keys(loud.clients)) {
		add("processor of the hostile: "+name+", as neighbours and as they are", "s/s", near.clients[name], loud.clients[name], "", nil)
	}
	for _, name := range []string{"local calls", "TLS calls", "swaps", "new sessions"} {
		failed := 0
		for _, f := range slices.Concat(quiet.failed, loud.failed, near.failed) {
			if strings.HasPrefix(f, name+": ") {
				failed++
			}
		}
		n := len(loud.took[name])
		add(fmt.Sprintf("%s refused, late or wrong, of %d", name, n), "", 0, float64(failed), "0 of >0", func() bool { return failed == 0 && n > 0 })
		if len(quiet.took[name]) > 0 && n > 0 {
			add(name+", p99", "ms", quantile(quiet.took[name], 0.99), quantile(loud.took[name], 0.99), "", nil)
		}
	}
	for i, name := range daemonNames {
		most := func(from, to int) (m float64) {
			for _, u := range seen[len(seen)*from/4 : len(seen)*to/4] {
				m = max(m, u.memory[i])
			}
			return m
		}
		add("memory of "+name+", before", "MiB", 0, before.memory[i], "", nil)
		add("memory of "+name+", most", "MiB", 0, most(0, 4), fmt.Sprintf("before + %.0f", memoryMost), func() bool { return most(0, 4) <= before.memory[i]+memoryMost })
		add("memory of "+name+", most in the second and the last quarter", "MiB", most(1, 2), most(3, 4), fmt.Sprintf("+ %.0f", memoryGrowth),
			func() bool { return most(3, 4) <= most(1, 2)+memoryGrowth })
		add("memory of "+name+", after", "MiB", 0, after.memory[i], fmt.Sprintf("before + %.0f", memoryAfter), func() bool { return after.memory[i] <= before.memory[i]+memoryAfter })
		add("descriptors of "+name+", before and after", "", before.files[i], after.files[i], fmt.Sprintf("+ %.0f", filesAfter), func() bool { return after.files[i] <= before.files[i]+filesAfter })
	}
}
