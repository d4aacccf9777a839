// Command guestinit is process 1 of the lab's guests: it loads the modules of
// the initrd and then answers on the PV channel, or virtio-serial port, named "lab" what package
// labtest asks it: which PCI devices are there, what their registers read, and
// what a program says. It is no part of the product.
//
// With lab.root=DEVICE[,DEVICE…] on the kernel's command line those disks'
// squashfs file systems, the later over the earlier, with memory over them all,
// become the root, and /etc/lab.rc in it is started if it is there.
//
// With lab.ip=ADDRESS/BITS its network interface has that address.
//
// A request and an answer are a line of JSON each. A live migration hangs the
// channel up; it is opened anew then.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/lab/guestinit/wire"
)

func main() {
	log := func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "guestinit: "+format+"\n", args...)
	}
	if os.Getpid() != 1 {
		log("it is the init of the lab's guests and does nothing elsewhere")
		os.Exit(2)
	}
	prepare(log)
	if p, ok, err := address("/proc/cmdline"); err != nil {
		log("address: %v", err)
	} else if ok {
		if err := connect(netDevice, p); err != nil {
			log("network: %v", err)
		}
	}
	s := newServer()
	if disks, err := rootDisks("/proc/cmdline"); err != nil {
		log("%v", err)
	} else if len(disks) > 0 {
		if err := enterRoot(disks); err != nil {
			log("root of %q: %v", disks, err)
		} else {
			log("root of %q", disks)
			startRC(log)
		}
	}
	go func() {
		for range time.Tick(time.Second) {
			s.reap()
		}
	}()
	for {
		if err := s.serveChannel(log); err != nil {
			log("%v", err)
			time.Sleep(100 * time.Millisecond)
		}
	}
}

// prepare mounts what programs expect and loads the initrd's modules.
func prepare(log func(string, ...any)) {
	for _, m := range []struct{ kind, at string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/run"}, {"tmpfs", "/tmp"},
	} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			log("%v", err)
		}
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			log("mount %s: %v", m.at, err)
		}
	}
	if err := os.Setenv("PATH", "/bin"); err != nil {
		log("%v", err)
	}
	install, err := os.StartProcess("/bin/busybox", []string{"busybox", "--install", "-s", "/bin"}, &os.ProcAttr{})
	if err == nil {
		_, err = install.Wait()
	}
	if err != nil {
		log("busybox: %v", err)
	}
	order, err := os.ReadFile("/lib/modules/order")
	if err != nil {
		log("%v", err)
	}
	for _, name := range strings.Fields(string(order)) {
		if err := load(filepath.Join("/lib/modules", name)); err != nil && !errors.Is(err, unix.EEXIST) {
			log("module %s: %v", name, err)
		}
	}
	if err := unix.Mount("xenfs", "/proc/xen", "xenfs", 0, ""); err != nil {
		log("mount /proc/xen: %v", err)
	}
	log("ready")
}

func load(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.FinitModule(int(f.Fd()), "", 0)
}

// serveChannel answers on the channel until it hangs up.
func (s *server) serveChannel(log func(string, ...any)) error {
	path, port := findPort("/sys/class/virtio-ports", "lab"), true
	if path == "" {
		var err error
		if path, err = findPV("lab"); err != nil {
			return err
		}
		port = false
	}
	f, err := os.OpenFile(filepath.Join("/dev", path), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if port {
		defer time.Sleep(200 * time.Millisecond) // it reads as ended while the host has not connected
	} else {
		if err := raw(f); err != nil {
			return fmt.Errorf("%s: %w", f.Name(), err)
		}
		log("channel %s", f.Name())
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	err = wire.Serve(ctx, f, s.handle)
	s.hangUps.Add(1)
	if errors.Is(err, io.EOF) || errors.Is(err, unix.EIO) {
		return nil
	}
	return err
}

// raw makes a terminal pass bytes on as they are.
func raw(f *os.File) error {
	t, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return err
	}
	t.Iflag, t.Oflag, t.Lflag = 0, 0, 0
	t.Cflag = t.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
	return unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, t)
}
