package labtest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/lab"
	"github.com/gpuctl/gpuctl/lab/guestinit/wire"
)

// Start returns a lab whose hosts were just started from their snapshots; they
// are ended when the test ends. It skips the test without GPUCTL_LAB=1. A lab
// that somebody has up is not taken away: that fails the test. With
// GPUCTL_LAB_KEEP=1 a lab that is up is used as it is, and is left up.
func Start(t testing.TB) *lab.Lab {
	t.Helper()
	l := open(t)
	keep := os.Getenv("GPUCTL_LAB_KEEP") == "1"
	for _, h := range l.Hosts() {
		if !keep && h.Alive() {
			t.Fatalf("%s is up already, perhaps in somebody's use; `make lab-down` ends it", h.Name)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	if err := l.Up(ctx, false); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, h := range l.Hosts() {
				t.Log(Report(h))
			}
		}
		if !keep {
			if err := l.Down(context.Background()); err != nil {
				t.Error(err)
			}
		}
		l.Close()
	})
	return l
}

func open(t testing.TB) *lab.Lab {
	t.Helper()
	if os.Getenv("GPUCTL_LAB") != "1" {
		t.Skip("needs the lab: run `make lab-test`, or set GPUCTL_LAB=1")
	}
	l, err := lab.Open("", lab.NewProgress(writer{t}))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

type writer struct{ t testing.TB }

// Write implements io.Writer.
func (w writer) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimRight(string(p), "\n"))
	return len(p), nil
}

// Report returns what tells most about a host on which something went wrong.
func Report(h *lab.Host) string {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := h.Run(ctx, "xl list; xl pci-assignable-list; dmesg | tail -n 30; journalctl -q -n 40 --no-pager -o short-monotonic; "+
		"for f in /var/log/xen/qemu-*.log /var/log/libvirt/libxl/*.log /var/log/xen/console/guest-*; do [ -s $f ] && echo == $f && tail -n 8 $f; done; true")
	if err != nil {
		return fmt.Sprintf("%s: no report: %v", h.Name, err)
	}
	return fmt.Sprintf("%s:\n%s", h.Name, out)
}

// Virsh runs virsh on a host. A call of libvirt may hang for good, so it has
// two minutes.
func Virsh(ctx context.Context, h *lab.Host, args ...string) (string, error) {
	for i, a := range args {
		args[i] = lab.Quote(a)
	}
	return h.Run(ctx, "timeout -k 1 120 virsh -q -c "+h.URI()+" "+strings.Join(args, " "))
}

// A Guest is a domain of the lab. The zero values of its fields have defaults.
// Its methods are not for several goroutines at once.
type Guest struct {
	Name      string // default: "g" and a few random digits
	MemoryMiB int    // default: 192
	PVH       bool   // a PVH guest, which starts sooner but takes no PCI device; else HVM
	KVM       bool   // a guest of a host without Xen: libvirt's qemu driver has it
	// Kernel and Initrd are paths on the host; default: the kit's.
	Kernel, Initrd string
	// CommandLine is added to the kernel's.
	CommandLine string
	// Extra is XML that is added to <devices>.
	Extra string

	mu   sync.Mutex
	uuid string
	host *lab.Host
	conn net.Conn
	wire *wire.Client
}

// kit is where the image has the guests' files.
const kit = "/opt/lab/guest/"

// complete fills in the defaults.
func (g *Guest) complete() error {
	if g.uuid != "" {
		return nil
	}
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return err
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	x := hex.EncodeToString(b[:])
	g.uuid = x[:8] + "-" + x[8:12] + "-" + x[12:16] + "-" + x[16:20] + "-" + x[20:]
	if g.Name == "" {
		g.Name = "g" + x[:6]
	}
	if g.MemoryMiB == 0 {
		g.MemoryMiB = 192
	}
	if g.Initrd == "" {
		g.Initrd = kit + "initrd.img"
		if g.KVM {
			g.Initrd = kit + "initrd-kvm.img"
		}
	}
	if g.Kernel == "" {
		g.Kernel = kit + "vmlinuz"
		if g.PVH || g.KVM {
			g.Kernel = kit + "vmlinux"
		}
	}
	return nil
}

// UUID returns the domain's UUID, empty before the first use of the guest.
func (g *Guest) UUID() string { return g.uuid }

// Host returns where the guest runs, nil before it was created.
func (g *Guest) Host() *lab.Host { return g.host }

// channel is the path of the guest's PV channel, on every host that it may come
// to. Two domains with one path would steal it from each other.
func (g *Guest) channel() string { return "/run/gpuctl-lab/" + g.uuid + ".sock" }

// XML returns the domain, with the host devices at those PCI addresses of dom0
// that are given.
func (g *Guest) XML(devices ...string) (string, error) {
	if err := g.complete(); err != nil {
		return "", err
	}
	if g.KVM {
		return g.kvmXML(), nil
	}
	var b strings.Builder
	fmt.Fprintf(&b, "<domain type='xen'>\n  <name>%s</name>\n  <uuid>%s</uuid>\n  <memory unit='MiB'>%d</memory>\n  <vcpu>1</vcpu>\n  <os>\n",
		g.Name, g.uuid, g.MemoryMiB)
	if g.PVH {
		b.WriteString("    <type arch='x86_64' machine='xenpvh'>xenpvh</type>\n")
	} else {
		b.WriteString("    <type arch='x86_64' machine='xenfv'>hvm</type>\n    <loader type='rom'>/usr/lib/xen-4.17/boot/hvmloader</loader>\n")
	}
	// The probe of the i8042 panics a guest on its second live migration.
	fmt.Fprintf(&b, "    <kernel>%s</kernel>\n    <initrd>%s</initrd>\n    <cmdline>console=hvc0 loglevel=5 nokaslr panic=1 initcall_blacklist=i8042_init%s</cmdline>\n  </os>\n",
		g.Kernel, g.Initrd, prefixed(" ", g.CommandLine))
	if g.PVH {
		b.WriteString("  <features><acpi/></features>\n")
	} else {
		b.WriteString("  <features><acpi/><apic/><hap state='on'/><xen><passthrough state='on'/></xen></features>\n")
	}
	// A guest that panics must not look like one that goes on.
	b.WriteString("  <on_poweroff>destroy</on_poweroff>\n  <on_reboot>destroy</on_reboot>\n  <on_crash>destroy</on_crash>\n  <devices>\n")
	if !g.PVH {
		b.WriteString("    <emulator>/usr/libexec/xen-qemu-system-i386</emulator>\n")
	}
	b.WriteString("    <console type='pty'><target type='xen' port='0'/></console>\n")
	fmt.Fprintf(&b, "    <channel type='unix'><source mode='bind' path='%s'/><target type='xen' name='lab'/></channel>\n", g.channel())
	for _, d := range devices {
		x, err := HostdevXML(d)
		if err != nil {
			return "", err
		}
		b.WriteString(x)
	}
	b.WriteString(prefixed("    ", g.Extra))
	b.WriteString("  </devices>\n</domain>\n")
	return b.String(), nil
}

func prefixed(with, s string) string {
	if s == "" {
		return ""
	}
	return with + s
}

// HostdevXML is the element of a managed PCI device at an address of dom0, such
// as "0000:01:00.0".
func HostdevXML(address string) (string, error) {
	var domain, bus, slot, function uint
	if n, err := fmt.Sscanf(address, "%x:%x:%x.%x", &domain, &bus, &slot, &function); n != 4 || err != nil {
		return "", fmt.Errorf("%q is no PCI address", address)
	}
	return fmt.Sprintf("    <hostdev mode='subsystem' type='pci' managed='yes'><source><address domain='%#x' bus='%#x' slot='%#x' function='%#x'/></source></hostdev>\n",
		domain, bus, slot, function), nil
}

// Create starts the guest on a host, with devices of dom0, and waits until the
// init inside answers.
func (g *Guest) Create(ctx context.Context, h *lab.Host, devices ...string) error {
	if err := g.create(ctx, h, "create", devices...); err != nil {
		return err
	}
	return g.WaitReady(ctx)
}

// CreatePaused makes the guest's domain and does not let it run. Resume does.
func (g *Guest) CreatePaused(ctx context.Context, h *lab.Host, devices ...string) error {
	return g.create(ctx, h, "create --paused", devices...)
}

// Resume lets a paused guest run, and waits until the init inside answers.
func (g *Guest) Resume(ctx context.Context) error {
	if _, err := Virsh(ctx, g.host, "resume", g.Name); err != nil {
		return err
	}
	return g.WaitReady(ctx)
}

func (g *Guest) create(ctx context.Context, h *lab.Host, how string, devices ...string) error {
	xml, err := g.XML(devices...)
	if err != nil {
		return err
	}
	file := "/run/gpuctl-lab/" + g.uuid + ".xml"
	if err := h.PutReader(ctx, strings.NewReader(xml), file, 0o600); err != nil {
		return err
	}
	if _, err := Virsh(ctx, h, append(strings.Fields(how), file)...); err != nil {
		return err
	}
	g.host = h
	return nil
}

// WaitReady waits until the init of the guest answers, at most twelve minutes.
func (g *Guest) WaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 12*time.Minute)
	defer cancel()
	// What is sent before the guest listens is lost, so the first tries are short.
	asked := time.Now()
	for patience := time.Second; ; patience = min(2*patience, 10*time.Second) {
		try, stop := context.WithTimeout(ctx, patience)
		_, err := g.Ping(try)
		stop()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the init of guest %s on %s does not answer: %w", g.Name, g.host.Name, err)
		}
		// Asking libvirt takes from the guest what it needs to boot: host and
		// guest share a processor.
		if time.Since(asked) < 10*time.Second {
			_ = wait.For(ctx, 200*time.Millisecond) // the next round tells if it ended
			continue
		}
		asked = time.Now()
		if state, serr := Virsh(ctx, g.host, "domstate", g.Name); serr != nil {
			return fmt.Errorf("guest %s is gone from %s: %w", g.Name, g.host.Name, errors.Join(err, serr))
		} else if !strings.HasPrefix(state, "running") && !strings.HasPrefix(state, "no state") {
			return fmt.Errorf("guest %s on %s is %s: %w", g.Name, g.host.Name, strings.TrimSpace(state), err)
		}
		_ = wait.For(ctx, 200*time.Millisecond)
	}
}

// Destroy ends the guest at once.
func (g *Guest) Destroy(ctx context.Context) error {
	g.hangUp()
	_, err := Virsh(ctx, g.host, "destroy", g.Name)
	return err
}

// Attach plugs a device of dom0 into the running guest. That libvirt says it
// did is not that the guest has it: see WaitDevice.
func (g *Guest) Attach(ctx context.Context, address string) error {
	return g.plug(ctx, "attach-device", address)
}

// Detach pulls a device out of the running guest.
func (g *Guest) Detach(ctx context.Context, address string) error {
	return g.plug(ctx, "detach-device", address)
}

func (g *Guest) plug(ctx context.Context, verb, address string) error {
	xml, err := HostdevXML(address)
	if err != nil {
		return err
	}
	file := "/run/gpuctl-lab/" + g.uuid + "-device.xml"
	if err := g.host.PutReader(ctx, strings.NewReader(xml), file, 0o600); err != nil {
		return err
	}
	_, err = Virsh(ctx, g.host, verb, g.Name, file, "--live")
	return err
}

// Migrate moves the guest live to another host. libxl gives a guest a minute to suspend
// and leaves it where it is if it takes longer, as it may on hosts that have a quota; then
// it is tried once more.
func (g *Guest) Migrate(ctx context.Context, to *lab.Host) error {
	g.hangUp()
	move := func() error {
		_, err := Virsh(ctx, g.host, "migrate", "--live", g.Name, "xen+tcp://"+to.Name+"/system")
		return err
	}
	err := move()
	if err != nil && strings.Contains(err.Error(), "Failed to send migration data") && g.WaitReady(ctx) == nil {
		err = move()
	}
	if err != nil {
		return err
	}
	g.Moved(to)
	return g.WaitReady(ctx)
}

// Moved tells the guest that it was migrated by somebody else.
func (g *Guest) Moved(to *lab.Host) {
	g.hangUp()
	g.host = to
}

func (g *Guest) hangUp() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.conn != nil {
		g.conn.Close()
		g.conn, g.wire = nil, nil
	}
}

// Ask sends a request to the init of the guest. It has until ctx ends, or ten
// seconds. An answer that names an error is an error.
func (g *Guest) Ask(ctx context.Context, q wire.Request) (*wire.Answer, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	limit := 10 * time.Second
	if q.Op == wire.Exec {
		limit = max(limit, time.Duration(q.TimeoutSeconds+5)*time.Second)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if g.conn == nil {
		conn, err := g.host.Dial(ctx, "unix", g.channel())
		if err != nil {
			return nil, err
		}
		g.conn, g.wire = conn, wire.NewClient(conn)
	}
	q.ID = rand.Text()
	conn := g.conn
	stop := context.AfterFunc(ctx, func() { conn.Close() }) // it has no deadlines
	a, err := g.wire.Do(&q)
	if !stop() || err != nil {
		conn.Close()
		g.conn, g.wire = nil, nil
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("guest %s: %s: %w", g.Name, q.Op, err)
	}
	if a.Error != "" {
		return nil, fmt.Errorf("guest %s: %s: %s", g.Name, q.Op, a.Error)
	}
	return a, nil
}

// Ping asks which boot of the guest this is.
func (g *Guest) Ping(ctx context.Context) (*wire.Status, error) {
	a, err := g.Ask(ctx, wire.Request{Op: wire.Ping})
	if err != nil {
		return nil, err
	}
	if a.Status == nil {
		return nil, fmt.Errorf("guest %s: an empty answer", g.Name)
	}
	return a.Status, nil
}

// Devices lists the guest's PCI devices.
func (g *Guest) Devices(ctx context.Context) ([]wire.Device, error) {
	a, err := g.Ask(ctx, wire.Request{Op: wire.List})
	if err != nil {
		return nil, err
	}
	return a.Devices, nil
}

// WaitDevice waits until the guest has a device of that vendor:device ID, and
// returns it.
func (g *Guest) WaitDevice(ctx context.Context, id string) (wire.Device, error) {
	for {
		list, err := g.Devices(ctx)
		if err != nil {
			return wire.Device{}, err
		}
		for _, d := range list {
			if d.ID == id {
				return d, nil
			}
		}
		if err := wait.For(ctx, 200*time.Millisecond); err != nil {
			return wire.Device{}, fmt.Errorf("guest %s has no device %s: %w", g.Name, id, err)
		}
	}
}

// WaitGone waits until the guest has no device of that ID.
func (g *Guest) WaitGone(ctx context.Context, id string) error {
	for {
		list, err := g.Devices(ctx)
		if err != nil {
			return err
		}
		found := false
		for _, d := range list {
			found = found || d.ID == id
		}
		if !found {
			return nil
		}
		if err := wait.For(ctx, 200*time.Millisecond); err != nil {
			return fmt.Errorf("guest %s still has device %s: %w", g.Name, id, err)
		}
	}
}

// ReadRegister reads width bytes at an offset of a BAR, inside the guest.
func (g *Guest) ReadRegister(ctx context.Context, device string, bar int, offset int64, width int) (uint64, error) {
	a, err := g.Ask(ctx, wire.Request{Op: wire.Read, Device: device, BAR: bar, Offset: offset, Width: width})
	if err != nil {
		return 0, err
	}
	return a.Value, nil
}

// WriteRegister writes width bytes at an offset of a BAR, inside the guest.
func (g *Guest) WriteRegister(ctx context.Context, device string, bar int, offset int64, width int, v uint64) error {
	_, err := g.Ask(ctx, wire.Request{Op: wire.Write, Device: device, BAR: bar, Offset: offset, Width: width, Value: v})
	return err
}

// Run runs a line of shell inside the guest and returns its standard output.
func (g *Guest) Run(ctx context.Context, command string) (string, error) {
	seconds := 30
	if d, ok := ctx.Deadline(); ok {
		seconds = max(1, int(time.Until(d).Seconds()))
	}
	a, err := g.Ask(ctx, wire.Request{Op: wire.Exec, Argv: []string{"/bin/sh", "-c", command}, TimeoutSeconds: seconds})
	if err != nil {
		return "", err
	}
	if a.Exit != 0 {
		return string(a.Output), fmt.Errorf("guest %s: %q: exit status %d: %s", g.Name, command, a.Exit, a.Errors)
	}
	return string(a.Output), nil
}

// Healthy returns an error if the guest's kernel complained of itself.
func (g *Guest) Healthy(ctx context.Context) error {
	log, err := g.Run(ctx, "dmesg")
	if err != nil {
		return err
	}
	lines := strings.Split(log, "\n")
	for i, line := range lines {
		for _, bad := range []string{"Oops", "BUG:", "general protection", "Kernel panic", "hung_task", "WARNING: CPU", "soft lockup"} {
			if !strings.Contains(line, bad) {
				continue
			}
			if trace := lines[i:min(len(lines), i+traceLines)]; !consoleResumed(trace) {
				return fmt.Errorf("guest %s: its kernel says: %s", g.Name, strings.Join(trace, "\n"))
			}
		}
	}
	return nil
}

const traceLines = 40

// consoleResumed recognizes what Linux's driver for PV consoles warns of after a
// migration, whoever uses one (docs/xen-notes.md).
func consoleResumed(trace []string) bool {
	return strings.Contains(trace[0], "evtchn_put") &&
		slices.ContainsFunc(trace, func(line string) bool { return strings.Contains(line, "xencons_resume") })
}

// Install puts the product's programs from the repository's bin folder to
// /usr/local/bin on a host.
func Install(ctx context.Context, h *lab.Host, programs ...string) error {
	root, err := lab.Root()
	if err != nil {
		return err
	}
	for _, p := range programs {
		if err := h.Put(ctx, filepath.Join(root, "bin", p), "/usr/local/bin/"+p); err != nil {
			return fmt.Errorf("install %s on %s: %w (`make build` makes it)", p, h.Name, err)
		}
	}
	return nil
}

// StartUnit starts a command on a host as a transient systemd unit, whose
// journal, restarts and end systemctl knows. Properties are systemd's, such as
// "Restart=on-failure".
func StartUnit(ctx context.Context, h *lab.Host, unit, command string, properties ...string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "systemctl reset-failed %s 2>/dev/null; systemd-run -q --unit=%s", lab.Quote(unit), lab.Quote(unit))
	for _, p := range properties {
		fmt.Fprintf(&b, " -p %s", lab.Quote(p))
	}
	_, err := h.Run(ctx, b.String()+" -- /bin/sh -c "+lab.Quote("exec "+command))
	return err
}

// Journal returns what a unit wrote to the journal.
func Journal(ctx context.Context, h *lab.Host, unit string) (string, error) {
	return h.Run(ctx, "journalctl -q --no-pager -o cat -u "+lab.Quote(unit))
}
