package replica_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/clustertest"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// TestACommandThatTheStateHasForgottenIsNotSentAgain: the answer to a host is lost, and it is cut off
// until the state does not know its command any more. It must not be applied once more then: here,
// the claim that it has made was deleted meanwhile.
func TestACommandThatTheStateHasForgottenIsNotSentAgain(t *testing.T) {
	ctx := testkit.Context(t) // not beside others: it makes much work for a short time
	c := clustertest.New(t, clustertest.Options{Nodes: 3, GPUs: 1})
	leader := c.Leader(ctx)
	var away *clustertest.Node
	for _, n := range c.Nodes {
		if n != leader {
			away = n
		}
	}
	for _, n := range c.Nodes {
		if n != away {
			c.Network.Set(n.Address, away.Address, clustertest.Link{Cut: true})
		}
	}
	answer := make(chan error, 1)
	go func() {
		cmd := whole("x", leader.Name+"/g0")
		cmd.Id = "once"
		_, err := away.Store().Apply(ctx, cmd)
		answer <- err
	}()
	c.Until(ctx, "the claim is made", func() error {
		return testkit.Want(leader.Store().State().View().Claim("x") != nil)
	})
	as := leader.Store().State().View().Claim("x").GetAssignments()[0]
	token := leader.Store().State().View().Assignment(as).GetToken()
	c.Must(ctx, leader, &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: "x"}}})
	c.Must(ctx, leader, &clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{ConfirmAssignments: &clusterv1.ConfirmAssignments{
		Host: leader.Name, Confirmations: []*clusterv1.Confirmation{{Assignment: as, Token: token, Gone: true}},
	}}})
	fill(ctx, t, leader.Store())
	c.Network.Heal()
	c.Network.Set(leader.Address, away.Address, clustertest.Link{Delay: 10 * time.Millisecond}) // it is behind for some time
	if err := <-answer; !errors.Is(err, replica.ErrTimeout) {
		t.Errorf("it is not known what has become of the command, but: %v", err)
	}
	v, err := leader.Store().Read(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	if v.Claim("x") != nil {
		t.Error("the claim is there again")
	}
}

// fill has the state forget all answers.
func fill(ctx context.Context, t *testing.T, s *replica.Store) {
	const many, together = 4200, 100
	var wg sync.WaitGroup
	for i := range together {
		wg.Go(func() {
			for j := range many / together {
				if _, err := s.Apply(ctx, note(fmt.Sprint(i, j))); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}
