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

	"golang.org/x/sys/unix"
)

// SocketName is the name of hostd's socket in its folder.
const SocketName = "hostd.sock"

// Dirs has the folders of the process's environment. The zero value has only the system's
// folder.
type Dirs struct {
	XDG  string // $XDG_RUNTIME_DIR
	Temp string // the temporary folder
	UID  int
}

// FromEnv returns the folders of an environment.
func FromEnv(getenv func(string) string) Dirs {
	return Dirs{XDG: getenv("XDG_RUNTIME_DIR"), Temp: os.TempDir(), UID: os.Getuid()}
}

// Default returns the folder of a daemon for which none was configured.
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

// Sockets returns the paths at which a client looks for a daemon, in this order.
func (d Dirs) Sockets() []string {
	all := []string{filepath.Join(d.Default(), SocketName)}
	if system := filepath.Join("/run/gpuctl", SocketName); all[0] != system {
		all = append(all, system)
	}
	return all
}

// Private returns the folder of a daemon that serves one client only.
func (d Dirs) Private(pid int) string {
	return filepath.Join(d.Default(), "private", strconv.Itoa(pid))
}

// Trusted returns an error unless only this user and root can change the content of a
// socket's folder. Other users can make folders below /tmp before their owner does.
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

// PrivateSockets returns the sockets of the private daemons that run now.
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

// Sweep removes what killed private daemons and clients have left.
func (d Dirs) Sweep() {
	if Own(d.Default()) != nil {
		return // others may have put links there
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

// Answers reports whether a process listens on a Unix socket. The kernel says so at once, and
// no clock is asked: a machine that is too busy for this process must not make another one look dead.
func Answers(socket string) bool {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return true // nothing is known, so nobody's socket is taken away
	}
	defer func() { _ = unix.Close(fd) }()
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
	return err == nil || errors.Is(err, unix.EAGAIN) // more wait than the process has taken yet
}

// Make makes a folder that only this user can read, and refuses one that another user has
// made. If the user is root, other users can pass through it, but not list it.
func Make(dir string) error {
	_, err := MakeNew(dir)
	return err
}

// MakeNew does the same as Make, and reports whether the folder is new. The caller must
// not change the mode of a folder that existed.
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

// Own returns an error unless only this user and root can change a folder's content or
// replace the folder.
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

const maxLinks = 40 // the limit of Linux

// lasting returns an error unless only this user and root can change what a path names.
// Whoever can write to a folder can rename its content, except in folders with the sticky
// bit.
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

// owner returns the user id of a file's owner; -1: unknown.
func owner(info fs.FileInfo) int {
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return int(stat.Uid)
	}
	return -1
}

// Listen opens a Unix socket with mode 0600. It replaces a socket on which no process
// listens. A socket that is in use is an error, and so is a name that is not a socket's.
func Listen(path string) (*net.UnixListener, error) { return ListenMode(path, 0o600) }

// Lock keeps others that lock a folder from it, until unlock is called or the process ends.
func Lock(dir string) (unlock func(), err error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
		_ = d.Close()
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return func() { _ = d.Close() }, nil
}

// ListenMode does the same for a socket of that mode.
func ListenMode(path string, mode os.FileMode) (*net.UnixListener, error) {
	// Of two daemons that find a dead socket, the second would remove the first's.
	unlock, err := Lock(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	defer unlock()
	if Answers(path) {
		return nil, fmt.Errorf("socket %s: another daemon is using it", path)
	}
	info, err := os.Lstat(path)
	if err == nil && info.Mode()&fs.ModeSocket == 0 {
		return nil, fmt.Errorf("%s is there, and is not a socket", path)
	}
	if err == nil {
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		if errors.Is(err, syscall.EINVAL) {
			return nil, fmt.Errorf("socket %s: the path is longer than a socket's may be (107 bytes)", path)
		}
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	if err := os.Chmod(path, mode); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	return l, nil
}
