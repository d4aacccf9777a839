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

// Name is the channel's name in a domain's XML.
const Name = "org.gpuctl.guest.0"

// maxPorts is how many consoles a VM may have.
const maxPorts = 64

// ErrNoPort says that the VM has no channel of that name.
var ErrNoPort = errors.New("this VM has no such channel")

// Store is what is needed of xenstore.
type Store interface {
	List(ctx context.Context, path string) ([]string, error)
	Read(ctx context.Context, path string) (string, error)
	Close() error
}

// Port is a channel as the guest sees it.
type Port struct {
	Root string // the machine's files: /
	Name string // empty: Name
	// Xenstore connects to the store through a device; nil: internal/xenstore.
	Xenstore func(ctx context.Context, device string) (Store, error)
}

// Find returns the channel's device file: a virtio-serial port of that name,
// or the console whose name xenstore knows. ErrNoPort if there is none.
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

// Open finds and opens the channel. A terminal is in raw mode then; that ends
// with its hang-up, as when the VM is migrated, so it has to be opened anew.
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
		// As cfmakeraw(3), without flow control by characters or lines.
		t.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON | unix.IXOFF
		t.Oflag &^= unix.OPOST
		t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
		t.Cflag = t.Cflag&^(unix.CSIZE|unix.PARENB|unix.CRTSCTS) | unix.CS8 | unix.CLOCAL | unix.CREAD
		t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
		err = unix.IoctlSetTermios(fd, unix.TCSETS, t)
	} else if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		err = nil // a virtio-serial port
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("raw mode of %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}
