package main

import (
	"context"
	"log/slog"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/lease"
	"github.com/gpuctl/gpuctl/guest/session"
	"github.com/gpuctl/gpuctl/guest/vm/agent"
)

// vmLeases are the leases of a VM's cards. One that is nil belongs to a VM that lends nothing.
type vmLeases struct {
	*lease.Manager
	agent func() *agent.Agent
}

// newLeases listens for carriers if the VM lends its cards; otherwise it returns nil. The
// far executors have users and budgets as executors of the VM's own sessions have.
func newLeases(o vmOptions, launcher session.Launcher, a func() *agent.Agent, log *slog.Logger) (*vmLeases, error) {
	if o.Lend == "" {
		return nil, nil //nolint:nilnil // it lends nothing
	}
	m, err := lease.New(lease.Config{Dir: o.RunDir, Launcher: launcher, Logger: log, Listen: []string{o.Lend}})
	if err != nil {
		return nil, err
	}
	log.Info("the cards of this VM are lent to sessions of other VMs and hosts", "addresses", m.Addresses())
	return &vmLeases{Manager: m, agent: a}, nil
}

// Lend implements session.Lender: a card that is being released is not lent.
func (v *vmLeases) Lend(ctx context.Context, req *gpuctlv1.LendRequest) (*gpuctlv1.LendResponse, error) {
	end, err := v.agent().BeginLend(ctx, req.GetRuntime())
	if err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	defer end()
	return v.Manager.Lend(ctx, req)
}

func (v *vmLeases) forHost() session.Lender {
	if v == nil {
		return nil
	}
	return v
}

func (v *vmLeases) forAgent() agent.Lender {
	if v == nil {
		return nil
	}
	return v
}

func (v *vmLeases) Close() {
	if v != nil {
		v.Manager.Close()
	}
}
