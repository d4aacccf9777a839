package vm

// VM is a virtual machine. Its UUID, in lower case, identifies it. Its name is for people
// and may change.
type VM struct{ UUID, Name string }

// Info is what libvirt reports about a VM.
type Info struct {
	VM
	State      string // running, paused, shutoff, …
	Type       string // hvm, pvh, pv or kvm
	Memory     uint64 // bytes
	CPUs       uint32
	Persistent bool // it has a stored definition
}

// Active reports whether the hypervisor has a domain for the VM.
func (i Info) Active() bool { return i.State != "shutoff" && i.State != "crashed" && i.State != "" }
