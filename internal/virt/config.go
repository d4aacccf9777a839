package virt

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Locks is libvirt's lock manager on this host, as it is configured. It prevents a VM that
// runs on another host from being started or resumed here.
type Locks struct {
	// Manager is its name, lockd or sanlock. Empty: there is none.
	Manager string
	// Folder has the files that virtlockd locks, named by the paths of the disks. Empty: it
	// locks the disks themselves.
	Folder string
	// Socket is where virtlockd answers.
	Socket string
	// others is set if it is not known what is locked for a disk.
	others bool
}

// LocksOf reads the configuration of libvirt's driver, and of its lock manager.
func LocksOf(root fs.FS, d Driver) Locks {
	name := map[Driver]string{Xen: "libxl", QEMU: "qemu"}[d]
	l := Locks{Socket: "/run/libvirt/virtlockd-sock"}
	l.Manager = settings(root, "etc/libvirt/"+name+".conf")["lock_manager"]
	if l.Manager == "nop" {
		l.Manager = ""
	}
	if l.Manager != "lockd" {
		return l
	}
	plugin := settings(root, "etc/libvirt/"+name+"-lockd.conf")
	l.Folder = plugin["file_lockspace_dir"]
	l.others = plugin["auto_disk_leases"] == "0" || plugin["lvm_lockspace_dir"] != "" || plugin["scsi_lockspace_dir"] != ""
	return l
}

// settings reads a file of libvirt's configuration: strings and numbers, one a line. There
// are none in a file that cannot be read: libvirt's defaults hold then.
func settings(root fs.FS, name string) map[string]string {
	out := map[string]string{}
	data, err := fs.ReadFile(root, name)
	if err != nil {
		return out
	}
	for line := range strings.Lines(string(data)) {
		line, _, _ = strings.Cut(line, "#")
		if key, value, ok := strings.Cut(line, "="); ok {
			out[strings.TrimSpace(key)] = strings.Trim(strings.TrimSpace(value), `"'`)
		}
	}
	return out
}

// Serves returns an error if the lock manager does not answer: then no domain can be started,
// resumed or received. Of managers other than virtlockd nothing is known.
func (l Locks) Serves(ctx context.Context) error {
	if l.Manager != "lockd" {
		return nil
	}
	const patience = 5 * time.Second
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "unix", l.Socket)
	if err != nil {
		return err
	}
	return conn.Close()
}

// Unlocked reports whether virtlockd has not locked a running domain's disk, as it should:
// it was killed since the domain was started, or was set up after that. Of what is not known
// for sure it reports false: disks that are no files, managers other than virtlockd.
func (l Locks) Unlocked(disk string) (bool, error) {
	if l.Manager != "lockd" || l.others {
		return false, nil
	}
	name := disk
	if l.Folder != "" {
		hash := sha256.Sum256([]byte(disk))
		name = filepath.Join(l.Folder, hex.EncodeToString(hash[:]))
	}
	is, err := os.Stat(name)
	switch {
	case l.Folder != "" && errors.Is(err, fs.ErrNotExist):
		return true, nil // it is removed with its lock
	case err != nil:
		return false, err
	case !is.Mode().IsRegular():
		return false, nil
	}
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return false, err
	}
	defer f.Close()
	// virtlockd locks the first byte, as a process. It is only asked for here.
	lock := unix.Flock_t{Type: unix.F_WRLCK, Len: 1}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock); err != nil {
		return false, fmt.Errorf("locks of %s: %w", name, err)
	}
	return lock.Type == unix.F_UNLCK, nil
}
