package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/reason"
)

// Errors of this package.
var (
	ErrNoLink = reason.New(reason.NotFound, "no such network interface")
	ErrBusy   = errors.New("the interface's traffic is somebody else's to control")
	ErrGone   = errors.New("the limit is not there any more")
)

const (
	answerTime   = 5 * time.Second
	dumpAttempts = 20 // the kernel interrupts a dump if something changes during it
)

// kernel has the netlink calls that this package uses.
type kernel interface {
	LinkByName(name string) (netlink.Link, error)
	LinkList() ([]netlink.Link, error)
	RouteGet(destination net.IP) ([]netlink.Route, error)

	QdiscList(link netlink.Link) ([]netlink.Qdisc, error)
	QdiscAdd(qdisc netlink.Qdisc) error
	QdiscDel(qdisc netlink.Qdisc) error
	ClassList(link netlink.Link, parent uint32) ([]netlink.Class, error)
	ClassAdd(class netlink.Class) error
	ClassChange(class netlink.Class) error
	ClassDel(class netlink.Class) error
	FilterAdd(filter netlink.Filter) error
	FilterDel(filter netlink.Filter) error
}

var _ kernel = (*netlink.Handle)(nil)

// Host is the network of this host.
type Host struct {
	root fs.FS
	k    kernel
	end  func()

	mu sync.Mutex // held while queueing disciplines are changed

	flowing sync.Mutex
	flows   map[netip.Addr]*shared
}

// Open connects to the kernel by netlink, in the network namespace of the calling thread.
// root contains sysfs.
func Open(root fs.FS) (*Host, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if err := h.SetSocketTimeout(answerTime); err != nil {
		h.Close()
		return nil, fmt.Errorf("netlink: %w", err)
	}
	return &Host{root: root, k: h, end: h.Close, flows: map[netip.Addr]*shared{}}, nil
}

// Close closes the connection. Limits stay in force.
func (h *Host) Close() { h.end() }

func (h *Host) link(ctx context.Context, name string) (netlink.Link, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l, err := h.k.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, fmt.Errorf("%w: %q", ErrNoLink, name)
	} else if err != nil {
		return nil, fmt.Errorf("interface %s: %w", name, err)
	}
	return l, nil
}

// whole repeats a dump that was interrupted, as its result may be inconsistent.
func whole[T any](ctx context.Context, dump func() ([]T, error)) ([]T, error) {
	for attempt := 1; ; attempt++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		out, err := dump()
		if err == nil || !errors.Is(err, netlink.ErrDumpInterrupted) || attempt == dumpAttempts {
			return out, err
		}
	}
}
