package rundir

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// SocketName is hostd's socket in its folder.
const SocketName = "hostd.sock"

// Dirs is where to look, given the process's environment. The zero value knows
// only the system's folder.
type Dirs struct {
	XDG  string // $XDG_RUNTIME_DIR
	Temp string // the temporary folder
	UID  int
}

// FromEnv reads the environment.
func FromEnv(getenv func(string) string) Dirs {
	return Dirs{XDG: getenv("XDG_RUNTIME_DIR"), Temp: os.TempDir(), UID: os.Getuid()}
}

// Default is the folder of a daemon that was not told one.
func (d Dirs) Default() string {
	switch {
	case d.XDG != "":
		return filepath.Join(d.XDG, "gpuctl")
	case d.UID == 0:
		return "/run/gpuctl"
	default:
		return filepath.Join(d.Temp, "gpuctl-"+strconv.Itoa(d.UID))
	}
}

// Sockets are where a client looks for a daemon, in this order.
func (d Dirs) Sockets() []string {
	all := []string{filepath.Join(d.Default(), SocketName)}
	if system := filepath.Join("/run/gpuctl", SocketName); all[0] != system {
		all = append(all, system)
	}
	return all
}

// Private is the folder of a daemon that serves one client only.
func (d Dirs) Private(pid int) string {
	return filepath.Join(d.Default(), "private", strconv.Itoa(pid))
}

// Trusted is nil if what is in the folder of a socket was put there by this
// user or by root. Others can make folders below /tmp before their owner does.
func (d Dirs) Trusted(socket string) error {
	dir := filepath.Dir(socket)
	for _, path := range []string{dir, socket} {
		info, err := os.Lstat(path)
		if err != nil {
			return fmt.Errorf("run folder: %w", err)
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if !ok || int(stat.Uid) != d.UID && stat.Uid != 0 {
			return fmt.Errorf("%s belongs to another user: %w", path, fs.ErrPermission)
		}
		if path == dir && (!info.IsDir() || info.Mode().Perm()&0o022 != 0) {
			return fmt.Errorf("run folder %s can be written by others, or is no folder: %w", path, fs.ErrPermission)
		}
	}
	return nil
}

// PrivateSockets are those of the private daemons that answer now.
func (d Dirs) PrivateSockets() []string {
	if d.Trusted(filepath.Join(d.Default(), "private")) != nil {
		return nil
	}
	found, _ := filepath.Glob(filepath.Join(d.Default(), "private", "*", SocketName))
	var alive []string
	for _, socket := range found {
		if d.Trusted(socket) == nil && Answers(socket) {
			alive = append(alive, socket)
		}
	}
	return alive
}

// Sweep removes what private daemons and clients that were killed left behind.
func (d Dirs) Sweep() {
	if Own(d.Default()) != nil {
		return // what others have put there may lead anywhere
	}
	for _, pattern := range []string{"private/*", "vendors-*"} {
		found, _ := filepath.Glob(filepath.Join(d.Default(), pattern))
		for _, dir := range found {
			name := strings.TrimPrefix(filepath.Base(dir), "vendors-")
			number, _, _ := strings.Cut(name, "-")
			pid, err := strconv.Atoi(number)
			if err != nil || pid <= 0 || !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) || Answers(filepath.Join(dir, SocketName)) {
				continue
			}
			_ = os.RemoveAll(dir)
		}
	}
}

// Answers reports whether somebody listens on a unix socket.
func Answers(socket string) bool {
	conn, err := net.DialTimeout("unix", socket, time.Second)
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}

// Make creates a folder that only this user can look into, and refuses one that
// somebody else prepared. Through root's the users of executors can pass.
func Make(dir string) error {
	_, err := MakeNew(dir)
	return err
}

// MakeNew is Make that reports whether there was none before: the mode of one that
// was there is somebody else's to change.
func MakeNew(dir string) (made bool, err error) {
	mode := os.FileMode(0o700)
	if os.Geteuid() == 0 {
		mode = 0o711
	}
	if err := os.MkdirAll(filepath.Dir(dir), mode); err != nil {
		return false, fmt.Errorf("run folder: %w", err)
	}
	err = os.Mkdir(dir, mode)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return false, fmt.Errorf("run folder: %w", err)
	}
	made = err == nil
	if err := Own(dir); err != nil {
		return made, fmt.Errorf("run folder %w", err)
	}
	return made, nil
}

// Own is nil if nobody but this user and root can change what is in a folder,
// nor put another in its place.
func Own(dir string) error {
	path, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	if err := lasting(path, 0); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.IsDir() || owner(info) != os.Getuid() {
		return fmt.Errorf("%s belongs to somebody else, or is no folder: %w", dir, fs.ErrPermission)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s can be written by others: %w; if they have put nothing there: chmod go-w %[1]s", dir, fs.ErrPermission)
	}
	return nil
}

const maxLinks = 40 // as the kernel has it

// lasting is nil if a path goes on naming what it does whatever others do: who
// may write to a folder may rename what is in it, except where only its owner may.
func lasting(path string, links int) error {
	if links > maxLinks {
		return syscall.ELOOP
	}
	at := "/"
	parts := strings.Split(strings.Trim(path, "/"), "/")
	for i := 0; ; i++ {
		info, err := os.Lstat(at)
		if err != nil {
			return err
		}
		if uid := owner(info); uid != os.Getuid() && uid != 0 {
			return fmt.Errorf("%s belongs to another user, who could put something else there: %w", at, fs.ErrPermission)
		}
		if info.Mode()&fs.ModeSymlink != 0 {
			target, err := os.Readlink(at)
			if err != nil {
				return err
			}
			if !filepath.IsAbs(target) {
				target = filepath.Join(filepath.Dir(at), target)
			}
			return lasting(filepath.Join(target, filepath.Join(parts[i:]...)), links+1)
		}
		if i == len(parts) {
			return nil
		}
		if info.Mode().Perm()&0o022 != 0 && info.Mode()&fs.ModeSticky == 0 {
			return fmt.Errorf("others can write to %s, and put something else there: %w", at, fs.ErrPermission)
		}
		at = filepath.Join(at, parts[i])
	}
}

// owner is a file's user; -1: not known.
func owner(info fs.FileInfo) int {
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return int(stat.Uid)
	}
	return -1
}

// Listen opens a unix socket with mode 0600. A socket that nobody serves any
// more is replaced; one in use is an error.
func Listen(path string) (net.Listener, error) {
	if Answers(path) {
		return nil, fmt.Errorf("socket %s: another daemon is using it", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		if errors.Is(err, syscall.EINVAL) {
			return nil, fmt.Errorf("socket %s: the path is longer than a socket's may be (107 bytes)", path)
		}
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	return l, nil
}
