package service

import (
	"context"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Names of engines, as the API has them.
const (
	Portable = "portable"
	Driver   = "driver"
)

// Engine serves sessions of one kind. Its errors are Connect's; a refusal, a roll-back and
// a held session are in the result, and no error.
type Engine interface {
	// Has reports whether the session is this engine's.
	Has(session string) bool
	// List returns the sessions, oldest first, with what they use now.
	List(ctx context.Context) []*gpuctlv1.Session
	// Lost returns the sessions that were lost, also those whose applications have ended
	// since. The oldest may be forgotten.
	Lost() []*gpuctlv1.LostSession
	// Watch calls send with each session, and then with each that changes, until ctx or
	// the engine ends or send fails. A session that has ended is sent once more.
	Watch(ctx context.Context, send func(*gpuctlv1.Session) error) error

	// Serves reports whether the engine can use such a target at all.
	Serves(target *gpuctlv1.Target) bool
	// Offer sets the target for applications with the offer's token.
	Offer(ctx context.Context, offer *gpuctlv1.OfferRequest) error
	// Withdraw removes an offer, if there is one.
	Withdraw(ctx context.Context, token string) error

	// Plan touches nothing, unless asked to build.
	Plan(ctx context.Context, req *gpuctlv1.PlanRequest) (*gpuctlv1.PlanResponse, error)
	// Swap, Suspend and Resume call sink with their progress. It does not block. The end of
	// ctx rolls them back, if they are not committed yet.
	Swap(ctx context.Context, req *gpuctlv1.SwapRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error)
	Suspend(ctx context.Context, req *gpuctlv1.SuspendRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error)
	Resume(ctx context.Context, req *gpuctlv1.ResumeRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error)
}

// Adopter is an engine that makes sessions of processes that run already.
type Adopter interface {
	Adopt(ctx context.Context, req *gpuctlv1.AdoptRequest) (*gpuctlv1.AdoptResponse, error)
}

// Folders is an engine that suspends sessions to folders, with their processes, and resumes
// them from there: a Suspend with the process, a Resume and a Plan with a folder.
type Folders interface {
	Engine
	Folders()
}

// Sender is an engine whose states can leave the VM and come back.
type Sender interface {
	TakeState(context.Context, *connect.Request[gpuctlv1.TakeStateRequest], *connect.ServerStream[gpuctlv1.StateChunk]) error
	KeptState(context.Context, *connect.Request[gpuctlv1.KeptStateRequest]) (*connect.Response[gpuctlv1.KeptStateResponse], error)
	GiveState(context.Context, *connect.ClientStream[gpuctlv1.GiveStateRequest]) (*connect.Response[gpuctlv1.GiveStateResponse], error)
}

// Loader is an engine that starts processes with a vendor's runtime.
type Loader interface {
	Probe(ctx context.Context, runtime *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error)
	Warm(ctx context.Context, runtime *gpuctlv1.Runtime) error
}

// Lender is an engine that lends GPUs of this host to sessions of others.
type Lender interface {
	Lend(ctx context.Context, req *gpuctlv1.LendRequest) (*gpuctlv1.LendResponse, error)
	EndLease(ctx context.Context, id string) error
	AllowFetch(ctx context.Context, req *gpuctlv1.AllowFetchRequest) (*gpuctlv1.AllowFetchResponse, error)
	EndFetch(id string) error
	Fetch(ctx context.Context, req *gpuctlv1.FetchRequest) error
	Leases() ([]*gpuctlv1.Lease, error)
}
