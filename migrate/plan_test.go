package migrate

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
)

const mib = 1 << 20

// facts of a VM that can be moved, and of three hosts.
func facts() (VMFacts, []HostFacts) {
	card := func(id, model string, rank uint32) GPUFacts {
		return GPUFacts{
			ID: id, Model: model, Rank: rank, Memory: 16 * gib,
			Limits: &gpuctlv1.Limits{GlobalMemory: 16 * gib, MaxAlloc: 4 * gib, MaxWorkGroupSize: 1024, LocalMemory: 48 << 10, Images: true},
		}
	}
	m := VMFacts{
		Info: vm.Info{VM: vm.VM{UUID: "uuid", Name: "web"}, State: "running", Type: "hvm", Memory: 2 * gib}, Host: "h1", Passthrough: true, GPUs: []string{"h1/a"},
		Agent: &AgentFacts{Version: "1.0", Protocol: AwayProtocol, Hotplug: true, FreeMemory: gib, Sessions: []SessionFacts{
			{ID: "s-1", Command: "train", Memory: 64 * mib, Need: &gpuctlv1.Usage{LargestAlloc: 32 * mib, LargestWorkGroup: 256, LocalMemory: 16 << 10}},
		}},
	}
	hosts := []HostFacts{
		{Name: "h1", State: "ready", Hypervisor: "xen", FreeMemory: 8 * gib, Keep: 4 * gib, Keeps: true, GPUs: []GPUFacts{card("h1/a", "A10", 2), card("h1/b", "T4", 1)}},
		{Name: "h2", State: "ready", Hypervisor: "xen", FreeMemory: 8 * gib, Keep: 4 * gib, Keeps: true, Link: 125e6, GPUs: []GPUFacts{card("h2/a", "A10", 2), card("h2/b", "H100", 3)}},
		{Name: "h3", State: "ready", Hypervisor: "xen", FreeMemory: 8 * gib},
	}
	hosts[0].GPUs[0].Holder = "VM web"
	return m, hosts
}

// reasonCase is a reason, what makes it, and what the operator reads.
type reasonCase struct {
	code string
	r    Request
	with func(m *VMFacts, h []HostFacts)
	at   string // empty: against the VM; a host or GPU otherwise
	says string
}

func reasonsAgainstVMs() []reasonCase {
	return []reasonCase{
		{ReasonBusy, Request{}, func(m *VMFacts, _ []HostFacts) { m.Migration = "m-9" }, "", "migration m-9 of VM web runs already: gpuctl describe migration m-9 shows how far it is"},
		{ReasonNotRunning, Request{}, func(m *VMFacts, _ []HostFacts) { m.State = "paused" }, "", "VM web is paused: only a running VM can be moved with its applications"},
		{ReasonType, Request{}, func(m *VMFacts, _ []HostFacts) { m.Type = "pv" }, "", "VM web is a PV guest: Xen cannot migrate it live; only HVM guests can part with a GPU"},
		{ReasonType, Request{}, func(m *VMFacts, _ []HostFacts) { m.Type = "pvh" }, "", "VM web is a PVH guest: only HVM guests can have a GPU plugged in"},
		{ReasonServes, Request{}, func(m *VMFacts, _ []HostFacts) { m.Serves = "VM web is a service VM" }, "", "VM web is a service VM"},
		{ReasonServes, Request{Verb: Upgrade}, func(m *VMFacts, _ []HostFacts) { m.Serves = "VM web is a service VM" }, "", "VM web is a service VM"},
		{ReasonOtherDevice, Request{}, func(m *VMFacts, _ []HostFacts) { m.OtherDevices = []string{"0000:03:00.0"} }, "", "VM web has 0000:03:00.0: a VM with a host device cannot be migrated; detach it first"},
		{ReasonNoGPU, Request{Verb: Upgrade}, func(m *VMFacts, _ []HostFacts) { m.GPUs = nil }, "", "VM web has no GPU that could be exchanged: gpuctl attach web gives it one"},
		{ReasonSeveralGPUs, Request{}, func(m *VMFacts, _ []HostFacts) { m.GPUs = append(m.GPUs, "h1/b") }, "", "VM web has 2 GPUs (h1/a, h1/b); only VMs with one can be moved"},
		{ReasonSessions, Request{}, func(m *VMFacts, _ []HostFacts) { m.Agent.Sessions = make([]SessionFacts, 4097) }, "", "VM web has 4097 sessions, and at most 2000 can be moved: end some"},
		{ReasonPassthrough, Request{}, func(m *VMFacts, _ []HostFacts) { m.Passthrough = false }, "", "add <features><xen><passthrough state='on'/></xen></features> and start it anew"},
		{ReasonAgentAbsent, Request{}, func(m *VMFacts, _ []HostFacts) { m.Agent, m.AgentError = nil, "it did not answer within 5s" }, "", "no gpuguest answers in VM web (it did not answer within 5s): install it there"},
		{ReasonAgentOld, Request{}, func(m *VMFacts, _ []HostFacts) { m.Agent.Protocol = 0 }, "", "gpuguest 1.0 in VM web speaks protocol 0, and 1 is needed: install a newer one there"},
		{ReasonHotplug, Request{}, func(m *VMFacts, _ []HostFacts) {
			m.Agent.Hotplug = false
			m.Agent.HotplugReason = "acpiphp is not there"
		}, "", "VM web cannot unplug PCI devices (acpiphp is not there): a detach that it does not answer cannot be undone"},
		{ReasonGuestMemory, Request{}, func(m *VMFacts, h []HostFacts) {
			m.Agent.FreeMemory = 32 * mib
			h[0].Keeps, h[0].Keep = false, 0
		}, "", "the GPU state of VM web takes 64 MiB more of its memory and 32 MiB is free, and host h1 keeps none of it (devices.stash): end something in the VM, or give it more memory"},
		{ReasonAwayOld, Request{}, func(m *VMFacts, _ []HostFacts) { m.Agent.FreeMemory, m.Agent.Protocol = 32*mib, 1 }, "", "the GPU state of VM web takes 64 MiB more of its memory and 32 MiB is free, and gpuguest 1.0 there cannot send it out to the host (it speaks protocol 1, which takes 2): install a newer one there, end something, or give it more memory"},
		{ReasonStash, Request{}, func(m *VMFacts, h []HostFacts) { m.Agent.FreeMemory, h[0].Keep = 0, 32*mib }, "", "64 MiB of the GPU state of VM web is more than its memory has room for, and host h1 can keep 32 MiB (devices.stash): end something in the VM, or give it or the host more memory"},
		{ReasonGuestMemory, Request{}, func(m *VMFacts, _ []HostFacts) {
			m.Agent.FreeMemory = 100 * mib
			m.Agent.Sessions = append(m.Agent.Sessions, SessionFacts{ID: "d-1", Memory: 40 * mib, Driver: true})
		}, "", "the state of the CUDA programs in VM web takes 44 MiB of its memory, a tenth more than they have on the GPU, and 100 MiB is free, of which 64 MiB has to stay so: it can't leave the VM; end something there, or give it more memory"},
		{ReasonCUDA, Request{}, func(m *VMFacts, _ []HostFacts) {
			m.Agent.Stuck = []Stuck{{PID: 77, Command: "python", Why: "it uses MPS"}}
		}, "", "process 77 (python) in VM web uses CUDA and can't be moved: it uses MPS; end it"},
		{ReasonChip, Request{}, func(m *VMFacts, h []HostFacts) {
			m.Agent.Sessions[0].Driver = true
			h[0].GPUs[0].Chip, h[1].GPUs[0].Chip = "10de:2236", "10de:2330"
		}, "h2/a", "CUDA programs run in VM web (1) on a card 10de:2236, and h2/a is 10de:2330: NVIDIA's driver restores them on the same chip only"},
		{ReasonTransient, Request{Cold: true}, func(m *VMFacts, _ []HostFacts) { m.Agent = nil }, "", "VM web has no stored definition that it could be started from again"},
	}
}

func reasonsAgainstTargets() []reasonCase {
	return []reasonCase{
		{ReasonSameHost, Request{}, nil, "h1", "VM web is on host h1 already"},
		{ReasonSameHost, Request{Verb: Upgrade}, nil, "h2", "upgrade leaves VM web on host h1: gpuctl migrate moves it"},
		{ReasonNoFacts, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].Error = "no route" }, "h2", "host h2 does not say what it has: no route"},
		{ReasonHostState, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].State, h[1].Message = "draining", "new disks" }, "h2", "host h2 is draining (new disks)"},
		{ReasonHostState, Request{To: "h3"}, nil, "h2", "it is not h3"},
		{ReasonHypervisor, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].Hypervisor = "kvm" }, "h2", "host h2 runs kvm and VM web needs xen"},
		{ReasonHypervisor, Request{}, func(m *VMFacts, _ []HostFacts) { m.Type = "kvm" }, "h2", "host h2 runs xen and VM web needs kvm"},
		{ReasonMemory, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].FreeMemory = gib }, "h2", "VM web needs 2 GiB and host h2 has 1 GiB free"},
		{ReasonCPU, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].CPU = "it lacks avx512f" }, "h2", "VM web has a processor that host h2 cannot give it: it lacks avx512f"},
		{ReasonStorage, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].Missing = []string{"/img/web.raw"} }, "h2", "host h2 has not got /img/web.raw of VM web: it has to be shared, or copied there"},
		{ReasonStorage, Request{Cold: true}, func(m *VMFacts, h []HostFacts) {
			m.Agent, m.Persistent, m.Disks, h[1].Missing = nil, true, []Disk{{Path: "/nvram/web.fd", Start: true}}, []string{"/nvram/web.fd"}
		}, "h2", "host h2 has not got /nvram/web.fd of VM web: it has to be shared, or copied there"},
		{ReasonStays, Request{Cold: true}, func(m *VMFacts, _ []HostFacts) { m.Agent, m.Persistent, m.Stays = nil, true, []string{"a TPM"} }, "h2", "VM web has a TPM, whose contents are on host h1 only"},
		{ReasonSnapshots, Request{}, func(m *VMFacts, _ []HostFacts) { m.Snapshots = 2 }, "h2", "libvirt has 2 snapshots of VM web, and takes it to no other host with them"},
		{ReasonSnapshots, Request{Cold: true}, func(m *VMFacts, _ []HostFacts) { m.Agent, m.Persistent, m.Checkpoints = nil, true, 1 }, "h2", "libvirt has 1 checkpoints of VM web, and does not let its definition go with them"},
		{ReasonStash, Request{}, func(m *VMFacts, h []HostFacts) { m.Agent.FreeMemory, h[1].Keep = 0, 32*mib }, "h2", "64 MiB of the GPU state of VM web is more than its memory has room for, and host h2 can keep 32 MiB (devices.stash)"},
		{ReasonLockManager, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].LockManagerError = "lockd: connection refused" }, "h2", "libvirt's lock manager does not answer on host h2, and without it VM web can neither run nor go on there (lockd: connection refused)"},
		{ReasonLimit, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].Migrations, h[1].Most = 2, 2 }, "h2", "2 migrations from or to host h2 run already, and no more than 2 may"},
		{ReasonNoCard, Request{}, nil, "h3", "host h3 has no card"},
		{ReasonLink, Request{Deadline: 3 * time.Second}, nil, "h2/a", "longer than 3s: a faster link, or a later deadline, would do"},

		{ReasonModel, Request{To: "h2/b"}, nil, "h2/a", "it is not h2/b"},
		{ReasonModel, Request{Verb: Upgrade}, nil, "h1/b", "T4 (rank 1) is no higher model than A10 (rank 2)"},
		{ReasonModel, Request{Verb: Downgrade}, func(_ *VMFacts, h []HostFacts) { h[0].GPUs[1].Rank = 2 }, "h1/b", "T4 (rank 2) is no lower model than A10 (rank 2)"},
		{ReasonTaken, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].GPUs[0].Holder = "VM db" }, "h2/a", "h2/a belongs to VM db"},
		{ReasonHealth, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].GPUs[0].Health = "quarantined" }, "h2/a", "h2/a is not fit: quarantined"},
		{ReasonCordoned, Request{}, func(_ *VMFacts, h []HostFacts) {
			h[1].GPUs[0].IsCordoned = true
			h[1].GPUs[0].Cordoned = "loud fan"
		}, "h2/a", "h2/a is cordoned (loud fan)"},
		{ReasonIsolation, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].GPUs[0].Isolation = "it shares its group with a NIC" }, "h2/a", "h2/a may not be given away: it shares its group with a NIC"},
		{ReasonGPUMemory, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].GPUs[0].Memory = 32 * mib }, "h2/a", "the applications of VM web use 64 MiB and h2/a has 32 MiB"},
		{ReasonGuestProfile, Request{}, func(_ *VMFacts, h []HostFacts) {
			h[1].GPUs[0].GuestLacks = "profile nvidia needs libcuda.so.1: install it in the VM"
		}, "h2/a", "VM web cannot use a A10: profile nvidia needs libcuda.so.1: install it in the VM"},
		{ReasonLimits, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].GPUs[0].Limits.MaxAlloc = 16 * mib }, "h2/a", "session s-1 (train) uses an allocation of 33554432 bytes and h2/a has 16777216"},
		{ReasonLimits, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].GPUs[0].Limits.MaxWorkGroupSize = 128 }, "h2/a", "session s-1 (train) uses work-groups of 256 work-items and h2/a has 128"},
		{ReasonLimits, Request{}, func(_ *VMFacts, h []HostFacts) { h[1].GPUs[0].Limits.LocalMemory = 1024 }, "h2/a", "session s-1 (train) uses 16384 bytes of local memory and h2/a has 1024"},
		{ReasonLimits, Request{}, func(m *VMFacts, h []HostFacts) {
			m.Agent.Sessions[0].Need.Images, h[1].GPUs[0].Limits.Images = 1, false
		}, "h2/a", "session s-1 (train) uses images and h2/a has none"},
	}
}

// One line for each reason, with what the operator reads.
func TestReasons(t *testing.T) {
	covered := map[string]bool{}
	for _, c := range slices.Concat(reasonsAgainstVMs(), reasonsAgainstTargets()) {
		if c.r.Verb == "" {
			c.r.Verb = Migrate
		}
		m, hosts := facts()
		if c.with != nil {
			c.with(&m, hosts)
		}
		p := Make(c.r, m, hosts, NewCostModel())
		reasons := p.Reasons
		if c.at != "" {
			reasons = nil
			for _, r := range p.Rejected {
				if r.Host == c.at && r.GPU == "" || r.GPU == c.at {
					reasons = r.Reasons
				}
			}
		} else if p.Possible() {
			t.Errorf("%s: it is possible all the same", c.code)
		}
		covered[c.code] = true
		if len(reasons) != 1 || reasons[0].GetCode() != c.code || !strings.Contains(reasons[0].GetMessage(), c.says) {
			t.Errorf("%s at %q: %v, want %q", c.code, c.at, reasons, c.says)
		}
	}
	for _, code := range codes(t) {
		if !covered[code] {
			t.Errorf("no test of the reason %s", code)
		}
	}
}

// A VM is stopped only if that was allowed and nothing else works.
func TestForceCold(t *testing.T) {
	plan := func(r Request, with func(*VMFacts)) *Plan {
		m, hosts := facts()
		m.Persistent = true
		if with != nil {
			with(&m)
		}
		return Make(r, m, hosts, NewCostModel())
	}
	hung := func(m *VMFacts) { m.Agent, m.AgentError = nil, "it hangs" }
	if p := plan(Request{Verb: Migrate}, hung); p.Possible() || p.Cold {
		t.Errorf("stopped unasked: %+v", p)
	}
	if p := plan(Request{Verb: Migrate, Cold: true}, nil); !p.Possible() || p.Cold {
		t.Errorf("stopped in vain: %+v", p)
	}
	for _, c := range []struct {
		r    Request
		want string
	}{
		{Request{Verb: Migrate, Cold: true}, "reserve prepare stop define start commit clean"},
		{Request{Verb: Downgrade, Cold: true}, "reserve prepare stop start commit clean"},
	} {
		p := plan(c.r, hung)
		if !p.Possible() || !p.Cold || len(p.Warm.Reasons) != 1 || p.Warm.Reasons[0].GetCode() != ReasonAgentAbsent {
			t.Fatalf("%s: %+v", c.r.Verb, p)
		}
		var names []string
		for _, s := range p.Candidates[0].Steps {
			names = append(names, s.Name)
		}
		if got := strings.Join(names, " "); got != c.want {
			t.Errorf("%s: %s", c.r.Verb, got)
		}
		if p.Candidates[0].Cost.Stop < 20*time.Second {
			t.Errorf("%s: it stands still for %v", c.r.Verb, p.Candidates[0].Cost.Stop)
		}
	}
}

// codes are all of the reasons' codes in the source.
func codes(t *testing.T) (out []string) {
	t.Helper()
	data, err := os.ReadFile("plan.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(data), "\n") {
		if f := strings.Fields(line); len(f) == 3 && strings.HasPrefix(f[0], "Reason") && f[1] == "=" {
			out = append(out, strings.Trim(f[2], `"`))
		}
	}
	if len(out) < 20 {
		t.Fatalf("%d codes", len(out))
	}
	return out
}

func TestOrder(t *testing.T) {
	ids := func(p *Plan) (out []string) {
		for _, c := range p.Candidates {
			out = append(out, c.GPU.ID)
		}
		return out
	}
	m, hosts := facts()
	hosts[0].GPUs = append(hosts[0].GPUs, GPUFacts{ID: "h1/c", Model: "H100", Rank: 3}, GPUFacts{ID: "h1/d", Model: "L4", Rank: 0})
	hosts[1].GPUs = append(hosts[1].GPUs, GPUFacts{ID: "h2/c", Model: "T4", Rank: 1})
	for _, c := range []struct {
		r    Request
		want []string
	}{
		{Request{Verb: Migrate}, []string{"h2/a", "h2/b", "h2/c"}},
		{Request{Verb: Migrate, To: "H100"}, []string{"h2/b"}},
		{Request{Verb: Migrate, To: "h1/b"}, []string{"h1/b"}},
		{Request{Verb: Upgrade}, []string{"h1/c"}},
		{Request{Verb: Downgrade}, []string{"h1/d", "h1/b"}},
		{Request{Verb: Downgrade, To: "T4"}, []string{"h1/b"}},
	} {
		if got := ids(Make(c.r, m, hosts, NewCostModel())); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.r, got, c.want)
		}
	}
	// A VM without a GPU goes wherever it fits.
	m.GPUs, m.Agent = nil, nil
	p := Make(Request{Verb: Migrate}, m, hosts, NewCostModel())
	if len(p.Candidates) != 2 || !p.Possible() || p.Candidates[0].Steps[0].Name != StepMove {
		t.Errorf("%+v %v", p.Candidates, p.Reasons)
	}
}

// What nobody has seen yet is a guess, and is said to be one.
func TestPredictionWithoutMeasurementIsARange(t *testing.T) {
	m, hosts := facts()
	model := NewCostModel()
	guess := Make(Request{Verb: Migrate, To: "h2/a"}, m, hosts, model).Candidates[0]
	for name, r := range map[string]struct {
		likely time.Duration
		Range
	}{"all": {guess.Cost.Total, guess.Cost.TotalRange}, "stop": {guess.Cost.Stop, guess.Cost.StopRange}, "step": {guess.Steps[0].Predicted, guess.Steps[0].Range}} {
		if r.Measured || r.Low > r.likely/3 || r.High < 14*r.likely { // as far off as a slow host was
			t.Errorf("%s: %v, and %+v", name, r.likely, r.Range)
		}
	}
	seen := &clusterv1.Migration{State: clusterv1.MigrationState_MIGRATION_STATE_DONE}
	for _, s := range guess.Steps[:len(guess.Steps)-1] {
		seen.Steps = append(seen.Steps, &clusterv1.MigrationStep{Name: s.Name, TookNs: int64(20 * s.Predicted), Bytes: s.Bytes})
	}
	model.Learn(seen)
	if c := Make(Request{Verb: Migrate, To: "h2/a"}, m, hosts, model).Candidates[0].Cost; c.TotalRange.Measured || !c.StopRange.Measured {
		t.Errorf("one step was never seen, and no one in which applications stand still: %+v", c)
	}
	last := guess.Steps[len(guess.Steps)-1]
	seen.Steps = append(seen.Steps, &clusterv1.MigrationStep{Name: last.Name, TookNs: int64(20 * last.Predicted)})
	for range 6 { // it is like that each time
		model.Learn(seen)
	}
	c := Make(Request{Verb: Migrate, To: "h2/a"}, m, hosts, model).Candidates[0].Cost
	if !c.TotalRange.Measured || c.TotalRange.Low < c.Total/2 || c.TotalRange.High > 2*c.Total || c.TotalRange.Low >= c.Total || c.TotalRange.High <= c.Total {
		t.Errorf("%+v", c)
	}
}

// That nothing keeps the VM from running twice is said, and refuses nothing.
func TestPlanSaysThatThereIsNoLockManager(t *testing.T) {
	for name, c := range map[string]struct {
		to     string
		has    []string
		driver string
		says   string
	}{
		"none":      {"h2/a", nil, "xen", "libvirt has no lock manager on h1 and h2: if the last answer of the live migration is lost, VM web may run on both hosts, with the same disks; lock_manager = \"lockd\" in /etc/libvirt/libxl.conf"},
		"at one":    {"h2/a", []string{"h1"}, "kvm", "libvirt has no lock manager on h2: "},
		"of qemu":   {"h2/a", nil, "kvm", "/etc/libvirt/qemu.conf"},
		"both":      {"h2/a", []string{"h1", "h2"}, "kvm", ""},
		"both, xen": {"h2/a", []string{"h1", "h2"}, "xen", "libvirt on Xen lets VM web go on on host h1 if the last answer of the live migration is lost, whatever its lock manager says"},
		"one, xen":  {"h2/a", []string{"h2"}, "xen", "libvirt has no lock manager on h1: "},
		"same host": {"h1/b", nil, "xen", ""},
	} {
		m, hosts := facts()
		if c.driver == "kvm" {
			m.Type = "kvm"
		}
		for i := range hosts {
			hosts[i].Hypervisor = c.driver
			if slices.Contains(c.has, hosts[i].Name) {
				hosts[i].LockManager = "lockd"
			}
		}
		verb := Migrate
		if HostOf(c.to) == "h1" {
			verb = Downgrade
		}
		p := Make(Request{Verb: verb, To: c.to}, m, hosts, NewCostModel())
		if !p.Possible() {
			t.Fatalf("%s: %v %v", name, p.Reasons, p.Rejected)
		}
		if c.says == "" && len(p.Notes) != 0 || c.says != "" && (len(p.Notes) != 1 || p.Notes[0].GetCode() != NoteLockManager || !strings.Contains(p.Notes[0].GetMessage(), c.says)) {
			t.Errorf("%s: %v", name, p.Notes)
		}
	}
}

// Without a lock manager that answers, the VM could run on neither host: nothing begins.
func TestPlanRefusesWhereTheLockManagerDoesNotAnswer(t *testing.T) {
	for i, host := range []string{"h1", "h2"} {
		m, hosts := facts()
		hosts[i].LockManager, hosts[i].LockManagerError = "lockd", "lockd: connection refused"
		p := Make(Request{Verb: Migrate, To: "h2/a"}, m, hosts, NewCostModel())
		if p.Possible() || !slices.ContainsFunc(p.Rejected, func(r Rejection) bool {
			return r.Host == "h2" && len(r.Reasons) == 1 && r.Reasons[0].GetCode() == ReasonLockManager && strings.Contains(r.Reasons[0].GetMessage(), "does not answer on host "+host+", and without it VM web ")
		}) {
			t.Errorf("%s: %v %v", host, p.Candidates, p.Rejected)
		}
		// It stays where it is, and needs none.
		if p := Make(Request{Verb: Downgrade, To: "h1/b"}, m, hosts, NewCostModel()); !p.Possible() {
			t.Errorf("%s: %v", host, p.Rejected)
		}
	}
}

// On Xen libvirt asks for no locks when a VM is resumed, so nobody is told to do that.
func TestPlanSaysThatDisksAreNotLocked(t *testing.T) {
	for hypervisor, again := range map[string]string{"kvm": "virsh resume on host h1 lock it again", "xen": "its move locks it again, or its next start"} {
		m, hosts := facts()
		m.Unlocked, m.Type = []string{"/srv/web.img"}, map[string]string{"kvm": "kvm", "xen": "hvm"}[hypervisor]
		for i := range hosts {
			hosts[i].Hypervisor, hosts[i].LockManager = hypervisor, "lockd"
		}
		p := Make(Request{Verb: Migrate, To: "h2/a"}, m, hosts, NewCostModel())
		if !p.Possible() || len(p.Notes) == 0 || p.Notes[0].GetCode() != NoteUnlocked ||
			!strings.Contains(p.Notes[0].GetMessage(), "has not locked /srv/web.img of VM web") || !strings.Contains(p.Notes[0].GetMessage(), again) {
			t.Errorf("%s: %v %v", hypervisor, p.Rejected, p.Notes)
		}
	}
}

// What is predicted after one migration is what that one took.
func TestCalibration(t *testing.T) {
	m, hosts := facts()
	model := NewCostModel()
	guessed := Make(Request{Verb: Migrate, To: "h2/a"}, m, hosts, model).Candidates[0]
	seen := &clusterv1.Migration{State: clusterv1.MigrationState_MIGRATION_STATE_DONE}
	var total, stop time.Duration
	for i, s := range guessed.Steps {
		took := time.Duration(i+1) * 100 * time.Millisecond
		if s.Name == StepMove {
			took = 9 * time.Second
		}
		seen.Steps = append(seen.Steps, &clusterv1.MigrationStep{Name: s.Name, TookNs: int64(took), Bytes: s.Bytes})
		total += took
		if i >= 2 && i <= 8 {
			stop += took
		}
	}
	model.Learn(seen)
	c := Make(Request{Verb: Migrate, To: "h2/a"}, m, hosts, model).Candidates[0].Cost
	near := func(got, want time.Duration) bool { return got > want*9/10 && got < want*11/10 }
	if !near(c.Total, total) || !near(c.Stop, stop) {
		t.Errorf("predicted %v and %v, took %v and %v", c.Total, c.Stop, total, stop)
	}
	// Twice the memory takes longer; a failed one teaches nothing.
	m.Memory *= 2
	if longer := Make(Request{Verb: Migrate, To: "h2/a"}, m, hosts, model).Candidates[0].Cost; longer.Total <= c.Total {
		t.Errorf("%v for twice the memory, %v before", longer.Total, c.Total)
	}
	seen.State = clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK
	seen.Steps[0].TookNs = int64(time.Hour)
	model.Learn(seen)
	m.Memory /= 2
	if again := Make(Request{Verb: Migrate, To: "h2/a"}, m, hosts, model).Candidates[0].Cost; again != c {
		t.Errorf("%v, %v before", again, c)
	}
}

func TestSVG(t *testing.T) {
	m := &clusterv1.Migration{
		Id: "m-1", Verb: "migrate", Object: "web<&\x00>", From: "h1/a", To: "h2/b", State: clusterv1.MigrationState_MIGRATION_STATE_DONE, StoppedNs: 17e9, Bytes: 2 << 30,
	}
	at := int64(1e18)
	for i, name := range []string{StepReserve, StepPrepare, StepFreeze, StepRelease, StepDetach, StepMove, StepAttach, StepAttach, StepAttach, StepAwait, StepThaw, StepCommit, StepClean} {
		s := &clusterv1.MigrationStep{Name: name, StartedUnixNs: at, TookNs: int64(i+1) * 3e8, Undo: i == 7}
		if i == 6 {
			s.Error = "its GPU <died>"
		}
		if name == StepMove {
			s.Bytes, s.TookNs = 2<<30, 14e9
		}
		at += s.TookNs
		m.Steps = append(m.Steps, s)
	}
	got := SVG(m)
	d := xml.NewDecoder(strings.NewReader(string(got)))
	for {
		if _, err := d.Token(); err != nil {
			if !errors.Is(err, io.EOF) {
				t.Fatalf("%v in %s", err, got)
			}
			break
		}
	}
	golden := filepath.Join("testdata", "timeline.svg")
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(golden); err != nil || string(want) != string(got) {
		t.Errorf("it differs from %s (%v); UPDATE_GOLDEN=1 writes it anew", golden, err)
	}
	SVG(&clusterv1.Migration{}) // nothing happened yet
}

// The largest states leave the VM until it has room for the others.
func TestAway(t *testing.T) {
	session := func(id string, memory, resident uint64) SessionFacts {
		return SessionFacts{ID: id, Memory: memory * mib, Resident: resident * mib}
	}
	all := []SessionFacts{session("s", 10, 0), session("l", 500, 0), session("m", 100, 0), session("r", 900, 900)}
	for _, c := range []struct {
		free     uint64 // MiB
		protocol uint32
		already  []string
		want     string
		bytes    uint64
	}{
		{1000, AwayProtocol, nil, "", 0},
		{610, AwayProtocol, nil, "", 0}, // it just fits
		{609, AwayProtocol, nil, "l", 500},
		{110 + 64, AwayProtocol, nil, "l", 500},
		{110 + 63, AwayProtocol, nil, "l m", 600},
		{0, AwayProtocol, nil, "l m s", 610},
		{0, Protocol, nil, "", 0},
		{1000, AwayProtocol, []string{"s"}, "s", 10},
		{600 + 64, AwayProtocol, []string{"s"}, "s", 10},
		{599, AwayProtocol, []string{"s", "gone"}, "s l", 510},
	} {
		a := &AgentFacts{Protocol: c.protocol, FreeMemory: c.free * mib, Sessions: all}
		var ids []string
		out := a.away(c.already)
		for _, s := range out {
			ids = append(ids, s.ID)
		}
		if got := strings.Join(ids, " "); got != c.want || sum(out) != c.bytes*mib {
			t.Errorf("%d MiB free, %v already: %q of %d bytes, want %q", c.free, c.already, got, sum(out), c.want)
		}
	}
	if all[0].ID != "s" {
		t.Error("the facts have another order")
	}
}

// The state of a CUDA program stays in the VM, and what leaves it makes room for that.
func TestStatesOfCUDAProgramsStayInTheVM(t *testing.T) {
	a := &AgentFacts{Protocol: AwayProtocol, Sessions: []SessionFacts{
		{ID: "cuda", Memory: 1000 * mib, Driver: true}, {ID: "opencl", Memory: 500 * mib}, {ID: "small", Memory: 10 * mib},
	}}
	for free, want := range map[uint64]string{1610: "", 1609: "opencl", 1173: "opencl small", 0: "opencl small"} {
		a.FreeMemory = free * mib
		var ids []string
		for _, s := range a.away(nil) {
			ids = append(ids, s.ID)
		}
		if got := strings.Join(ids, " "); got != want {
			t.Errorf("%d MiB free: %q leave, not %q", free, got, want)
		}
	}
	// Such a program may go to a card of the same chip.
	m, hosts := facts()
	m.Agent.Sessions[0].Driver = true
	for i := range hosts {
		for j := range hosts[i].GPUs {
			hosts[i].GPUs[j].Chip = map[string]string{"A10": "10de:2236"}[hosts[i].GPUs[j].Model]
		}
	}
	if p := Make(Request{Verb: Migrate}, m, hosts, NewCostModel()); len(p.Candidates) != 1 || p.Candidates[0].GPU.ID != "h2/a" {
		t.Errorf("%v %v", p.Candidates, p.Rejected)
	}
	// On Xen nobody can say where in the VM the card goes.
	slot := func(n *gpuctlv1.Reason) bool { return n.GetCode() == NoteSlot }
	for kind, noted := range map[string]bool{"xen": true, "kvm": false} {
		m.Type = map[string]string{"xen": "hvm", "kvm": "kvm"}[kind]
		for i := range hosts {
			hosts[i].Hypervisor = kind
		}
		if p := Make(Request{Verb: Migrate}, m, hosts, NewCostModel()); len(p.Candidates) == 0 || slices.ContainsFunc(p.Notes, slot) != noted {
			t.Errorf("%s: %v %v %v", kind, p.Candidates, p.Notes, p.Reasons)
		}
	}
	m.Type, m.Agent.Sessions[0].Driver = "hvm", false
	for i := range hosts {
		hosts[i].Hypervisor = "xen"
	}
	if p := Make(Request{Verb: Migrate}, m, hosts, NewCostModel()); slices.ContainsFunc(p.Notes, slot) {
		t.Errorf("without CUDA programs: %v", p.Notes)
	}
}

// What goes out of the VM is in the plan, in its time, and is learned.
func TestAwayCost(t *testing.T) {
	m, hosts := facts()
	m.Agent.Bulk = mib
	plan := func(model *CostModel) (*Plan, Candidate) {
		p := Make(Request{Verb: Migrate, To: "h2/a"}, m, hosts, model)
		if !p.Possible() {
			t.Fatalf("%v %v", p.Reasons, p.Rejected)
		}
		return p, p.Candidates[0]
	}
	model := NewCostModel()
	_, stays := plan(model)
	m.Agent.FreeMemory = 0
	p, goes := plan(model)
	if more := goes.Cost.Stop - stays.Cost.Stop; p.Away != 64*mib || more < 128*time.Second || more > 130*time.Second {
		t.Errorf("64 MiB out and in at 1 MiB/s take %v more, of %d bytes", more, p.Away)
	}
	freeze := goes.Steps[slices.IndexFunc(goes.Steps, func(s Step) bool { return s.Name == StepFreeze })]
	if !strings.Contains(freeze.What, "64 MiB that go out to hosts h1 and h2") {
		t.Errorf("%q", freeze.What)
	}
	if p := Make(Request{Verb: Migrate, To: "h2/a", Deadline: time.Minute}, m, hosts, model); p.Possible() {
		t.Error("within a minute")
	}
	ended := &clusterv1.Migration{State: clusterv1.MigrationState_MIGRATION_STATE_DONE, Machine: &clusterv1.MachineMove{AwayBytes: 32 * mib}}
	for _, name := range []string{StepFreeze, StepThaw} {
		ended.Steps = append(ended.Steps, &clusterv1.MigrationStep{Name: name, TookNs: int64(4 * time.Second), Bytes: 32 * mib})
	}
	model.Learn(ended)
	if _, c := plan(model); c.Cost.Stop-stays.Cost.Stop < 12*time.Second || c.Cost.Stop-stays.Cost.Stop > 17*time.Second {
		t.Errorf("64 MiB where 32 took 4 s are to take %v more", c.Cost.Stop-stays.Cost.Stop)
	}
	m.Agent.FreeMemory = gib
	if _, c := plan(model); c.Cost != stays.Cost {
		t.Errorf("what stays is to take %v, and was to take %v", c.Cost, stays.Cost)
	}
}

// What is in a VM's TPM and in its firmware's variables goes along when it is migrated live.
func TestLiveMigrationTakesAlongWhatAStartElsewhereWouldLose(t *testing.T) {
	m, hosts := facts()
	m.Stays, m.Checkpoints, m.Disks, hosts[1].Missing = []string{"a TPM"}, 1, []Disk{{Path: "/nvram/web.fd", Start: true}}, []string{"/nvram/web.fd"}
	if p := Make(Request{Verb: Migrate, Cold: true}, m, hosts, NewCostModel()); !p.Possible() || p.Cold {
		t.Errorf("cold %v: %v, %v", p.Cold, p.Reasons, p.Rejected)
	}
}
