package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// rc is started in the root of disks, for as long as it likes.
const rc = "/etc/lab.rc"

// diskWait is how long a disk may take to appear.
const diskWait = 20 * time.Second

// rootDisks returns the disks that the kernel's command line, a file, names as
// the root's, the lowest first.
func rootDisks(cmdline string) ([]string, error) {
	b, err := os.ReadFile(cmdline)
	if err != nil {
		return nil, err
	}
	for _, word := range strings.Fields(string(b)) {
		if list, ok := strings.CutPrefix(word, "lab.root="); ok && list != "" {
			return strings.Split(list, ","), nil
		}
	}
	return nil, nil
}

// enterRoot makes the disks this process's root, writable in memory.
func enterRoot(disks []string) error {
	const at = "/mnt"
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, "mode=755,size=75%"); err != nil {
		return fmt.Errorf("mount memory: %w", err)
	}
	var layers []string
	for i, disk := range disks {
		if err := waitFor(disk); err != nil {
			return err
		}
		dir := filepath.Join(at, strconv.Itoa(i))
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(disk, dir, "squashfs", unix.MS_RDONLY, ""); err != nil {
			return fmt.Errorf("mount %s: %w", disk, err)
		}
		layers = append([]string{dir}, layers...) // the first is the uppermost
	}
	root := filepath.Join(at, "root")
	for _, dir := range []string{"upper", "work", "root"} {
		if err := os.Mkdir(filepath.Join(at, dir), 0o755); err != nil {
			return err
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", strings.Join(layers, ":"), at, at)
	if err := unix.Mount("overlay", root, "overlay", 0, options); err != nil {
		return fmt.Errorf("mount %s: %w", options, err)
	}
	for _, dir := range []string{"proc", "sys", "dev", "run", "tmp"} {
		to := filepath.Join(root, dir)
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if err := unix.Mount("/"+dir, to, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move /%s: %w", dir, err)
		}
	}
	if err := errors.Join(os.Chmod(filepath.Join(root, "tmp"), 0o1777), os.Chdir(root)); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("enter the root: %w", err)
	}
	for _, m := range []struct{ kind, at, options string }{{"devpts", "/dev/pts", "mode=620,ptmxmode=666"}, {"tmpfs", "/dev/shm", "mode=1777"}} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.at, m.kind, 0, m.options); err != nil {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	return errors.Join(os.Chdir("/"), os.Setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), os.Setenv("HOME", "/root"))
}

// waitFor waits until a disk is there.
func waitFor(disk string) error {
	for end := time.Now().Add(diskWait); ; time.Sleep(50 * time.Millisecond) {
		_, err := os.Stat(disk)
		if err == nil || !errors.Is(err, fs.ErrNotExist) || time.Now().After(end) {
			return err
		}
	}
}

// startRC runs rc, which may start services and stay.
func startRC(log func(string, ...any)) {
	if _, err := os.Stat(rc); err != nil {
		return
	}
	c := exec.Command(rc)
	c.Stdout, c.Stderr = os.Stderr, os.Stderr
	if err := c.Start(); err != nil { // reap collects it
		log("%s: %v", rc, err)
		return
	}
	_ = c.Process.Release()
}
