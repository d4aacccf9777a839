package confine

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// forbidden returns system calls that no OpenCL runtime needs: those that inspect other
// processes, change what the process sees of the system, have a large attack surface in the
// kernel, or create objects that outlive a session. It is a list of denied calls, because
// vendors' libraries use more calls than anybody can foresee.
func forbidden() []uint32 {
	return append([]uint32{
		// Other processes.
		unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PROCESS_MADVISE, unix.SYS_PIDFD_GETFD, unix.SYS_KCMP,
		// File systems and namespaces.
		unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE, unix.SYS_FSOPEN,
		unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR, unix.SYS_UNSHARE, unix.SYS_SETNS,
		unix.SYS_NAME_TO_HANDLE_AT, unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_FANOTIFY_INIT, unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD,
		// The kernel.
		unix.SYS_BPF, unix.SYS_USERFAULTFD, unix.SYS_PERF_EVENT_OPEN, unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER,
		unix.SYS_KEYCTL, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE,
		unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD, unix.SYS_REBOOT, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_SYSLOG, unix.SYS_ACCT, unix.SYS_VHANGUP,
		unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_CLOCK_ADJTIME, unix.SYS_ADJTIMEX, unix.SYS_SETHOSTNAME, unix.SYS_SETDOMAINNAME,
		// Objects that outlive their process.
		unix.SYS_SHMGET, unix.SYS_SHMAT, unix.SYS_SHMCTL, unix.SYS_SEMGET, unix.SYS_SEMCTL, unix.SYS_MSGGET, unix.SYS_MSGCTL, unix.SYS_MQ_OPEN,
	}, forbiddenHere()...)
}

// forbiddenRequests returns requests of ioctl that can write input to a terminal.
func forbiddenRequests() []uint32 { return []uint32{unix.TIOCSTI, unix.TIOCLINUX, unix.TIOCSCTTY} }

const newNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// Offsets in struct seccomp_data: the low halves of the arguments, little-endian.
const (
	offCall = 0
	offArch = 4
	offArg0 = 16
	offArg1 = 24
)

// filter returns the list as a BPF program. With network, sockets of IP are allowed, too.
func filter(network bool) ([]unix.SockFilter, error) {
	const word = 4
	var (
		allow   = bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW}
		deny    = bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)}
		missing = bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)}

		families = [2]uint32{unix.AF_UNIX, unix.AF_UNIX}
	)
	if network {
		families = [2]uint32{unix.AF_INET, unix.AF_INET6}
	}
	p := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offArch, Size: word},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: auditArch, SkipTrue: 1},
		missing, // system calls of other architectures have other numbers
		bpf.LoadAbsolute{Off: offCall, Size: word},
		bpf.JumpIf{Cond: bpf.JumpLessThan, Val: x32Calls, SkipTrue: 1},
		missing,
		// The flags of clone3 are in memory, which a filter can't read. Libraries fall back
		// to clone.
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_CLONE3, SkipTrue: 1},
		missing,
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_CLONE, SkipTrue: 4},
		bpf.LoadAbsolute{Off: offArg0, Size: word},
		bpf.JumpIf{Cond: bpf.JumpBitsNotSet, Val: newNamespaces, SkipTrue: 1},
		deny,
		allow,
		// Runtimes connect to their own daemons at most, so only unix sockets are allowed.
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_SOCKET, SkipTrue: 6},
		bpf.LoadAbsolute{Off: offArg0, Size: word},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_UNIX, SkipTrue: 3},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: families[0], SkipTrue: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: families[1], SkipTrue: 1},
		bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(unix.EAFNOSUPPORT)},
		allow,
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_IOCTL, SkipTrue: uint8(2*len(forbiddenRequests()) + 2)},
		bpf.LoadAbsolute{Off: offArg1, Size: word},
	}
	for _, r := range forbiddenRequests() {
		p = append(p, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: r, SkipTrue: 1}, deny)
	}
	p = append(p, allow)
	for _, call := range forbidden() {
		p = append(p, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: call, SkipTrue: 1}, deny)
	}
	raw, err := bpf.Assemble(append(p, allow))
	if err != nil {
		return nil, fmt.Errorf("seccomp: %w", err)
	}
	program := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		program[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	return program, nil
}

// filterCalls denies the forbidden system calls to the calling thread.
func filterCalls(network bool) error {
	program, err := filter(network)
	if err != nil {
		return err
	}
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if _, _, e := syscall.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog))); e != 0 {
		return fmt.Errorf("seccomp: %w", e)
	}
	return nil
}
