package labtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/lab"
)

const (
	computeFiles   = kit + "compute/"
	computeDisks   = "/dev/gpuctl-lab/"
	computeMemory  = 768                  // MiB
	agentSockets   = "/run/gpuctl/guest/" // as hostd has them
	nativeOpenCL   = "OCL_ICD_VENDORS=/etc/lab/native"
	programOutputs = "/var/tmp/lab/"
	lookEvery      = 2 * time.Second // starting a program costs a guest much
)

// A ComputeGuest is an HVM guest with OpenCL runtimes, a running gpuguest and
// the programs endure and stream. Its disks are read-only files of both hosts,
// what it writes is in its memory. Besides the channel of its init it has
// gpuguest's, at SocketPath.
type ComputeGuest struct {
	Guest
	// Network is the guest's address on the network between the hosts, with the length of its
	// prefix; empty: it has no network. The hosts need labtest.Bridge for it.
	Network string

	image *lab.ComputeImage
}

// NewComputeGuest builds the image if need be and puts it on the hosts. Name and
// other fields may be set before Create.
func NewComputeGuest(ctx context.Context, l *lab.Lab) (*ComputeGuest, error) {
	img, err := l.ComputeImage(ctx)
	if err != nil {
		return nil, err
	}
	g := &ComputeGuest{image: img}
	errs := make([]error, len(l.Hosts()))
	var wg sync.WaitGroup
	for i, h := range l.Hosts() {
		if h.Alive() {
			wg.Go(func() { errs[i] = g.Prepare(ctx, h) })
		}
	}
	wg.Wait()
	return g, errors.Join(errs...)
}

// Prepare puts on a host what the guest needs there to be created or to arrive;
// a host that was booted needs it again.
func (g *ComputeGuest) Prepare(ctx context.Context, h *lab.Host) error {
	for _, file := range []string{g.image.Base, g.image.Layer} {
		name := filepath.Base(file)
		to := computeFiles + name
		if _, err := h.Run(ctx, "test -e "+to); err != nil {
			var failed *lab.RunError
			if !errors.As(err, &failed) {
				return err
			}
			if err := h.Put(ctx, file, to); err != nil {
				return err
			}
		}
		// QEMU's disk backend refuses read-only files; the kernel's takes devices.
		_, err := h.Run(ctx, fmt.Sprintf("set -e; mkdir -p %[1]s; d=$(losetup -n -O NAME -j %[2]s | head -n 1); "+
			"[ -n \"$d\" ] || d=$(losetup -r -f --show %[2]s); ln -sfn $d %[1]s%[3]s", computeDisks, to, name))
		if err != nil {
			return fmt.Errorf("disk %s: %w", name, err)
		}
	}
	_, err := h.Run(ctx, "mkdir -p -m 711 "+agentSockets)
	return err
}

// bridge is the one by which guests are on the network between the hosts.
const bridge = "lan"

// Bridge lets guests of a host be on the network between the hosts, which it puts into a
// bridge, with the host's address. It may be repeated.
func Bridge(ctx context.Context, h *lab.Host) error {
	_, err := h.Run(ctx, fmt.Sprintf("set -e; ip link show %[1]s >/dev/null 2>&1 && exit 0; modprobe bridge; "+
		"i=$(ip -o -4 address show | awk '$4 == \"%[2]s/24\" {print $2}'); ip link add %[1]s type bridge; ip address flush dev $i; "+
		"ip link set $i master %[1]s; ip address add %[2]s/24 dev %[1]s; ip link set %[1]s up", bridge, h.Address))
	if err != nil {
		return fmt.Errorf("bridge of host %s: %w", h.Name, err)
	}
	return nil
}

// Runtimes lets programs of a host use the OpenCL runtimes of this guest's image, whose
// Debian is the host's: its /usr is below the host's own.
func (g *ComputeGuest) Runtimes(ctx context.Context, h *lab.Host) error {
	const at = "/run/gpuctl-lab/base"
	_, err := h.Run(ctx, fmt.Sprintf("set -e; test -e /usr/lib/x86_64-linux-gnu/libpocl.so.2 && exit 0; modprobe squashfs; modprobe overlay; "+
		"mkdir -p %[1]s; mountpoint -q %[1]s || mount -r -t squashfs %[2]s %[1]s; mount -r -t overlay -o lowerdir=/usr:%[1]s/usr overlay /usr; "+
		"test -e /usr/lib/x86_64-linux-gnu/libpocl.so.2", at, computeDisks+filepath.Base(g.image.Base)))
	if err != nil {
		return fmt.Errorf("runtimes of host %s: %w", h.Name, err)
	}
	return nil
}

// SocketPath is the socket of gpuguest's channel on the host where the guest is.
func (g *ComputeGuest) SocketPath() string { return agentSockets + g.UUID() + ".sock" }

// Create starts the guest on a host, with devices of dom0, and waits until the
// init inside answers. gpuguest may answer a little later.
func (g *ComputeGuest) Create(ctx context.Context, h *lab.Host, devices ...string) error {
	if err := g.furnish(); err != nil {
		return err
	}
	if err := g.Guest.Create(ctx, h, devices...); err != nil {
		return err
	}
	if _, err := g.Run(ctx, "test -x /usr/bin/gpuguest"); err != nil {
		return fmt.Errorf("guest %s has not the root that it was given; see its console: %w", g.Name, err)
	}
	return nil
}

// furnish adds disks and channel to the description, once.
func (g *ComputeGuest) furnish() error {
	if g.MemoryMiB == 0 {
		g.MemoryMiB = computeMemory
	}
	if err := g.complete(); err != nil {
		return err
	}
	if strings.Contains(g.CommandLine, "lab.root=") {
		return nil
	}
	if g.KVM {
		g.furnishKVM()
		return nil
	}
	g.CommandLine = strings.TrimSpace(g.CommandLine + " lab.root=/dev/xvde,/dev/xvdf")
	for disk, file := range map[string]string{"xvde": g.image.Base, "xvdf": g.image.Layer} {
		g.Extra += fmt.Sprintf("    <disk type='block' device='disk'><driver name='phy' type='raw'/><source dev='%s'/><target dev='%s' bus='xen'/><readonly/></disk>\n",
			computeDisks+filepath.Base(file), disk)
	}
	if g.Network != "" {
		g.CommandLine += " lab.ip=" + g.Network
		g.Extra += fmt.Sprintf("    <interface type='bridge'><source bridge='%s'/></interface>\n", bridge)
	}
	g.Extra += fmt.Sprintf("    <channel type='unix'><source mode='bind' path='%s'/><target type='xen' name='%s'/></channel>\n", g.SocketPath(), channel.Name)
	return nil
}

// furnishKVM does so for a guest of a host without Xen, which has no network.
func (g *ComputeGuest) furnishKVM() {
	g.CommandLine = strings.TrimSpace(g.CommandLine + " lab.root=/dev/vda,/dev/vdb")
	for i, file := range []string{g.image.Base, g.image.Layer} {
		g.Extra += fmt.Sprintf("    <disk type='block' device='disk'><driver name='qemu' type='raw'/><source dev='%s'/><target dev='vd%c' bus='virtio'/><readonly/></disk>\n",
			computeDisks+filepath.Base(file), 'a'+i)
	}
	g.Extra += virtioChannel(g.SocketPath(), channel.Name)
}

// BootID tells one boot of the guest from another.
func (g *ComputeGuest) BootID(ctx context.Context) (string, error) {
	s, err := g.Ping(ctx)
	if err != nil {
		return "", err
	}
	return s.BootID, nil
}

// AgentLog returns what gpuguest wrote.
func (g *ComputeGuest) AgentLog(ctx context.Context) (string, error) {
	return g.Run(ctx, "tail -c 100000 /var/log/gpuguest.log")
}

// KillAgent ends gpuguest with SIGKILL; it is started again a second later.
func (g *ComputeGuest) KillAgent(ctx context.Context) error {
	// The guest answers before it has begun its gpuguest.
	_, err := g.Run(ctx, "for i in $(seq 100); do [ -s /run/gpuguest.pid ] && break; sleep 0.3; done; kill -9 $(cat /run/gpuguest.pid)")
	return err
}

// An Agent is a connection to a guest's gpuguest.
type Agent struct {
	gpuctlv1connect.AgentServiceClient
	Sessions gpuctlv1connect.GuestServiceClient
	Channel  *channel.Client

	dir     string
	forward net.Listener
	cancel  context.CancelFunc
	over    sync.WaitGroup
}

// Agent connects to gpuguest over its channel, as hostd does: not while a hostd
// does. After a migration a new connection is needed.
func (g *ComputeGuest) Agent(ctx context.Context) (*Agent, error) {
	dir, err := os.MkdirTemp("", "lab") // a socket's path is short
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	a := &Agent{dir: dir, forward: l, cancel: cancel}
	host, target := g.Host(), g.SocketPath()
	a.over.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			a.over.Go(func() { relay(life, c, host, target) })
		}
	})
	if a.Channel, err = channel.Dial(ctx, path); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	a.AgentServiceClient = gpuctlv1connect.NewAgentServiceClient(a.Channel.HTTP(), channel.BaseURL, channel.ConnectOptions()...)
	a.Sessions = gpuctlv1connect.NewGuestServiceClient(a.Channel.HTTP(), channel.BaseURL, channel.ConnectOptions()...)
	return a, nil
}

// relay joins c with a socket of the host until either ends.
func relay(ctx context.Context, c net.Conn, h *lab.Host, path string) {
	defer c.Close()
	dctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	far, err := h.Dial(dctx, "unix", path)
	if err != nil {
		return
	}
	defer far.Close()
	stop := context.AfterFunc(ctx, func() {
		c.Close()
		far.Close()
	})
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(c, far)
		c.Close()
	}()
	_, _ = io.Copy(far, c)
	far.Close()
	<-done
}

// Close ends the connection.
func (a *Agent) Close() error {
	var err error
	if a.Channel != nil {
		err = a.Channel.Close()
	}
	a.cancel()
	err = errors.Join(err, a.forward.Close())
	a.over.Wait()
	return errors.Join(err, os.RemoveAll(a.dir))
}

// WaitReady waits until a device of that vendor and device ID serves
// applications, and returns it. It watches the devices, as hostd does.
func (a *Agent) WaitReady(ctx context.Context, vendor, device uint32) (*gpuctlv1.GuestDevice, error) {
	s, err := a.WatchDevices(ctx, watchDevices())
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.Close() }()
	why := "it is not there"
	for s.Receive() {
		why = "it is not there"
		for _, d := range s.Msg().Devices {
			if d.VendorId != vendor || d.DeviceId != device {
				continue
			}
			if d.Ready {
				return d, nil
			}
			why = d.Message
		}
	}
	return nil, fmt.Errorf("device %04x:%04x of the guest is not ready: %s: %w", vendor, device, why, s.Err())
}

// A Program is one that was started in a guest and goes on by itself.
type Program struct {
	g    *ComputeGuest
	name string
}

// Start starts a program under a name of its own, with variables such as
// "A=b" before argv. It goes on while the guest lives; Start does not wait.
func (g *ComputeGuest) Start(ctx context.Context, name string, argv ...string) (*Program, error) {
	var words []string
	for _, a := range argv {
		words = append(words, lab.Quote(a))
	}
	at := lab.Quote(programOutputs + name)
	_, err := g.Run(ctx, fmt.Sprintf("mkdir -p %[1]s && cd %[1]s && rm -f exit && "+
		"{ setsid sh -c 'env \"$@\"; echo $? >exit.new; mv exit.new exit' sh %[2]s </dev/null >output 2>&1 & }", at, strings.Join(words, " ")))
	if err != nil {
		return nil, err
	}
	return &Program{g: g, name: name}, nil
}

// StartNative is Start for a program that uses the guest's PoCL past gpuctl.
func (g *ComputeGuest) StartNative(ctx context.Context, name string, argv ...string) (*Program, error) {
	return g.Start(ctx, name, append([]string{nativeOpenCL}, argv...)...)
}

func (p *Program) path(file string) string { return lab.Quote(programOutputs + p.name + "/" + file) }

// Output returns the end of what the program has said, at most 200 KiB.
func (p *Program) Output(ctx context.Context) (string, error) {
	_, _, out, err := p.look(ctx)
	return out, err
}

// look asks for everything at once: programs take long to start in a guest, and
// what it says after it has ended is all of it.
func (p *Program) look(ctx context.Context) (ended bool, status int, out string, err error) {
	all, err := p.g.Run(ctx, fmt.Sprintf("if [ -e %[1]s ]; then read s <%[1]s; else s=runs; fi; echo $s; tail -c 200000 %[2]s", p.path("exit"), p.path("output")))
	if err != nil {
		return false, 0, "", err
	}
	first, out, _ := strings.Cut(all, "\n")
	if first == "runs" {
		return false, 0, out, nil
	}
	if status, err = strconv.Atoi(first); err != nil {
		return false, 0, out, fmt.Errorf("guest %s: program %s: exit status: %w", p.g.Name, p.name, err)
	}
	return true, status, out, nil
}

// until looks at the program every other second until done says so.
func (p *Program) until(ctx context.Context, what string, done func(ended bool, status int, out string) (bool, error)) error {
	for {
		ended, status, out, err := p.look(ctx)
		if err != nil {
			return err
		}
		if ok, err := done(ended, status, out); ok || err != nil {
			return err
		}
		if ended {
			return fmt.Errorf("guest %s: program %s ended with %d before %s: %s", p.g.Name, p.name, status, what, out)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("guest %s: program %s, waiting for %s: %w: %s", p.g.Name, p.name, what, ctx.Err(), out)
		case <-time.After(lookEvery):
		}
	}
}

// Wait waits until the program has ended and returns its output. A status other
// than 0 is an error.
func (p *Program) Wait(ctx context.Context) (string, error) {
	var said string
	err := p.until(ctx, "its end", func(ended bool, status int, out string) (bool, error) {
		said = out
		if ended && status != 0 {
			return false, fmt.Errorf("guest %s: program %s ended with %d: %s", p.g.Name, p.name, status, out)
		}
		return ended, nil
	})
	return said, err
}
