package migrate

import (
	"context"
	"errors"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
)

// Errors of a Site or a Journal wrap one of these where it applies.
var (
	// ErrUnreachable means that the host did not answer, so it is unknown whether the
	// step was done. The driver repeats it for some time.
	ErrUnreachable = errors.New("unreachable")
	// ErrStale means that another host drives the migration now. This driver stops.
	ErrStale = errors.New("another host drives it")
	// ErrRefused means that the cluster refuses the record.
	ErrRefused = errors.New("refused by the cluster")
	// ErrTaken means that somebody else has the GPU.
	ErrTaken = errors.New("taken")
)

// Presence is the state of a VM on a host.
type Presence int

// A VM is on one host, except while it migrates.
const (
	Absent  Presence = iota
	Running          // and able to answer
	Moving           // migrating to or from the host
	Stopped          // defined, or ended
	// Kept is a VM that libvirt has paused for a migration that is over, and could or would
	// not let go on: mostly because its lock manager says that the other host has it.
	Kept
)

func (p Presence) String() string {
	return [...]string{"absent", "running", "moving", "stopped", "kept paused"}[p]
}

// Progress is called with the progress of a step, in bytes. A total of 0 is unknown.
// waits is what the step waits for; empty: nothing.
type Progress func(done, total uint64, waits string)

// Freezing is which sessions of a VM are to be frozen, and how.
type Freezing struct {
	Sessions []string
	Away     []string // those whose state is kept on the hosts, not in the VM
	To       string   // the other host that keeps these states: the destination
	// Patience is how long running kernels may take to end; 0: the host's default.
	Patience time.Duration
}

// Site is a host that takes part in a migration. The driver calls it. Every call
// brings about a state and may be repeated: if the host is in that state already,
// the call returns nil. After an error that wraps ErrUnreachable nobody knows
// whether the step was done.
type Site interface {
	Parts

	// Where returns the VM's state on the host.
	Where(ctx context.Context, m vm.VM) (Presence, error)
	// Prepare takes a card from its driver, resets it and assigns it to the VM, by
	// a claim. It returns the PCI identity, by which a driver in the VM is chosen.
	Prepare(ctx context.Context, m vm.VM, gpu, claim string) (*gpuctlv1.PCIIdentity, error)
	// Expect makes the VM load the runtime for such a card in advance, while its
	// applications run.
	Expect(ctx context.Context, m vm.VM, id *gpuctlv1.PCIIdentity) error
	// Attach attaches an assigned card to the running VM; the hypervisor confirms
	// it. If stored, the VM's stored definition gets it, too. at is the address in the
	// VM that it gets, if the hypervisor can be told; empty: unknown.
	Attach(ctx context.Context, m vm.VM, gpu string, stored bool, at string) error
	// Detach detaches it; the hypervisor confirms it. The card is reset and stays
	// assigned to the VM. The stored definition does not have it any more. It returns
	// the address in the VM that the card had; empty: unknown.
	Detach(ctx context.Context, m vm.VM, gpu string) (at string, err error)
	// GiveBack makes a card free that was assigned to the VM.
	GiveBack(ctx context.Context, m vm.VM, gpu string) error
	// Pause pauses a VM that runs on another host, too. Unpause continues it.
	Pause(ctx context.Context, m vm.VM) error
	Unpause(ctx context.Context, m vm.VM) error
	// Move migrates the VM to another host.
	Move(ctx context.Context, m vm.VM, to string, report Progress) error

	// Stop ends the VM, which stays defined. Its card is reset and stays assigned
	// to it.
	Stop(ctx context.Context, m vm.VM, gpu string) error
	// Start starts the VM with a card that is assigned to it, or was before. If
	// stored, its stored definition has that card, and no other.
	Start(ctx context.Context, m vm.VM, gpu string, stored bool) error
	// Definition returns the VM's stored definition, without its cards. Define stores it
	// on another host, and Undefine removes it.
	Definition(ctx context.Context, m vm.VM) (xml string, err error)
	Define(ctx context.Context, m vm.VM, xml string) error
	Undefine(ctx context.Context, m vm.VM) error

	// Sessions returns the sessions that use a card, and how much room the VM has for
	// states.
	Sessions(ctx context.Context, m vm.VM) (*AgentFacts, error)
	// Freeze stops them at their next call. Their state is then in the VM's
	// memory. For sessions in Freezing.Away it is in the memory of this host and
	// of another one, and Freeze returns when both have all of it. A session that
	// has ended is left out.
	Freeze(ctx context.Context, m vm.VM, f Freezing, report Progress) error
	// Deposit copies the states that this host keeps to the host to.
	Deposit(ctx context.Context, m vm.VM, away []string, to string, report Progress) error
	// Forget removes the states of the VM's sessions that this host keeps.
	Forget(ctx context.Context, m vm.VM) error
	// Lend assigns a GPU of this host to a claim of the VM, so that the VM's sessions can
	// compute on it over the network. The error wraps ErrTaken if somebody else has it.
	Lend(ctx context.Context, m vm.VM, f Far) error
	// EndLend is its undo: it ends what computes there for the VM, and then the claim.
	EndLend(ctx context.Context, m vm.VM, f Far) error
	// Swap moves sessions of the VM, which is on this host, to a GPU that is lent to it.
	// The applications go on meanwhile, but for the downtime that it returns. patience is
	// how long running kernels may take to end; 0: the host's default.
	Swap(ctx context.Context, m vm.VM, f Far, sessions []string, patience time.Duration, report Progress) (stopped time.Duration, err error)
	// Home moves them to a card that the VM has.
	Home(ctx context.Context, m vm.VM, gpu string, sessions []string, patience time.Duration, report Progress) (stopped time.Duration, err error)
	// Release makes the VM's kernel release a card and confirm that it can be detached.
	Release(ctx context.Context, m vm.VM, gpu string) error
	// TakeUp is the undo of Release: the VM's kernel may use the card again.
	TakeUp(ctx context.Context, m vm.VM, gpu string) error
	// Await waits until the VM has found the card and a runtime works with it.
	Await(ctx context.Context, m vm.VM, gpu string) error
	// Thaw restores the frozen sessions on the card and resumes them. It uses the states
	// that this host keeps.
	Thaw(ctx context.Context, m vm.VM, gpu string, sessions []string, report Progress) error
	// Lost returns those of the given sessions that were lost in the VM, also if their
	// applications have ended since. Steps leave lost sessions out, and are done without them.
	Lost(ctx context.Context, m vm.VM, sessions []string) ([]*gpuctlv1.LostSession, error)
}

// Sites returns the sites of hosts. The calls of a host that is not known fail as those of
// one that does not answer.
type Sites interface {
	Site(host string) Site
}

// Claims binds GPUs to a VM in the cluster.
type Claims interface {
	// Reserve assigns exactly this GPU (HOST/NAME) to a claim. The error wraps ErrTaken
	// if somebody else has it.
	Reserve(ctx context.Context, claim string, m vm.VM, gpu string) error
	// EndClaim ends a claim. Its card is free already, or was never taken.
	EndClaim(ctx context.Context, claim string, m vm.VM, gpu string) error
}

// Journal writes the record of a migration, which is replicated to all hosts.
type Journal interface {
	// Put writes the record with its token, and returns it as it is stored. The error
	// wraps ErrStale if the token is not the record's any more, and ErrRefused if the
	// record violates a rule.
	Put(ctx context.Context, m *clusterv1.Migration) (*clusterv1.Migration, error)
}
