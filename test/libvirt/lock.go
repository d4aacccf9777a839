package libvirt

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// Locks is what the lock manager of a rig's libvirtds locks: virtlockd, one on
// each host. All hosts see the same files, and the kernel tells one virtlockd's
// locks from the other's by their processes.
type Locks int

const (
	// NoLocks is no lock manager: libvirt's default.
	NoLocks Locks = iota
	// DiskLocks are locks on the disks themselves.
	DiskLocks
	// FolderLocks are locks on files in a folder that all hosts share.
	FolderLocks
)

// Leases is the folder of FolderLocks; empty: there is none.
func (r *Rig) Leases() string {
	if r.Locks != FolderLocks {
		return ""
	}
	return filepath.Join(r.Dir, "leases")
}

// unguarded is a qemu that does not lock the files of its disks by itself, as
// Xen's, and as any where the storage has no such locks. So it is the lock
// manager that keeps a guest from running twice, or nobody.
const unguarded = `#!/bin/bash
exec /usr/bin/qemu-system-x86_64 "${@//'"driver":"file",'/'"driver":"file","locking":"off",'}"
`

// lock sets up the lock manager of every host and starts it.
func (r *Rig) lock() error {
	if r.Locks == NoLocks {
		return nil
	}
	r.emulator = filepath.Join(r.Dir, "qemu-system-x86_64")
	if err := os.WriteFile(r.emulator, []byte(unguarded), 0o755); err != nil {
		return err
	}
	plugin := ""
	if dir := r.Leases(); dir != "" {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
		plugin = fmt.Sprintf("file_lockspace_dir = %q\n", dir)
	}
	for _, h := range r.Hosts {
		conf, err := os.OpenFile(filepath.Join(h.dir, "etc/qemu.conf"), os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = conf.WriteString("lock_manager = \"lockd\"\n")
		if err = errors.Join(err, conf.Close()); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(h.dir, "etc/qemu-lockd.conf"), []byte(plugin), 0o644); err != nil {
			return err
		}
		if err := h.StartLocker(); err != nil {
			return err
		}
	}
	return nil
}

// StartLocker starts virtlockd, also again after KillLocker, and waits until it listens.
func (h *Host) StartLocker() error {
	var err error
	if h.locker, err = h.serve("/usr/sbin/virtlockd"); err != nil {
		return err
	}
	return h.listens("virtlockd", h.LockSocket())
}

// LockSocket is where virtlockd listens, as seen from outside.
func (h *Host) LockSocket() string { return filepath.Join(h.dir, "run/libvirt/virtlockd-sock") }

// LockerPID is the process id of virtlockd, as seen from outside.
func (h *Host) LockerPID() (int, error) {
	pid, err := child(h.locker.Process.Pid)
	if err != nil {
		return 0, fmt.Errorf("host %s: virtlockd: %w", h.Name, err)
	}
	return pid, nil
}

// KillLocker ends virtlockd as kill -9 does, and waits for that. The kernel takes
// back all its locks; guests go on.
func (h *Host) KillLocker() error {
	pid, err := h.LockerPID()
	if err == nil {
		err = syscall.Kill(pid, syscall.SIGKILL)
	}
	if err != nil {
		return err
	}
	ended(h.locker)
	return nil
}

// RenewLocker has virtlockd replace itself by a new one, which keeps its locks, as
// systemctl reload does.
func (h *Host) RenewLocker() error {
	pid, err := h.LockerPID()
	if err != nil {
		return err
	}
	return syscall.Kill(pid, syscall.SIGUSR1)
}
