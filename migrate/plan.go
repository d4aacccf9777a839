package migrate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/vm"
)

// Verb is the kind of a migration.
type Verb string

// Verbs. Upgrade and Downgrade leave the VM on its host.
const (
	Migrate   Verb = "migrate"
	Upgrade   Verb = "upgrade"
	Downgrade Verb = "downgrade"
)

// Protocol is the lowest version of gpuguest that can take part. AwayProtocol is the
// lowest one whose sessions' states can leave the VM.
const (
	Protocol     = 1
	AwayProtocol = 2
)

// Codes of reasons. They are part of the API, and their meaning never changes.
const (
	ReasonNotRunning   = "not_running"
	ReasonType         = "guest_type"
	ReasonPassthrough  = "passthrough_flag"
	ReasonAgentAbsent  = "agent_absent"
	ReasonAgentOld     = "agent_old"
	ReasonHotplug      = "hotplug"
	ReasonSeveralGPUs  = "several_gpus"
	ReasonNoGPU        = "no_gpu"
	ReasonGuestMemory  = "guest_memory"
	ReasonAwayOld      = "agent_old_away"
	ReasonStash        = "stash_memory"
	ReasonBusy         = "migration_running"
	ReasonOtherDevice  = "other_device"
	ReasonHostState    = "host_state"
	ReasonHypervisor   = "hypervisor"
	ReasonSameHost     = "same_host"
	ReasonMemory       = "memory"
	ReasonCPU          = "cpu"
	ReasonStorage      = "storage"
	ReasonLink         = "link_slow"
	ReasonLimit        = "too_many_migrations"
	ReasonNoFacts      = "unknown"
	ReasonNoCard       = "no_card"
	ReasonModel        = "model"
	ReasonTaken        = "taken"
	ReasonHealth       = "health"
	ReasonCordoned     = "cordoned"
	ReasonIsolation    = "isolation"
	ReasonGPUMemory    = "gpu_memory"
	ReasonLimits       = "limits"
	ReasonGuestProfile = "guest_profile"
	ReasonTransient    = "transient"
	ReasonSessions     = "too_many_sessions"
	ReasonCUDA         = "cuda"
	ReasonChip         = "chip"
	ReasonLockManager  = "lock_manager"
	ReasonServes       = "serves"
	ReasonStays        = "stays"
	ReasonSnapshots    = "snapshots"
	NoteLockManager    = "no_lock_manager" // only a note
	NoteUnlocked       = "not_locked"      // only a note
	NoteSlot           = "slot"            // only a note
)

// VMFacts are what a plan needs to know about the VM.
type VMFacts struct {
	vm.Info
	Host         string
	Passthrough  bool // its definition permits PCI hotplug
	Disks        []Disk
	OtherDevices []string   // host devices that are not GPUs
	GPUs         []string   // ids
	Migration    string     // its migration that is in progress
	Far          []FarFacts // GPUs with a runtime that hosts could lend to it
	Parts        []PartFacts
	Agent        *AgentFacts
	AgentError   string // why Agent is nil
	Serves       string // why it must stay where it is, as a service VM; empty: it may go
	// Unlocked are files of its disks that its host's lock manager should have locked, and
	// has not.
	Unlocked []string
	// Stays is what of it is on its host only, and is lost if it is started elsewhere.
	Stays                  []string
	Snapshots, Checkpoints uint32 // that libvirt has of it
}

// Disk is a disk or other file of a VM.
type Disk struct {
	Path     string
	ReadOnly bool
	Start    bool // only a start needs it
}

// AgentFacts are what the VM's gpuguest reports.
type AgentFacts struct {
	Version       string
	Protocol      uint32
	Hotplug       bool
	HotplugReason string
	FreeMemory    uint64 // bytes
	Bulk          uint64 // approximate speed at which states leave the VM, bytes per second; 0: unknown
	Sessions      []SessionFacts
	Stuck         []Stuck
}

// Stuck is a process that uses CUDA and can't be a session, so that its GPU can't be taken
// away from it.
type Stuck struct {
	PID          uint32
	Command, Why string
}

// stuck returns why the VM's CUDA programs can't be moved; empty: they can.
func (a *AgentFacts) stuck(name string) (out []string) {
	for _, s := range a.Stuck {
		out = append(out, fmt.Sprintf("process %d (%s) in VM %s uses CUDA and can't be moved: %s; end it, or let it come to where it can", s.PID, s.Command, name, s.Why))
	}
	return out
}

// away chooses the sessions whose state must leave the VM, because the VM has no room for
// all. Those in already are chosen first, then the largest, until the others fit and
// headroom is left. If gpuguest cannot send states out, it chooses none.
func (a *AgentFacts) away(already []string) (out []SessionFacts) {
	if a == nil || a.Protocol < AwayProtocol {
		return nil
	}
	all := slices.Clone(a.Sessions)
	slices.SortStableFunc(all, func(x, y SessionFacts) int {
		before := func(s SessionFacts) int {
			if slices.Contains(already, s.ID) {
				return 0
			}
			return 1
		}
		return cmp.Or(cmp.Compare(before(x), before(y)), cmp.Compare(y.toSave(), x.toSave()))
	})
	need, room := sum(all), a.FreeMemory
	for _, s := range all {
		if s.Driver {
			continue // NVIDIA's driver keeps it in the memory of its processes
		}
		if !slices.Contains(already, s.ID) && (s.toSave() == 0 || need <= room) {
			break
		}
		need -= s.toSave()
		out = append(out, s)
		room = a.FreeMemory - min(a.FreeMemory, headroom)
	}
	return out
}

// headroom is how many bytes must stay free in a VM after a part of its applications'
// states has left it. A VM without free memory is hard to migrate.
const headroom = 64 << 20

func sum(all []SessionFacts) (n uint64) {
	for _, s := range all {
		n += s.toSave()
	}
	return n
}

// SessionFacts are what is known about a session.
type SessionFacts struct {
	ID, Command string
	Memory      uint64 // bytes
	Resident    uint64 // bytes of it that are already in the VM's memory
	Need        *gpuctlv1.Usage
	Driver      bool // it is of CUDA processes: its state can't leave the VM, nor go to another chip
}

// toSave returns how many bytes of the VM's memory the state will take that it does not
// take yet. NVIDIA's driver needs a tenth more than there is on the GPU.
func (s SessionFacts) toSave() uint64 {
	left := s.Memory - min(s.Memory, s.Resident)
	if s.Driver {
		left += left / 10
	}
	return left
}

// ofDriver returns the sessions of CUDA processes.
func (a *AgentFacts) ofDriver() (out []SessionFacts) {
	if a == nil {
		return nil
	}
	for _, s := range a.Sessions {
		if s.Driver {
			out = append(out, s)
		}
	}
	return out
}

// HostFacts are what a plan needs to know about a host.
type HostFacts struct {
	Name       string
	State      string // ready, draining or down
	Message    string
	Error      string // why nothing is known about it
	Hypervisor string // xen or kvm
	FreeMemory uint64 // bytes
	CPU        string // why it cannot provide the VM's processor; empty: it can
	// Missing are the VM's files that do not exist on the host, or differ.
	Missing    []string
	Link       uint64 // speed to the VM's host, bytes per second; 0: unknown
	Migrations int    // migrations in progress, from or to it
	Most       int    // limit for Migrations; 0: none
	GPUs       []GPUFacts
	// Keep is how many bytes of VMs' GPU states it can keep. Keeps reports whether it is
	// configured to keep any.
	Keep  uint64
	Keeps bool
	// LockManager is libvirt's lock manager that prevents a VM from running on two hosts;
	// empty: none.
	LockManager string
	// LockManagerError is why it does not answer; empty: it does. No VM can be started there
	// then, or received, or go on after a migration that failed.
	LockManagerError string
	PartRoom         []PartRoom
}

// GPUFacts are what a plan needs to know about a card.
type GPUFacts struct {
	ID, Model  string
	Rank       uint32
	Memory     uint64 // bytes; 0: unknown before it is used
	Limits     *gpuctlv1.Limits
	Holder     string // VM or claim that has it; empty: free
	Health     string // why its health does not permit it; empty: it does
	Cordoned   string
	IsCordoned bool
	Isolation  string // why its isolation does not permit it; empty: it does
	GuestLacks string // what must be installed in the VM to use it; empty: nothing
	Chip       string // PCI vendor and device, as 10de:2330; empty: unknown
}

// Request is what an operator asks for.
type Request struct {
	Verb     Verb
	To       string        // host, GPU id or model; empty: any
	Deadline time.Duration // longest total time; 0: any
	Cold     bool          // stop the VM if it cannot be migrated live
	Live     Live          // whether its applications compute on a remote GPU meanwhile

	far *FarFacts // the remote GPU of this plan; nil: they are frozen
}

// Candidate is a card that the VM can get.
type Candidate struct {
	Host  string
	GPU   GPUFacts
	Cost  Cost
	Steps []Step
}

// Step is one step of a plan.
type Step struct {
	Name, What, Undo string
	Predicted        time.Duration
	Range            Range // range in which Time is expected
	Bytes            uint64
}

// Rejection is a host or a card that does not fit, with all reasons.
type Rejection struct {
	Host, GPU, Model string
	Reasons          []*gpuctlv1.Reason
}

// Plan is what a migration would do, or why it is impossible.
type Plan struct {
	VM         VMFacts
	Reasons    []*gpuctlv1.Reason // against the VM itself, for any destination
	Candidates []Candidate        // best first
	Rejected   []Rejection
	Away       uint64             // bytes of GPU state that leave the VM
	Notes      []*gpuctlv1.Reason // information for the operator
	// Cold means that the VM is stopped, and started with the other card. Warm is the
	// plan without that, which is impossible.
	Cold bool
	Warm *Plan
	// Live is about the remote GPU; nil: nobody asks for one.
	Live *LivePlan
}

// Possible reports whether the plan can be executed.
func (p *Plan) Possible() bool { return len(p.Reasons) == 0 && len(p.Candidates) > 0 }

func because(code, format string, args ...any) *gpuctlv1.Reason {
	return &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Make makes a plan. It is a pure function. The transaction uses the same decisions, so a
// plan cannot promise what would be refused. It plans to stop the VM only if the request
// permits that and a live migration is impossible.
func Make(r Request, m VMFacts, hosts []HostFacts, model *CostModel) *Plan {
	cold := r.Cold
	r.Cold = false
	p := running(r, m, hosts, model)
	if p.Possible() || !cold {
		return p
	}
	r.Cold = true
	m.Agent = nil // its applications will have ended, so ignore them
	stopped := judge(r, m, hosts, model)
	stopped.Cold, stopped.Warm = true, p
	return stopped
}

func judge(r Request, m VMFacts, hosts []HostFacts, model *CostModel) *Plan {
	p := &Plan{VM: m, Reasons: againstVM(r, m)}
	var current GPUFacts
	var home HostFacts
	for _, h := range hosts {
		if h.Name == m.Host {
			home = h
		}
		if h.Name == m.Host && !r.Cold && r.far == nil && len(m.GPUs) > 0 {
			p.Reasons = append(p.Reasons, againstKeeping(m, h)...)
			p.Away = sum(m.Agent.away(nil))
		}
		for _, g := range h.GPUs {
			if len(m.GPUs) > 0 && g.ID == m.GPUs[0] {
				current = g
			}
		}
	}
	for _, h := range hosts {
		if reasons := append(againstHost(r, m, h), againstLocks(m, home, h)...); len(reasons) > 0 {
			p.Rejected = append(p.Rejected, Rejection{Host: h.Name, Reasons: reasons})
			continue
		}
		if len(m.GPUs) == 0 {
			c := Candidate{Host: h.Name}
			c.price(r, m, model, h)
			p.add(r, m, c)
			continue
		}
		fits := false
		for _, g := range h.GPUs {
			if g.ID == m.GPUs[0] {
				if r.To != g.ID || r.Verb != Migrate || r.Cold {
					continue
				}
				g.Holder, g.Health, g.IsCordoned = "", "", false // it is taken from the VM, reset and given back
			}
			reasons := againstGPU(r, m, current, g)
			if len(reasons) > 0 {
				p.Rejected = append(p.Rejected, Rejection{h.Name, g.ID, g.Model, reasons})
				continue
			}
			fits = true
			c := Candidate{Host: h.Name, GPU: g}
			c.price(r, m, model, h)
			p.add(r, m, c)
		}
		if !fits && len(h.GPUs) == 0 {
			p.Rejected = append(p.Rejected, Rejection{Host: h.Name, Reasons: []*gpuctlv1.Reason{because(ReasonNoCard, "host %s has no card", h.Name)}})
		}
	}
	sortCandidates(r.Verb, current, p.Candidates)
	p.Notes = notes(m, hosts, p.Candidates)
	return p
}

// againstLocks returns why the lock managers of the VM's host and another one do not permit
// the VM to be moved between them. Without the one at home, the VM could not go on there if
// the move failed.
func againstLocks(m VMFacts, home, to HostFacts) (out []*gpuctlv1.Reason) {
	if to.Name == m.Host {
		return nil
	}
	for _, h := range []HostFacts{home, to} {
		if h.LockManagerError != "" {
			out = append(out, because(ReasonLockManager, "libvirt's lock manager does not answer on host %s, and without it VM %s can neither run nor go on there (%s): systemctl start virtlockd.socket there, then systemctl restart libvirtd if file_lockspace_dir is set", h.Name, m.Name, h.LockManagerError))
		}
	}
	return out
}

// notes returns information for the operator that does not prevent the migration.
func notes(m VMFacts, hosts []HostFacts, candidates []Candidate) (out []*gpuctlv1.Reason) {
	if len(candidates) == 0 {
		return nil
	}
	for _, h := range hosts {
		if h.Name == candidates[0].Host && h.Hypervisor == "xen" && len(m.Agent.ofDriver()) > 0 {
			out = append(out, because(NoteSlot, "libvirt tells Xen of no address for a card that is plugged in: VM %s gets it on its first free slot, which as a rule is the one that its card had; if not, its CUDA programs that ask for the address of their GPU are told the old one", m.Name))
		}
	}
	if candidates[0].Host == m.Host {
		return out
	}
	bare := unlocked(m, hosts, candidates[0].Host)
	file := ""
	for _, h := range hosts {
		if slices.Contains(bare, h.Name) {
			file = map[string]string{"xen": "libxl.conf"}[h.Hypervisor]
		}
	}
	if len(m.Unlocked) > 0 {
		again := "virsh suspend and virsh resume on host " + m.Host + " lock it again, as does its move"
		if m.Type != "kvm" { // on Xen, libvirt asks for no locks when a VM goes on
			again = "its move locks it again, or its next start"
		}
		out = append(out, because(NoteUnlocked, "libvirt's lock manager on host %s has not locked %s of VM %s, so another host could start it: virtlockd was set up, killed or restarted after the VM was started; %s",
			m.Host, strings.Join(m.Unlocked, ", "), m.Name, again))
	}
	if len(bare) == 0 {
		return out
	}
	if protected(hosts, bare) {
		return append(out, because(NoteLockManager, "libvirt on Xen lets VM %s go on on host %s if the last answer of the live migration is lost, whatever its lock manager says: it may run on both hosts then, with the same disks; the lock manager only keeps it from being started twice",
			m.Name, m.Host))
	}
	return append(out, because(NoteLockManager, "libvirt has no lock manager on %s: if the last answer of the live migration is lost, VM %s may run on both hosts, with the same disks; lock_manager = \"lockd\" in /etc/libvirt/%s, and virtlockd on shared storage, keep it from that",
		strings.Join(bare, " and "), m.Name, cmp.Or(file, "qemu.conf")))
}

// unlocked returns which of the VM's host and its destination have no lock manager that
// prevents the VM from running on both after a lost answer. A VM that stays on its host needs
// none. On Xen the VM's host has none, whatever is configured: libvirt's driver resumes the VM
// there without regard to what the lock manager says (libxl_migration.c,
// libxlDomainMigrationSrcConfirm).
func unlocked(m VMFacts, hosts []HostFacts, to string) (out []string) {
	for _, h := range hosts {
		resumes := h.Name == m.Host && h.Hypervisor == "xen"
		if to != m.Host && (h.LockManager == "" || resumes) && (h.Name == m.Host || h.Name == to) {
			out = append(out, h.Name)
		}
	}
	return out
}

// protected reports whether all of these hosts have a lock manager, which does not suffice.
func protected(hosts []HostFacts, names []string) bool {
	return !slices.ContainsFunc(hosts, func(h HostFacts) bool { return h.LockManager == "" && slices.Contains(names, h.Name) })
}

// add adds a candidate if it meets the deadline.
func (p *Plan) add(r Request, m VMFacts, c Candidate) {
	if r.Deadline > 0 && c.Cost.Total > r.Deadline {
		p.Rejected = append(p.Rejected, Rejection{c.Host, c.GPU.ID, c.GPU.Model, []*gpuctlv1.Reason{because(ReasonLink,
			"moving %s of VM %s to host %s takes about %s, longer than %s: a faster link, or a later deadline, would do", size.Format(m.Memory), m.Name, c.Host, c.Cost.Total.Round(time.Second), r.Deadline)}})
		return
	}
	p.Candidates = append(p.Candidates, c)
}

// againstVM returns why the VM cannot be migrated at all.
func againstVM(r Request, m VMFacts) (out []*gpuctlv1.Reason) {
	add := func(when bool, code, format string, args ...any) {
		if when {
			out = append(out, because(code, format, args...))
		}
	}
	if m.Serves != "" { // what computes in it is neither frozen nor moved
		return []*gpuctlv1.Reason{because(ReasonServes, "%s", m.Serves)}
	}
	if r.Cold {
		return againstStopping(r, m)
	}
	add(m.Migration != "", ReasonBusy, "migration %s of VM %s runs already: gpuctl describe migration %s shows how far it is", m.Migration, m.Name, m.Migration)
	add(m.State != "running", ReasonNotRunning, "VM %s is %s: only a running VM can be moved with its applications", m.Name, m.State)
	add(m.Type == "pv", ReasonType, "VM %s is a PV guest: Xen cannot migrate it live; only HVM guests can part with a GPU", m.Name)
	add(len(m.GPUs) > 0 && m.Type == "pvh", ReasonType, "VM %s is a PVH guest: only HVM guests can have a GPU plugged in", m.Name)
	add(len(m.OtherDevices) > 0 && r.Verb == Migrate, ReasonOtherDevice, "VM %s has %s: a VM with a host device cannot be migrated; detach it first", m.Name, strings.Join(m.OtherDevices, ", "))
	if len(m.GPUs) == 0 {
		add(r.Verb != Migrate, ReasonNoGPU, "VM %s has no GPU that could be exchanged: gpuctl attach %s gives it one", m.Name, m.Name)
		return out
	}
	add(len(m.GPUs) > 1, ReasonSeveralGPUs, "VM %s has %d GPUs (%s); only VMs with one can be moved", m.Name, len(m.GPUs), strings.Join(m.GPUs, ", "))
	if m.Agent != nil {
		why := nameable(m.Name, m.Agent.Sessions)
		add(why != "", ReasonSessions, "%s", why)
	}
	if m.Agent != nil {
		for _, why := range m.Agent.stuck(m.Name) {
			add(true, ReasonCUDA, "%s", why)
		}
	}
	add(!m.Passthrough, ReasonPassthrough, "the definition of VM %s does not let it have devices plugged in: add <features><xen><passthrough state='on'/></xen></features> and start it anew", m.Name)
	if m.Agent == nil {
		add(true, ReasonAgentAbsent, "no gpuguest answers in VM %s (%s): install it there; without it nobody can save the state of its applications", m.Name, cmp.Or(m.AgentError, "no channel"))
		return out
	}
	a := m.Agent
	add(a.Protocol < Protocol, ReasonAgentOld, "gpuguest %s in VM %s speaks protocol %d, and %d is needed: install a newer one there", a.Version, m.Name, a.Protocol, Protocol)
	add(!a.Hotplug, ReasonHotplug, "VM %s cannot unplug PCI devices (%s): a detach that it does not answer cannot be undone", m.Name, cmp.Or(a.HotplugReason, "no hot-plug driver"))
	return out
}

// againstKeeping returns why there is no room for the state of the VM's applications, in
// the VM's memory or in that of its host h.
func againstKeeping(m VMFacts, h HostFacts) (out []*gpuctlv1.Reason) {
	if m.Agent == nil || h.Error != "" {
		return nil // other reasons cover this
	}
	a, need := m.Agent, sum(m.Agent.Sessions)
	away := sum(a.away(nil))
	if fixed := sum(a.ofDriver()); fixed > a.FreeMemory-min(a.FreeMemory, headroom) {
		return append(out, because(ReasonGuestMemory, "the state of the CUDA programs in VM %s takes %s of its memory, a tenth more than they have on the GPU, and %s is free, of which %s has to stay so: it can't leave the VM; end something there, or give it more memory",
			m.Name, size.Format(fixed), size.Format(a.FreeMemory), size.Format(headroom)))
	}
	what := fmt.Sprintf("the GPU state of VM %s takes %s more of its memory and %s is free", m.Name, size.Format(need), size.Format(a.FreeMemory))
	switch {
	case a.Protocol < AwayProtocol && need > a.FreeMemory && !h.Keeps, away > 0 && !h.Keeps:
		out = append(out, because(ReasonGuestMemory, "%s, and host %s keeps none of it (devices.stash): end something in the VM, or give it more memory", what, h.Name))
	case a.Protocol < AwayProtocol && need > a.FreeMemory:
		out = append(out, because(ReasonAwayOld, "%s, and gpuguest %s there cannot send it out to the host (it speaks protocol %d, which takes %d): install a newer one there, end something, or give it more memory",
			what, a.Version, a.Protocol, AwayProtocol))
	case away > h.Keep:
		out = append(out, notKept(m, away, h))
	}
	return out
}

func notKept(m VMFacts, away uint64, h HostFacts) *gpuctlv1.Reason {
	return because(ReasonStash, "%s of the GPU state of VM %s is more than its memory has room for, and host %s can keep %s (devices.stash): end something in the VM, or give it or the host more memory",
		size.Format(away), m.Name, h.Name, size.Format(h.Keep))
}

// againstStopping returns why the VM cannot be stopped and started elsewhere.
func againstStopping(r Request, m VMFacts) (out []*gpuctlv1.Reason) {
	add := func(when bool, code, format string, args ...any) {
		if when {
			out = append(out, because(code, format, args...))
		}
	}
	add(m.Migration != "", ReasonBusy, "migration %s of VM %s runs already: gpuctl describe migration %s shows how far it is", m.Migration, m.Name, m.Migration)
	add(!m.Persistent, ReasonTransient, "VM %s has no stored definition that it could be started from again", m.Name)
	add(m.State == "shutoff", ReasonNotRunning, "VM %s is shut off: nothing of it has to be moved; gpuctl attach --stored gives it another card", m.Name)
	add(len(m.OtherDevices) > 0 && r.Verb == Migrate, ReasonOtherDevice, "VM %s has %s, which its new host has not got: detach it first", m.Name, strings.Join(m.OtherDevices, ", "))
	add(len(m.GPUs) == 0 && r.Verb != Migrate, ReasonNoGPU, "VM %s has no GPU that could be exchanged: gpuctl attach %s gives it one", m.Name, m.Name)
	add(len(m.GPUs) > 1, ReasonSeveralGPUs, "VM %s has %d GPUs (%s); only VMs with one can be moved", m.Name, len(m.GPUs), strings.Join(m.GPUs, ", "))
	return out
}

// state returns how many bytes of GPU memory the VM's applications have.
func (m *VMFacts) state() (n uint64) {
	if m.Agent == nil {
		return 0
	}
	for _, s := range m.Agent.Sessions {
		n += s.Memory
	}
	return n
}

// againstHost returns why a host cannot take the VM, regardless of its cards.
func againstHost(r Request, m VMFacts, h HostFacts) (out []*gpuctlv1.Reason) {
	add := func(when bool, code, format string, args ...any) {
		if when {
			out = append(out, because(code, format, args...))
		}
	}
	here := h.Name == m.Host
	if r.Verb == Migrate && here && !strings.HasPrefix(r.To, h.Name+"/") {
		return []*gpuctlv1.Reason{because(ReasonSameHost, "VM %s is on host %s already", m.Name, h.Name)}
	}
	if r.Verb != Migrate && !here {
		return []*gpuctlv1.Reason{because(ReasonSameHost, "%s leaves VM %s on host %s: gpuctl migrate moves it", r.Verb, m.Name, m.Host)}
	}
	if r.To != "" && r.Verb == Migrate && r.To != h.Name && !strings.HasPrefix(r.To, h.Name+"/") && !r.names(h) {
		return []*gpuctlv1.Reason{because(ReasonHostState, "it is not %s", r.To)}
	}
	if h.Error != "" {
		return []*gpuctlv1.Reason{because(ReasonNoFacts, "host %s does not say what it has: %s", h.Name, h.Error)}
	}
	if here {
		return nil
	}
	add(h.State != "ready", ReasonHostState, "host %s is %s%s", h.Name, h.State, message(h.Message))
	add(h.Hypervisor != "xen" && strings.HasPrefix(m.Type, "hvm"), ReasonHypervisor, "host %s runs %s and VM %s needs xen", h.Name, h.Hypervisor, m.Name)
	add(h.Hypervisor == "xen" && m.Type == "kvm", ReasonHypervisor, "host %s runs xen and VM %s needs kvm", h.Name, m.Name)
	add(h.FreeMemory < m.Memory, ReasonMemory, "VM %s needs %s and host %s has %s free", m.Name, size.Format(m.Memory), h.Name, size.Format(h.FreeMemory))
	add(h.CPU != "" && !r.Cold, ReasonCPU, "VM %s has a processor that host %s cannot give it: %s", m.Name, h.Name, h.CPU)
	out = append(out, againstParts(r, m, h)...)
	missing := slices.DeleteFunc(slices.Clone(h.Missing), func(path string) bool {
		return !r.Cold && slices.ContainsFunc(m.Disks, func(d Disk) bool { return d.Path == path && d.Start })
	})
	add(len(missing) > 0, ReasonStorage, "host %s has not got %s of VM %s: it has to be shared, or copied there", h.Name, strings.Join(missing, ", "), m.Name)
	add(r.Cold && len(m.Stays) > 0, ReasonStays, "VM %s has %s, whose contents are on host %s only: stopped, and started on host %s, it would have an empty one; only a live migration takes it along", m.Name, strings.Join(m.Stays, " and "), m.Host, h.Name)
	add(m.Snapshots > 0, ReasonSnapshots, "libvirt has %d snapshots of VM %s, and takes it to no other host with them: delete them (virsh snapshot-delete, with --metadata if their contents are to be kept)", m.Snapshots, m.Name)
	add(r.Cold && m.Checkpoints > 0, ReasonSnapshots, "libvirt has %d checkpoints of VM %s, and does not let its definition go with them: delete them (virsh checkpoint-delete, with --metadata if backups still need them)", m.Checkpoints, m.Name)
	if away := sum(m.Agent.away(nil)); !r.Cold && r.far == nil && len(m.GPUs) > 0 && away > h.Keep {
		out = append(out, notKept(m, away, h))
	}
	add(h.Most > 0 && h.Migrations >= h.Most, ReasonLimit, "%d migrations from or to host %s run already, and no more than %d may", h.Migrations, h.Name, h.Most)
	return out
}

func message(s string) string {
	if s == "" {
		return ""
	}
	return " (" + s + ")"
}

// names reports whether To is a model that the host has.
func (r Request) names(h HostFacts) bool {
	return slices.ContainsFunc(h.GPUs, func(g GPUFacts) bool { return g.Model == r.To })
}

// againstGPU returns why a card does not fit for the VM's applications.
func againstGPU(r Request, m VMFacts, current, g GPUFacts) (out []*gpuctlv1.Reason) {
	add := func(when bool, code, format string, args ...any) {
		if when {
			out = append(out, because(code, format, args...))
		}
	}
	if r.To != "" && r.To != g.ID && r.To != g.Model && r.To != HostOf(g.ID) {
		return []*gpuctlv1.Reason{because(ReasonModel, "it is not %s", r.To)}
	}
	add(r.Verb == Upgrade && g.Rank <= current.Rank, ReasonModel, "%s (rank %d) is no higher model than %s (rank %d)", g.Model, g.Rank, current.Model, current.Rank)
	add(r.Verb == Downgrade && g.Rank >= current.Rank, ReasonModel, "%s (rank %d) is no lower model than %s (rank %d)", g.Model, g.Rank, current.Model, current.Rank)
	add(g.Holder != "", ReasonTaken, "%s belongs to %s", g.ID, g.Holder)
	add(r.far != nil && r.far.ID == g.ID, ReasonCandidate, "%s serves the applications of VM %s meanwhile", g.ID, m.Name)
	add(g.Health != "", ReasonHealth, "%s is not fit: %s", g.ID, g.Health)
	add(g.IsCordoned, ReasonCordoned, "%s is cordoned%s", g.ID, message(g.Cordoned))
	add(g.Isolation != "", ReasonIsolation, "%s may not be given away: %s", g.ID, g.Isolation)
	add(g.GuestLacks != "" && !r.Cold, ReasonGuestProfile, "VM %s cannot use a %s: %s", m.Name, g.Model, g.GuestLacks)
	if m.Agent == nil {
		return out
	}
	state := m.state()
	add(g.Memory > 0 && state > g.Memory, ReasonGPUMemory, "the applications of VM %s use %s and %s has %s", m.Name, size.Format(state), g.ID, size.Format(g.Memory))
	if cuda := m.Agent.ofDriver(); len(cuda) > 0 && current.Chip != "" {
		add(g.Chip != current.Chip, ReasonChip, "CUDA programs run in VM %s (%d) on a card %s, and %s is %s: NVIDIA's driver restores them on the same chip only", m.Name, len(cuda), current.Chip, g.ID, cmp.Or(g.Chip, "unknown"))
	}
	for _, s := range m.Agent.Sessions {
		if !s.Driver { // a chip of the same kind has the same limits
			out = append(out, outgrown(s, g)...)
		}
	}
	return out
}

// outgrown returns the limits of a card that a session has already exceeded.
func outgrown(s SessionFacts, g GPUFacts) (out []*gpuctlv1.Reason) {
	l, u := g.Limits, s.Need
	if l == nil || u == nil {
		return nil
	}
	for _, c := range []struct {
		what       string
		used, most uint64
	}{
		{"an allocation of %d bytes", u.GetLargestAlloc(), l.GetMaxAlloc()},
		{"work-groups of %d work-items", u.GetLargestWorkGroup(), l.GetMaxWorkGroupSize()},
		{"%d bytes of local memory", u.GetLocalMemory(), l.GetLocalMemory()},
	} {
		if c.most > 0 && c.used > c.most {
			out = append(out, because(ReasonLimits, "session %s (%s) uses "+c.what+" and %s has %d", s.ID, s.Command, c.used, g.ID, c.most))
		}
	}
	if u.GetImages() > 0 && l.GetGlobalMemory() > 0 && !l.GetImages() {
		out = append(out, because(ReasonLimits, "session %s (%s) uses images and %s has none", s.ID, s.Command, g.ID))
	}
	return out
}

// price sets the cost of a candidate.
func (c *Candidate) price(r Request, m VMFacts, model *CostModel, h HostFacts) {
	c.Cost, c.Steps = model.price(r, m, h.Name, c.GPU.ID, h.Link)
}

// sortCandidates sorts the best candidate first: for an upgrade the highest model, for a
// downgrade the lowest that fits, for a migration the same model or the nearest higher
// one; then the shortest downtime.
func sortCandidates(v Verb, current GPUFacts, all []Candidate) {
	distance := func(c Candidate) int64 {
		d := int64(c.GPU.Rank) - int64(current.Rank)
		switch {
		case v == Upgrade:
			return -int64(c.GPU.Rank)
		case v == Downgrade:
			return int64(c.GPU.Rank)
		case c.GPU.Model == current.Model:
			return -1
		case d >= 0:
			return d
		}
		return 1<<32 - d
	}
	slices.SortStableFunc(all, func(a, b Candidate) int {
		return cmp.Or(cmp.Compare(distance(a), distance(b)), cmp.Compare(a.Cost.Stop, b.Cost.Stop), cmp.Compare(a.Host, b.Host), cmp.Compare(a.GPU.ID, b.GPU.ID))
	})
}
