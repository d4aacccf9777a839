// Package fuzz has the fuzz target of connections over RDMA, which are C: what one takes from its other end.
// make fuzz-c runs it.
package fuzz

import (
	"testing"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// Among them: a stream that is read as it was sent, a message that says another size than it has, one that gives
// back more than was used, one that says nothing, one after the last, and messages after one that was refused.
func TestAHostileEndsMessagesAreTakenAsTheyAreOrNotAtAll(t *testing.T) { testkit.Replay(t, 5) }
