package replica

import (
	"testing"

	"github.com/hashicorp/raft"
)

// Raft takes what an operator may stretch its timeouts to.
func TestStretched(t *testing.T) {
	for n := 1; n <= 10; n++ {
		c := Config{ID: "h-1", Name: "h1", Address: "h1:7650", Timing: Fast().Stretched(n)}
		if err := c.fill(); err != nil {
			t.Fatal(err)
		}
		if err := raft.ValidateConfig(c.raft()); err != nil {
			t.Errorf("%d times: %v", n, err)
		}
		if got, want := c.raft().HeartbeatTimeout, Fast().Heartbeat; int(got/want) != n {
			t.Errorf("%d times: %v", n, got)
		}
	}
}
