package channel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/xenstore"
)

// Name is the channel's name in the domain's XML.
const Name = "org.gpuctl.guest.0"

// maxPorts is the most consoles of a VM that are searched.
const maxPorts = 64

// ErrNoPort means that the VM has no channel with that name.
var ErrNoPort = errors.New("this VM has no such channel")

// Store is the part of xenstore that is needed.
type Store interface {
	List(ctx context.Context, path string) ([]string, error)
	Read(ctx context.Context, path string) (string, error)
	Close() error
}

// Port finds the guest's end of a channel.
type Port struct {
	Root string // root folder of the system: /
	Name string // name of the channel; empty: Name
	// Xenstore connects to xenstore through a device file; nil: internal/xenstore.
	Xenstore func(ctx context.Context, device string) (Store, error)
}

// Find returns the channel's device file: a virtio-serial port with that name, or the
// console that has the name in xenstore. The error wraps ErrNoPort if there is none.
func (p Port) Find(ctx context.Context) (string, error) {
	name := p.Name
	if name == "" {
		name = Name
	}
	ports, err := filepath.Glob(filepath.Join(p.Root, "sys/class/virtio-ports/*/name"))
	if err != nil {
		return "", err
	}
	for _, file := range ports {
		if b, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(b)) == name {
			return filepath.Join(p.Root, "dev", filepath.Base(filepath.Dir(file))), nil
		}
	}
	return p.findConsole(ctx, name)
}

func (p Port) findConsole(ctx context.Context, name string) (string, error) {
	device := filepath.Join(p.Root, "dev/xen/xenbus")
	if _, err := os.Stat(device); errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%w: %s", ErrNoPort, name)
	}
	dial := p.Xenstore
	if dial == nil {
		dial = func(ctx context.Context, device string) (Store, error) { return xenstore.Dial(ctx, device) }
	}
	store, err := dial(ctx, device)
	if err != nil {
		return "", fmt.Errorf("find channel %s: %w", name, err)
	}
	defer func() { _ = store.Close() }()
	consoles, err := store.List(ctx, "device/console")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("find channel %s: %w", name, err)
	}
	for _, c := range consoles {
		n, err := strconv.ParseUint(c, 10, 32)
		if err != nil || n >= maxPorts {
			continue
		}
		if is, err := store.Read(ctx, "device/console/"+c+"/name"); err == nil && is == name {
			return filepath.Join(p.Root, "dev", "hvc"+strconv.FormatUint(n, 10)), nil
		}
	}
	return "", fmt.Errorf("%w: %s", ErrNoPort, name)
}

// Open finds and opens the channel. It switches a terminal to raw mode. That mode ends
// when the terminal hangs up, as after a migration of the VM, so it must be opened again
// then.
func (p Port) Open(ctx context.Context) (io.ReadWriteCloser, error) {
	path, err := p.Find(ctx)
	if err != nil {
		return nil, err
	}
	return openRaw(path)
}

func openRaw(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err == nil {
		// The flags of cfmakeraw(3), and no flow control.
		t.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON | unix.IXOFF
		t.Oflag &^= unix.OPOST
		t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
		t.Cflag = t.Cflag&^(unix.CSIZE|unix.PARENB|unix.CRTSCTS) | unix.CS8 | unix.CLOCAL | unix.CREAD
		t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
		err = unix.IoctlSetTermios(fd, unix.TCSETS, t)
	} else if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		err = nil // a virtio-serial port is not a terminal
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("raw mode of %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}
