package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/migrate"
)

// fakeDriver is the fake of NVIDIA's driver in a VM. It has at most one card, at the address
// of the VM's.
type fakeDriver struct {
	t        *testing.T
	dir, bin string
	switches map[string]string // of a host's card: lines of the configuration
}

func newFakeDriver(t *testing.T) *fakeDriver {
	t.Helper()
	const programs = "../../test/cuda"
	if out, err := exec.Command("make", "-s", "-C", programs).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	bin, err := filepath.Abs(filepath.Join(programs, "bin"))
	if err != nil {
		t.Fatal(err)
	}
	d := &fakeDriver{t: t, dir: t.TempDir(), bin: bin, switches: map[string]string{}}
	for _, name := range []string{"dev", "cards", "procs"} {
		if err := os.Mkdir(filepath.Join(d.dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"nvidiactl", "nvidia-uvm"} {
		d.write(filepath.Join("dev", name), "")
	}
	d.has("")
	return d
}

func (d *fakeDriver) env() []string {
	return []string{"GPUCTL_FAKE_CUDA=" + d.dir, driverNodes + "=" + filepath.Join(d.dir, "dev"), "LD_LIBRARY_PATH=" + filepath.Join(d.bin, "fake")}
}

func (d *fakeDriver) write(name, text string) {
	d.t.Helper()
	tmp := filepath.Join(d.dir, name) + ".tmp"
	if err := errors.Join(os.WriteFile(tmp, []byte(text), 0o644), os.Rename(tmp, filepath.Join(d.dir, name))); err != nil {
		d.t.Fatal(err)
	}
}

// cardOf is the UUID of a host's card.
func cardOf(host string) string {
	return "GPU-00000000-0000-4000-8000-0000000000" + strings.ReplaceAll(host, "h", "0")
}

// has gives the driver a host's card, whose memory is empty; empty: none. Nobody may have the
// card open when it goes.
func (d *fakeDriver) has(host string) {
	d.t.Helper()
	node := filepath.Join(d.dir, "dev", "nvidia0")
	text := "cuda 13000\ndriver 580.159.04\n"
	if host == "" {
		const part = 32 // bytes of a part of the card's memory: pid, whether it is used, …
		out, err := os.ReadFile(filepath.Join(d.dir, "cards", "0"))
		for i := 0; err == nil && i+part <= len(out); i += part {
			// What a killed process had is free, which the fake finds when it is used next.
			if pid := int(binary.LittleEndian.Uint32(out[i:])); binary.LittleEndian.Uint32(out[i+4:]) != 0 && syscall.Kill(pid, 0) == nil {
				d.t.Errorf("the card goes, and process %d has memory on it", pid)
			}
		}
		_ = os.Remove(filepath.Join(d.dir, "cards", "0"))
		_ = os.Remove(node)
	} else {
		text += fmt.Sprintf("gpu %s 11111234 0000:00:05.0 256\n%s", cardOf(host), d.switches[host])
		if err := errors.Join(os.WriteFile(node, nil, 0o666), os.Truncate(node, 256<<20)); err != nil {
			d.t.Fatal(err)
		}
	}
	d.write("config", text)
}

// loop is a CUDA program.
type loop struct {
	cmd *exec.Cmd
	in  io.Closer
	out testkit.Log
}

func (d *fakeDriver) start(args ...string) *loop {
	d.t.Helper()
	l := &loop{cmd: exec.Command(filepath.Join(d.bin, "cudaloop"), append([]string{"--mib", "8", "--pause", "5000", "--say", "10"}, args...)...)}
	l.cmd.Env = append(os.Environ(), d.env()...)
	l.cmd.Stdout, l.cmd.Stderr = &l.out, &l.out
	in, err := l.cmd.StdinPipe()
	if err == nil {
		l.in = in
		err = l.cmd.Start()
	}
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() {
		_ = l.cmd.Process.Kill()
		if d.t.Failed() {
			d.t.Log(l.out.String())
		}
	})
	return l
}

// more waits until the program has done more rounds.
func (l *loop) more(t *testing.T) {
	t.Helper()
	count := func() int { return strings.Count(l.out.String(), "round ") }
	before := count()
	testkit.Until(t, "the CUDA program computes", func() error { return testkit.Want(count() > before+1, count()) })
}

// finishes ends the program, and checks its result.
func (l *loop) finishes(t *testing.T) {
	t.Helper()
	l.in.Close()
	if err := l.cmd.Wait(); err != nil || !strings.Contains(l.out.String(), "\nok ") {
		t.Errorf("%v: %s", err, l.out.String())
	}
}

// rehearses has the CUDA programs of the VM rehearse on a host; they are of one session.
func (h *awayHost) rehearses(t *testing.T, ctx context.Context, session string) {
	t.Helper()
	results := 0
	err := h.Rehearse(ctx, awayUUID, "web", time.Minute, func(u *gpuctlv1.OperationUpdate) error {
		if r := u.GetProgress().GetResult(); r != nil {
			results++
			if u.GetSession() != session || !r.GetRehearsed() || r.GetError() != "" || r.GetStoppedNs() <= 0 {
				t.Errorf("%v", u)
			}
		}
		return nil
	})
	if err != nil || results != 1 {
		t.Fatalf("%d sessions are rehearsed, %v", results, err)
	}
}

// travels runs a migration of the VM. before may have steps fail. If dies, its driver dies before the
// new card is attached, and the next one goes on with what the record says.
func (m *movedVM) travels(t *testing.T, record *clusterv1.Migration, before func(step string) error, dies bool) (*clusterv1.Migration, error) {
	t.Helper()
	ctx, kill := context.WithCancel(m.ctx())
	defer kill()
	runner := func(before func(step string) error) *migrate.Runner {
		return migrate.New(migrate.Config{
			Sites: m, Claims: m, Journal: m, Log: slog.New(slog.DiscardHandler), Patience: time.Second,
			Before: func(step string, undo bool) error {
				if before == nil || undo {
					return nil
				}
				return before(step)
			},
		})
	}
	if !dies {
		return runner(before).Run(ctx, proto.CloneOf(record))
	}
	if out, err := runner(func(step string) error {
		if step == migrate.StepAttach {
			kill()
		}
		return ctx.Err()
	}).Run(ctx, proto.CloneOf(record)); !errors.Is(err, context.Canceled) {
		t.Fatalf("the driver did not die: %v, %v", err, out)
	}
	return runner(nil).Run(m.ctx(), proto.CloneOf(m.record))
}

// A VM with an OpenCL and a CUDA program is migrated: first with one failure after another, after
// each of which both go on with the old card, then to another host with another card of the
// same chip, by two drivers of which the first dies. Both programs compute the right result.
func TestVMMovesWithACUDAProgram(t *testing.T) {
	d := newFakeDriver(t)
	v := newVM(t, func(v *testVM) {
		v.env = d.env()
		v.tree.Write("proc/meminfo", "MemTotal: 4194304 kB\nMemAvailable: 4194304 kB\n")
		v.write(filepath.Join(v.dir, "profiles", "cuda.yaml"), "version: 1\nprofiles: [{name: cuda, match: ['1234:1111'], libraries: ["+oclgrind+"], device: order, cuda: true}]\n")
	})
	opencl := v.streamOf(16)
	d.has("h1")
	v.plug(0x1234, 0x1111, 0x038000)
	if g := v.await(0x1234, 0x1111).GetTarget(); len(g.GetDriver()) != 1 || g.GetDriver()[0].GetUuid() != cardOf("h1") || g.GetRuntime() == nil {
		t.Fatalf("%v", g)
	}
	cuda := d.start()
	cuda.more(t)
	opencl.more(1)
	byEngine := map[string]*gpuctlv1.Session{}
	testkit.Until(t, "both are sessions", func() error {
		res, err := v.guest.ListSessions(v.ctx(), connect.NewRequest(&gpuctlv1.ListSessionsRequest{}))
		if err != nil {
			return err
		}
		for _, s := range res.Msg.GetSessions() {
			byEngine[s.GetEngine()] = s
		}
		return testkit.Want(len(byEngine) == 2, byEngine)
	})
	v.host.Close() // from now on the connection is the hosts'
	a, b := newHosts(t, v, map[string]oneCard{"h1": {vendor: 0x1234, device: 0x1111}, "h2": {vendor: 0x1234, device: 0x1111}})
	a.rehearses(t, v.ctx(), byEngine["driver"].GetId())
	cuda.more(t)
	world := &movedVM{testVM: v, at: "h1", hosts: map[string]*awayHost{"h1": a, "h2": b}, plugged: true, card: d.has}
	broken := func(at string) func(string) error {
		return func(step string) error {
			if step == at {
				return errors.New("broken")
			}
			return nil
		}
	}
	const back, done = clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK, clusterv1.MigrationState_MIGRATION_STATE_DONE
	record := &clusterv1.Migration{
		Id: awayMigration, Verb: "migrate", Driver: "h1", State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
		Machine: &clusterv1.MachineMove{Uuid: awayUUID, Name: "web", FromHost: "h1", ToHost: "h2", FromGpu: "h1/a", ToGpu: "h2/a"},
	}
	var managed *loop
	for _, c := range []struct {
		name   string
		begin  func()
		before func(step string) error
		at     string
		state  clusterv1.MigrationState
		says   string
	}{
		{"the card is not released", nil, broken(migrate.StepRelease), "h1", back, "broken"},
		{"it is not thawed", nil, broken(migrate.StepThaw), "h1", back, "broken"},
		{"managed memory, of a second program of the same launcher", func() { managed = d.start("--managed"); managed.more(t) }, nil, "h1", back, "CUDA_ERROR_NOT_SUPPORTED"},
		{"the destination's card does not bear a canary", func() {
			managed.finishes(t)
			d.switches["h2"] = "fail checkpoint - 999\n"
		}, nil, "h1", back, "a test process did not bear"},
		{"the driver dies", func() { delete(d.switches, "h2") }, nil, "h2", done, ""},
	} {
		if c.begin != nil {
			c.begin()
		}
		m, err := world.travels(t, record, c.before, c.state == done)
		if err != nil || m.GetState() != c.state || world.at != c.at || !strings.Contains(m.GetMessage(), c.says) {
			t.Fatalf("%s: %v, %v on %s: %s", c.name, err, m.GetState(), world.at, m.GetMessage())
		}
		if got := world.hosts[c.at].running(t, v.ctx()); len(got) != 2 {
			t.Fatalf("%s: %v run", c.name, got)
		}
		cuda.more(t)
		opencl.more(1)
	}
	cuda.finishes(t)
	opencl.verify()
	if b, err := os.ReadFile(filepath.Join(d.dir, "violations")); err == nil {
		t.Errorf("the driver's rules were broken: %s", b)
	}
}
