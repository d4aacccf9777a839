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

// Answers says whether somebody listens on a unix socket.
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

// MakeNew is Make that says whether there was none before: the mode of one that
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
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() || owner(info) != os.Getuid() {
		return fmt.Errorf("%s belongs to somebody else, or is no folder: %w", dir, fs.ErrPermission)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s can be written by others: %w; chmod go-w %[1]s, if they have put nothing there", dir, fs.ErrPermission)
	}
	path, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	return lasting(path, dir)
}

// lasting is nil if what a path names stays so for all that others can do:
// those who may write to a folder may rename what is in it, except where only
// its owner may.
func lasting(path, dir string) error {
	links := false
	for {
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		if uid := owner(info); uid != os.Getuid() && uid != 0 {
			return fmt.Errorf("%s lies below %s, which belongs to another user: %w", dir, path, fs.ErrPermission)
		}
		link := info.Mode()&fs.ModeSymlink != 0
		if !link && info.Mode().Perm()&0o022 != 0 && info.Mode()&fs.ModeSticky == 0 {
			return fmt.Errorf("%s lies below %s, which others can write to: %w", dir, path, fs.ErrPermission)
		}
		links = links || link
		up := filepath.Dir(path)
		if up == path {
			break
		}
		path = up
	}
	if !links {
		return nil
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return err
	}
	if real, err = filepath.Abs(real); err != nil {
		return err
	}
	return lasting(real, dir)
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
