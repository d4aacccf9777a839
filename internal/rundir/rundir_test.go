package rundir

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestDefaultIsTheUsersOwn(t *testing.T) {
	for d, want := range map[Dirs]string{
		{XDG: "/run/user/7", Temp: "/tmp", UID: 7}: "/run/user/7/gpuctl",
		{Temp: "/tmp", UID: 7}:                     "/tmp/gpuctl-7",
		{Temp: "/tmp"}:                             "/run/gpuctl",
	} {
		if got := d.Default(); got != want {
			t.Errorf("%+v: %s, want %s", d, got, want)
		}
	}
}

func TestListenReplacesADeadSocketAndSparesALiveOne(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path); err == nil {
		t.Fatal("a file was replaced by a socket")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	dead, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := Listen(path); err == nil {
		t.Error("a socket in use was taken over")
	}
}

// A daemon that is too busy to take connections is no dead one, and its socket is not taken away.
func TestDaemonThatIsBusyKeepsItsSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 1)); err != nil {
		t.Fatal(err)
	}
	for range 3 { // more than wait there
		conn, err := net.DialTimeout("unix", path, 50*time.Millisecond)
		if err == nil {
			defer conn.Close()
		}
	}
	if !Answers(path) {
		t.Error("it counts as dead")
	}
	if l, err := Listen(path); err == nil {
		l.Close()
		t.Error("its socket was taken")
	}
	if Answers(path + ".none") {
		t.Error("nobody is there, and counts as a daemon")
	}
}

func TestOnlyOneOfSeveralDaemonsTakesADeadSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	for range 50 {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Close(fd)); err != nil {
			t.Fatal(err)
		}
		taken := make(chan *net.UnixListener)
		for range 8 {
			go func() {
				l, err := Listen(path)
				if err != nil {
					l = nil
				}
				taken <- l
			}()
		}
		var all []*net.UnixListener
		for range 8 {
			if l := <-taken; l != nil {
				all = append(all, l)
			}
		}
		if len(all) != 1 || !Answers(path) {
			t.Errorf("%d listen; the socket answers: %v", len(all), Answers(path))
		}
		for _, l := range all {
			_ = l.Close()
		}
		_ = os.Remove(path)
	}
}

func TestMakeRefusesWhatOthersCanWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	if err := Make(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := Make(dir); err == nil {
		t.Error("a folder that everybody can write was accepted")
	}
}

func TestSweepRemovesOnlyWhatTheDeadLeft(t *testing.T) {
	d := Dirs{XDG: t.TempDir()}
	const gone = 1 << 30 // above any pid
	keep := []string{d.Private(os.Getpid()), filepath.Join(d.Default(), "vendors-"+strconv.Itoa(os.Getpid())+"-1"), filepath.Join(d.Default(), "guest")}
	drop := []string{d.Private(gone), filepath.Join(d.Default(), "vendors-"+strconv.Itoa(gone)+"-1")}
	for _, dir := range append(keep, drop...) {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	d.Sweep()
	for _, dir := range keep {
		if _, err := os.Stat(dir); err != nil {
			t.Error(err)
		}
	}
	for _, dir := range drop {
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s is still there", dir)
		}
	}
}

func TestSocketInAFolderOfAnotherUserIsNotTrusted(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can make another user's folder")
	}
	temp := t.TempDir()
	d := Dirs{Temp: temp, UID: 4242}
	socket := d.Sockets()[0]
	if err := os.MkdirAll(filepath.Dir(socket), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, c := range []struct {
		folder, socket int
		mode           os.FileMode
		trusted        bool
	}{
		{4242, 4242, 0o700, true},
		{0, 0, 0o711, true},
		{4242, 0, 0o700, true},
		{4243, 4243, 0o711, false},
		{4242, 4243, 0o711, false},
		{4243, 4242, 0o711, false},
		{4242, 4242, 0o777, false},
		{4242, 4242, 0o1777, false},
	} {
		dir := filepath.Dir(socket)
		for path, uid := range map[string]int{dir: c.folder, socket: c.socket} {
			if err := os.Chown(path, uid, uid); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(dir, c.mode); err != nil {
			t.Fatal(err)
		}
		if err := d.Trusted(socket); (err == nil) != c.trusted {
			t.Errorf("folder of %d, %o, socket of %d: %v", c.folder, c.mode, c.socket, err)
		}
		if got := len(d.PrivateSockets()); got != 0 {
			t.Errorf("%d private ones", got)
		}
	}
}

// A folder that was there keeps its mode.
func TestMadeFoldersAreToldFromThoseThatWereThere(t *testing.T) {
	there := t.TempDir()
	if err := os.Chmod(there, 0o755); err != nil {
		t.Fatal(err)
	}
	if made, err := MakeNew(there); made || err != nil {
		t.Errorf("%v, %v", made, err)
	}
	if made, err := MakeNew(filepath.Join(there, "new")); !made || err != nil {
		t.Errorf("%v, %v", made, err)
	}
	if made, err := MakeNew(filepath.Join(there, "new")); made || err != nil {
		t.Errorf("again: %v, %v", made, err)
	}
}

// What others can write to, or can put something else in the place of, is
// nobody's own.
func TestFolderThatOthersCanReplaceIsNotOwn(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can make another user's folder")
	}
	type folder struct {
		uid  int
		mode os.FileMode
	}
	for name, c := range map[string]struct {
		above, dir folder
		own        bool
	}{
		"own":                      {folder{0, 0o755}, folder{0, 0o700}, true},
		"passable":                 {folder{0, 0o755}, folder{0, 0o711}, true},
		"as in /tmp":               {folder{0, 0o777 | os.ModeSticky}, folder{0, 0o700}, true},
		"of another user":          {folder{0, 0o755}, folder{4242, 0o700}, false},
		"open to the group":        {folder{0, 0o755}, folder{0, 0o770}, false},
		"open to all":              {folder{0, 0o755}, folder{0, 0o777 | os.ModeSticky}, false},
		"in another user's folder": {folder{4242, 0o755}, folder{0, 0o700}, false},
		"in a folder open to all":  {folder{0, 0o777}, folder{0, 0o700}, false},
	} {
		t.Run(name, func(t *testing.T) {
			above := filepath.Join(t.TempDir(), "above")
			dir, link := filepath.Join(above, "dir"), filepath.Join(t.TempDir(), "link")
			err := errors.Join(os.MkdirAll(dir, 0o700), os.Symlink(above, link))
			for path, f := range map[string]folder{above: c.above, dir: c.dir} {
				err = errors.Join(err, os.Chown(path, f.uid, f.uid), os.Chmod(path, f.mode))
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range []string{dir, filepath.Join(link, "dir")} {
				if err := Own(path); (err == nil) != c.own {
					t.Errorf("%s: %v", path, err)
				}
				if err := Make(path); (err == nil) != c.own {
					t.Errorf("a run folder at %s: %v", path, err)
				}
			}
		})
	}
}

// Who makes a user's folder in /tmp before that user does leads the removal of
// old folders nowhere.
func TestSweepRemovesNothingInAFolderOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can make another user's folder")
	}
	d := Dirs{Temp: t.TempDir(), UID: 7}
	target := filepath.Join(t.TempDir(), strconv.Itoa(1<<30))
	err := errors.Join(
		os.MkdirAll(d.Default(), 0o755), os.Mkdir(target, 0o700),
		os.Symlink(filepath.Dir(target), filepath.Join(d.Default(), "private")), os.Chown(d.Default(), 4242, 4242),
	)
	if err != nil {
		t.Fatal(err)
	}
	d.Sweep()
	if _, err := os.Stat(target); err != nil {
		t.Error(err)
	}
}
