package cli_test

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cli/clitest"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// TestMachineScripts runs gpuctl against a fake cluster with VMs and cards, one
// for each script.
func TestMachineScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/machines", UpdateScripts: os.Getenv("UPDATE") != "", ContinueOnError: true,
		Setup: func(e *testscript.Env) error {
			dir, err := os.MkdirTemp("", "gx") // a socket's path must be short
			if err != nil {
				return err
			}
			e.Defer(func() { _ = os.RemoveAll(dir) })
			socket := filepath.Join(dir, "h.sock")
			c := clitest.New(compile)
			m, s := clitest.NewMachines(c, "h1"), &clitest.Sessions{}
			e.Defer(m.Close)
			furnish(c, m)
			mux := http.NewServeMux()
			mux.Handle("/", c.Handler())
			m.Handle(mux)
			s.Handle(mux)
			stop, err := serve(mux, socket)
			if err != nil {
				return err
			}
			e.Defer(stop)
			e.Values["cluster"], e.Values["machines"], e.Values["sessions"] = c, m, s
			e.Setenv("XDG_RUNTIME_DIR", dir)
			e.Setenv("GPUCTL_HOST", "unix://"+socket)
			e.Setenv("NO_COLOR", "1")
			e.Setenv("GORACE", "atexit_sleep_ms=0") // else a second for every command
			e.Setenv("TZ", "UTC")
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"cluster": control, "machines": controlMachines, "session": addSession, "until": until, "sleep": nap,
		},
	})
}

// controlMachines brings about what no command of gpuctl can.
func controlMachines(ts *testscript.TestScript, _ bool, args []string) {
	m, ok := ts.Value("machines").(*clitest.Machines)
	if !ok || len(args) < 2 {
		ts.Fatalf("usage: machines fail|stick STEP MESSAGE, machines lose SESSION REASON, machines pause|go STEP, machines most N, machines mute HOST, machines care GPU")
	}
	switch args[0] {
	case "fail":
		m.FailAt(args[1], args[2])
	case "stick":
		m.StickAt(args[1], args[2])
	case "lose":
		m.Lose(args[1], args[2])
	case "pause":
		m.PauseAt(args[1])
	case "go":
		m.Go(args[1])
	case "most":
		n, err := strconv.Atoi(args[1])
		ts.Check(err)
		m.Most(n)
	case "mute":
		m.Mute(args[1])
	case "cuda":
		if len(args) != 5 {
			ts.Fatalf("usage: machines cuda VM SESSION REFUSES FAILS")
		}
		m.Compute(args[1], args[2], args[3], args[4])
	case "care":
		m.Judge(args[1], &gpuctlv1.IsolationResponse{
			Gpu: args[1], Verdict: "care", Summary: "its group has more in it", Source: "xen", Together: []string{"0000:65:00.0", "0000:65:00.1"},
			Findings: []*gpuctlv1.IsolationFinding{
				{Code: "group", Severity: "care", Message: "it shares a group with 0000:65:00.1", Advice: "give both away"},
				{Code: "note", Severity: "note", Message: "evil \x1b[31m name"},
			},
		})
	default:
		ts.Fatalf("unknown word %s", args[0])
	}
}

// addSession starts a session: its id and process id.
func addSession(ts *testscript.TestScript, _ bool, args []string) {
	s, ok := ts.Value("sessions").(*clitest.Sessions)
	if !ok || len(args) != 2 {
		ts.Fatalf("usage: session ID PID")
	}
	pid, err := strconv.ParseUint(args[1], 10, 32)
	ts.Check(err)
	s.Add(&gpuctlv1.Session{
		Id: args[0], Pid: uint32(pid), Command: "train", State: gpuctlv1.SessionState_SESSION_STATE_RUNNING, Target: &gpuctlv1.Target{Gpu: "small"},
	})
}

// until repeats a command until it succeeds and its output is as a script wants
// it: until PATTERN COMMAND….
func until(ts *testscript.TestScript, _ bool, args []string) {
	testkit.Until(ts, fmt.Sprintf("%v says %s", args[1:], args[0]), func() error {
		if err := ts.Exec(args[1], args[2:]...); err != nil {
			return err
		}
		return testkit.Want(match(args[0], ts.ReadFile("stdout")), ts.ReadFile("stdout"))
	})
}

// furnish makes three hosts with six cards of three models and five VMs.
func furnish(c *clitest.Cluster, m *clitest.Machines) {
	for _, name := range []string{"h1", "h2", "h3"} {
		c.Put(&clusterv1.Host{Name: name, Id: "id-" + name, Address: name + ":7480", State: clusterv1.HostState_HOST_STATE_READY, Hypervisor: "xen", Memory: 256 * gib})
	}
	card := func(host, name, address, model string, rank uint32, memory uint64) *gpuctlv1.Card {
		k := &gpuctlv1.Card{
			Gpu: name, Address: address, Model: model, Memory: memory, Group: "g" + name, Dom0Access: "enabled",
			Functions: []*gpuctlv1.Function{{Address: address, Driver: "nouveau"}, {Address: address[:len(address)-1] + "1", Driver: "snd_hda_intel"}},
		}
		m.AddCard(host, k, rank)
		return k
	}
	card("h1", "a", "0000:65:00.0", "A10", 2, 24*gib)
	card("h1", "b", "0000:66:00.0", "H100", 3, 80*gib)
	bad := card("h1", "c", "0000:67:00.0", "L4", 1, 24*gib)
	bad.Phase, bad.Message = gpuctlv1.CardPhase_CARD_PHASE_QUARANTINED, "no reset brought it back"
	card("h1", "d", "0000:68:00.0", "L4", 1, 24*gib)
	card("h2", "a", "0000:65:00.0", "H100", 3, 80*gib)
	card("h3", "a", "0000:65:00.0", "A10", 2, 24*gib)
	c.Put(&clusterv1.Model{Name: "A10", Rank: 2, Gpus: 2, Free: 1})
	for _, vm := range []*gpuctlv1.Machine{
		{Uuid: "u-web", Name: "web", Host: "h1", Gpus: []string{"a"}, Agent: "gpuguest 1.2.0"},
		{Uuid: "u-db", Name: "db", Host: "h1", Gpus: []string{"b"}, Agent: "no channel"},
		{Uuid: "u-mail", Name: "mail", Host: "h1"},
		{Uuid: "u-twin1", Name: "twin", Host: "h1"},
		{Uuid: "u-twin2", Name: "twin", Host: "h2", Agent: "gpuguest 1.2.0"},
	} {
		vm.State, vm.Type, vm.Memory, vm.Cpus = "running", "hvm", 8*gib, 4
		m.AddMachine(vm)
	}
	m.AddNIC("h1", &gpuctlv1.NIC{
		Name: "ens1f0", Kind: "device", Address: "0000:3b:00.0", Driver: "ixgbe", Mtu: 9000, Speed: 10_000_000_000, Up: true, Carrier: true, Hosts: []string{"h2", "h3"},
	})
	m.AddNIC("h1", &gpuctlv1.NIC{Name: "ens1f1", Kind: "device", Address: "0000:3b:00.1", Driver: "ixgbe", Mtu: 1500, Up: true, Problems: []string{"ens1f1 has no carrier: look at its cable and switch port"}})
	m.AddNIC("h1", &gpuctlv1.NIC{Name: "eno1", Kind: "device", Address: "0000:01:00.0", Driver: "tg3", Mtu: 1500, Speed: 1_000_000_000, Up: true, Carrier: true})
	c.Put(&clusterv1.Migration{
		Id: "swap-1", Verb: "upgrade", Object: "h1/3f2a", From: "h1/small", To: "h1/big", State: clusterv1.MigrationState_MIGRATION_STATE_DONE, StartedUnixMs: time.Now().Add(-time.Hour).UnixMilli(),
	})
}
