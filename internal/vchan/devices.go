package vchan

// Devices is what a domain can do with pages and event channels; Xen is the real
// one.
type Devices interface {
	// Grant allocates zeroed pages that one other domain may map.
	Grant(peer uint16, pages int) (Memory, error)
	// Map maps granted pages of another domain, one after the other. A grant
	// that is not there, or is another domain's, is an error.
	Map(domain uint16, refs []uint32, writable bool) (Memory, error)
	// BindUnbound makes an event channel that one other domain may bind to.
	BindUnbound(peer uint16) (Port, error)
	// BindInterdomain binds to an event channel of another domain, which must
	// be meant for this one and not be bound.
	BindInterdomain(domain uint16, port uint32) (Port, error)
}

// Memory is pages that are shared with another domain. Its methods are for one
// goroutine at a time.
type Memory interface {
	// Bytes is the memory; it must not be touched after Close.
	Bytes() []byte
	// Refs are the grants of the pages; nil for memory that was mapped.
	Refs() []uint32
	// NotifyOnUnmap has the kernel clear a byte and send an event when the
	// memory is unmapped, in whatever way this process ends.
	NotifyOnUnmap(offset int, port uint32) error
	Close() error
	// Abandon gives up memory without telling the kernel: its NotifyOnUnmap
	// names a port from before a migration.
	Abandon()
}

// Port is an event channel. Its methods may be called at once from several
// goroutines.
type Port interface {
	Number() uint32
	// Wait blocks until an event has come since the last Wait. After Close and
	// Abandon it fails.
	Wait() error
	// Notify sends an event to the other end, if there is one.
	Notify() error
	Close() error
	// Abandon makes Wait fail and leaves the channel as it is: it is one from
	// before a migration.
	Abandon()
}
