package migrate

import (
	"context"
	"errors"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
)

// What an error of a site or journal is, beside what it says.
var (
	// ErrUnreachable: nobody knows whether it was done. It is tried again for
	// a while.
	ErrUnreachable = errors.New("unreachable")
	// ErrStale: another host drives the migration now. Nothing more is done.
	ErrStale = errors.New("another host drives it")
	// ErrRefused: the cluster does not keep such a record.
	ErrRefused = errors.New("refused by the cluster")
	// ErrTaken: somebody else has the GPU.
	ErrTaken = errors.New("taken")
)

// Presence is what a host knows of a VM.
type Presence int

// A VM is at one host, but for the moment in which it moves.
const (
	Absent  Presence = iota
	Running          // and able to answer
	Moving           // on its way in or out
	Stopped          // defined, or ended
)

func (p Presence) String() string {
	return [...]string{"absent", "running", "moving", "stopped"}[p]
}

// Progress hears how far a step is; total 0: not known. waits says what it waits
// for, if for anything.
type Progress func(done, total uint64, waits string)

// Freezing is which sessions of a VM are to be frozen, and how.
type Freezing struct {
	Sessions []string
	Away     []string // those of them whose state leaves the VM
	To       string   // host that keeps these states, too
	// Patience is how long what they have launched may take to end; 0: the
	// host's.
	Patience time.Duration
}

// Site is a host as the driver of a migration reaches it. Every call brings
// about what its name says and may be repeated: where it is so already it
// returns nil. An error that wraps ErrUnreachable leaves open whether it has
// happened.
type Site interface {
	// Where says what the host knows of the VM.
	Where(ctx context.Context, m vm.VM) (Presence, error)
	// Prepare takes a card from whoever drives it, resets it and holds it for
	// the VM, by a claim. It returns what a driver in the VM will choose it by.
	Prepare(ctx context.Context, m vm.VM, gpu, claim string) (*gpuctlv1.PCIIdentity, error)
	// Expect has the VM load what will serve such a card, while its applications
	// run.
	Expect(ctx context.Context, m vm.VM, id *gpuctlv1.PCIIdentity) error
	// Attach plugs a held card into the running VM; the hypervisor confirms it.
	// If stored the VM's stored definition gets it, too.
	Attach(ctx context.Context, m vm.VM, gpu string, stored bool) error
	// Detach unplugs it; the hypervisor confirms it. The card is reset and
	// stays held for the VM, whose stored definition does not have it any more.
	Detach(ctx context.Context, m vm.VM, gpu string) error
	// GiveBack makes a card free that was held for the VM.
	GiveBack(ctx context.Context, m vm.VM, gpu string) error
	// Pause stops a VM that runs on another host, too; Unpause lets it go on.
	Pause(ctx context.Context, m vm.VM) error
	Unpause(ctx context.Context, m vm.VM) error
	// Move sends the VM to another host.
	Move(ctx context.Context, m vm.VM, to string, report Progress) error

	// Stop ends the VM, which stays defined; its card is reset and stays held
	// for it.
	Stop(ctx context.Context, m vm.VM, gpu string) error
	// Start has the VM run with a card that is held for it, or was before. Its
	// stored definition has that card if stored, and no other.
	Start(ctx context.Context, m vm.VM, gpu string, stored bool) error
	// Definition is what the VM is started from, without its cards; Define and
	// Undefine give it to another host and take it away.
	Definition(ctx context.Context, m vm.VM) (xml string, err error)
	Define(ctx context.Context, m vm.VM, xml string) error
	Undefine(ctx context.Context, m vm.VM) error

	// Sessions are those of the VM's applications that use a card, and what the
	// VM has room for.
	Sessions(ctx context.Context, m vm.VM) (*AgentFacts, error)
	// Freeze stops them at their next call and has their state in the VM's
	// memory or, of those that are away, in that of this host and of another one:
	// it is done when both have all of it. One that has ended is none.
	Freeze(ctx context.Context, m vm.VM, f Freezing, report Progress) error
	// Deposit sees to it that the host to has what this one has of the frozen
	// sessions that are away.
	Deposit(ctx context.Context, m vm.VM, away []string, to string, report Progress) error
	// Forget drops what this host has of the VM's sessions.
	Forget(ctx context.Context, m vm.VM) error
	// Release has the VM's kernel let go of a card, and confirm that it can be
	// unplugged.
	Release(ctx context.Context, m vm.VM, gpu string) error
	// TakeUp lets the VM's kernel have it again.
	TakeUp(ctx context.Context, m vm.VM, gpu string) error
	// Await returns when the VM has found the card and a runtime serves it.
	Await(ctx context.Context, m vm.VM, gpu string) error
	// Thaw puts the frozen sessions on the card and lets them go on. The state
	// of those that are away comes from this host.
	Thaw(ctx context.Context, m vm.VM, gpu string, sessions []string, report Progress) error
}

// Sites finds hosts.
type Sites interface {
	Site(host string) (Site, error)
}

// Claims binds GPUs to a VM in the cluster.
type Claims interface {
	// Reserve binds a claim to exactly this GPU (HOST/NAME). An error that
	// wraps ErrTaken says that somebody else has it.
	Reserve(ctx context.Context, claim string, m vm.VM, gpu string) error
	// EndClaim ends a claim. Its card is free already, or was never taken.
	EndClaim(ctx context.Context, claim string, m vm.VM, gpu string) error
}

// Journal keeps the record of a migration on every host.
type Journal interface {
	// Put writes the record, with its token; the answer is the record as it is
	// kept. An error that wraps ErrStale says that the token is not the
	// record's any more, one that wraps ErrRefused that the record breaks a rule.
	Put(ctx context.Context, m *clusterv1.Migration) (*clusterv1.Migration, error)
}
