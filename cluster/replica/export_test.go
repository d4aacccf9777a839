package replica

import (
	"time"

	"github.com/hashicorp/raft"
)

// SmallFS is a folder of its own file system, of a size as mount(8) has it.
var SmallFS = small

// Promote makes a server a voter, as the leader's review does. It returns when that is
// committed.
func (s *Store) Promote(id, address string) error {
	return s.raft.AddVoter(raft.ServerID(id), raft.ServerAddress(address), 0, 10*time.Second).Error()
}
