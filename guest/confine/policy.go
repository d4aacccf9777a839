package confine

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Policy is what a confined process can reach.
type Policy struct {
	Program string   // path of the process's program
	Read    []string // folders and files to read and run, in addition to the system's
	Write   []string // folders that belong to the process
	Network bool     // it may open connections: a carrier, which loads no library of a vendor
}

// Enter gives up all rights of the calling thread that the policy does not grant. This also
// holds for what the thread starts. Call it within OnThread.
func (p Policy) Enter() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	if err := dropCapabilities(); err != nil {
		return err
	}
	if err := p.restrictFiles(); err != nil {
		return err
	}
	return filterCalls(p.Network)
}

// Settle is what the confined process itself does before it loads code that it does not
// trust. tasks is how many threads and processes its user may have. 0 means that the
// process has no user of its own; then its user may inspect the process.
func Settle(tasks uint64) error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("no core dumps: %w", err)
	}
	if tasks == 0 {
		return nil
	}
	if err := unix.Setrlimit(unix.RLIMIT_NPROC, &unix.Rlimit{Cur: tasks, Max: tasks}); err != nil {
		return fmt.Errorf("at most %d tasks: %w", tasks, err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("not dumpable: %w", err)
	}
	return nil
}

// dropCapabilities clears the capability sets that survive an exec. Root's own capabilities
// are lost when the process changes its user, or at the exec because of the bounding set.
func dropCapabilities() error {
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("ambient capabilities: %w", err)
	}
	if os.Geteuid() != 0 {
		return nil
	}
	for c := uintptr(0); ; c++ {
		have, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0)
		if err != nil {
			break // the kernel has no more capabilities
		}
		if have == 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return fmt.Errorf("capability %d is not given up: %w", c, err)
		}
	}
	var data [2]unix.CapUserData
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capget(&head, &data[0]); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	data[0].Inheritable, data[1].Inheritable = 0, 0
	if err := unix.Capset(&head, &data[0]); err != nil {
		return fmt.Errorf("inheritable capabilities: %w", err)
	}
	return nil
}
