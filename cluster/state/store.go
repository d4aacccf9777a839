package state

import (
	"sync"
	"sync/atomic"

	"github.com/hashicorp/go-memdb"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// Protocol is the highest command version that this version of gpuctl applies. Versions
// above 1 add:
//
//	2  identities with an enrolment
//	3  claims with a home, links, and the queue's policy
//	4  parts of mediated GPUs
//	5  migrations of VMs with a remote GPU, or with parts of mediated GPUs
//	6  GPUs of service VMs
//	7  records of VMs' migrations that are refused if they come late
const Protocol = ProtocolMoves

// ProtocolEnrolments is the lowest version that knows enrolments, and ProtocolRemote that
// which knows claims with a home, links, and policies of the queue.
const (
	ProtocolEnrolments = 2
	ProtocolRemote     = 3
)

// ProtocolMediated is the lowest version that knows parts of mediated GPUs.
const ProtocolMediated = 4

// ProtocolLive is the lowest version that knows migrations of VMs with a remote GPU, or with
// parts of mediated GPUs.
const ProtocolLive = 5

// ProtocolService is the lowest version that knows GPUs of service VMs. Hosts below it would
// give them to sessions of their own host.
const ProtocolService = 6

// ProtocolMoves is the version of a command with a record of a VM's migration that is refused if
// it comes late: if another one of that VM has begun, or if the record that it is to replace has
// been replaced already. Hosts below it would store it all the same.
const ProtocolMoves = 7

// Store has the current state. It is safe for concurrent use: Apply and Restore run one
// after the other, and views never wait.
type Store struct {
	mu      sync.Mutex // held during writes
	db      *memdb.MemDB
	current atomic.Pointer[View]

	watch    sync.Mutex
	touched  map[mask]uint64        // epoch of the last change, by a mask with one kind
	watchers map[mask]chan struct{} // one channel for all who wait for the same kinds
}

// mask is a set of kinds. Bit 0 stands for objects without a kind: identities, join
// tokens and events.
type mask uint32

const anything mask = 1<<32 - 1

func maskOf(kinds []clusterv1.Kind) mask {
	if len(kinds) == 0 {
		return anything
	}
	var m mask
	for _, k := range kinds {
		if k > 0 && k < 32 {
			m |= 1 << k
		}
	}
	return m
}

// New returns an empty state.
func New() *Store {
	s := &Store{touched: map[mask]uint64{}, watchers: map[mask]chan struct{}{}}
	s.db = newDB()
	s.publish(meta{}, 0, &past{})
	return s
}

func newDB() *memdb.MemDB {
	db, err := memdb.NewMemDB(schema())
	if err != nil {
		schemaError(err)
	}
	// A snapshot does not track which tables its transactions change: the store has its
	// own watches, by kind.
	return db.Snapshot()
}

// View returns the present state.
func (s *Store) View() *View { return s.current.Load() }

// publish makes the committed state visible, and wakes who waits for these kinds.
func (s *Store) publish(m meta, changed mask, p *past) {
	epoch := uint64(1)
	if v := s.current.Load(); v != nil {
		epoch = v.epoch + 1
	}
	v := &View{reader: reader{s.db.Txn(false)}, meta: m, store: s, epoch: epoch, past: p}
	s.watch.Lock()
	defer s.watch.Unlock()
	s.current.Store(v)
	if changed == 0 {
		return
	}
	for bit := mask(1); bit != 0; bit <<= 1 {
		if changed&bit != 0 {
			s.touched[bit] = epoch
		}
	}
	for m, ch := range s.watchers {
		if m&changed != 0 {
			close(ch)
			delete(s.watchers, m)
		}
	}
}

func (s *Store) changed(since uint64, m mask) <-chan struct{} {
	s.watch.Lock()
	defer s.watch.Unlock()
	for bit, epoch := range s.touched {
		if m&bit != 0 && epoch > since {
			ch := make(chan struct{})
			close(ch)
			return ch
		}
	}
	ch, ok := s.watchers[m]
	if !ok {
		ch = make(chan struct{})
		s.watchers[m] = ch
	}
	return ch
}
