package vchan

// Devices are the operations of a domain on pages and event channels. Xen implements
// them.
type Devices interface {
	// Grant allocates zeroed pages that one other domain may map.
	Grant(peer uint16, pages int) (Memory, error)
	// Map maps granted pages of another domain, one after the other. If a grant does not
	// exist, or is for another domain, it returns an error.
	Map(domain uint16, refs []uint32, writable bool) (Memory, error)
	// BindUnbound makes an event channel to which one other domain may bind.
	BindUnbound(peer uint16) (Port, error)
	// BindInterdomain binds to an event channel of another domain. The channel must be
	// for this domain and not be bound.
	BindInterdomain(domain uint16, port uint32) (Port, error)
}

// Memory is memory that is shared with another domain. It must be used by one goroutine
// at a time.
type Memory interface {
	// Bytes returns the memory. It must not be accessed after Close.
	Bytes() []byte
	// Refs returns the grants of the pages; nil for mapped memory.
	Refs() []uint32
	// NotifyOnUnmap makes the kernel clear a byte and send an event when the memory is
	// unmapped, however this process ends.
	NotifyOnUnmap(offset int, port uint32) error
	Close() error
	// Abandon drops the memory without unmapping it: its NotifyOnUnmap names a port from
	// before a migration.
	Abandon()
}

// Port is an event channel. It is safe for concurrent use.
type Port interface {
	Number() uint32
	// Wait waits for an event since the last Wait. After Close and Abandon it returns an
	// error.
	Wait() error
	// Notify sends an event to the other end, if there is one.
	Notify() error
	Close() error
	// Abandon makes Wait fail, and leaves the channel open, because it is from before a
	// migration.
	Abandon()
}
