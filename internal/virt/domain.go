package virt

import (
	"context"
	"encoding/hex"
	stdxml "encoding/xml"
	"errors"
	"fmt"
	"strings"

	"github.com/digitalocean/go-libvirt"
)

// UUID is the UUID of a domain.
type UUID [16]byte

// ParseUUID parses a UUID with or without hyphens, as libvirt does.
func ParseUUID(s string) (UUID, error) {
	var u UUID
	digits := strings.ReplaceAll(s, "-", "")
	if len(digits) != 32 {
		return u, fmt.Errorf("%.60q is no UUID", s)
	}
	if _, err := hex.Decode(u[:], []byte(digits)); err != nil {
		return u, fmt.Errorf("%.60q is no UUID", s)
	}
	return u, nil
}

// String returns the UUID as libvirt writes it.
func (u UUID) String() string {
	h := hex.EncodeToString(u[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// Domain identifies a domain. libvirt finds it by its UUID.
type Domain struct {
	Name string
	UUID UUID
	// ID is the hypervisor's number of the domain at the time of reading; -1 if it did
	// not run.
	ID int
}

func (d Domain) raw() libvirt.Domain {
	return libvirt.Domain{Name: d.Name, UUID: libvirt.UUID(d.UUID), ID: int32(d.ID)}
}

func domainOf(d libvirt.Domain) Domain {
	return Domain{Name: d.Name, UUID: UUID(d.UUID), ID: int(d.ID)}
}

// State is the state of a domain.
type State int32

// States (virDomainState).
const (
	NoState State = iota
	Running
	Blocked
	Paused
	ShuttingDown
	ShutOff
	Crashed
	PMSuspended
)

// String returns virsh's name of the state.
func (s State) String() string {
	words := [...]string{"no state", "running", "idle", "paused", "in shutdown", "shut off", "crashed", "pmsuspended"}
	if s < 0 || int(s) >= len(words) {
		return fmt.Sprintf("state %d", int32(s))
	}
	return words[s]
}

// Active reports whether the hypervisor has the domain.
func (s State) Active() bool { return s != NoState && s != ShutOff && s != Crashed }

// Number is a version in libvirt's form: 9000000 is 9.0.0.
type Number uint64

// String returns major.minor.release.
func (n Number) String() string {
	return fmt.Sprintf("%d.%d.%d", n/1_000_000, n/1000%1000, n%1000)
}

// Versions has the versions of libvirtd and its hypervisor.
type Versions struct {
	Libvirt, Hypervisor Number
}

func (c *Client) query(name, object string) op {
	return op{name: name, object: object, limit: c.limits.Query}
}

func (c *Client) change(name, object string) op {
	return op{name: name, object: object, limit: c.limits.Change, change: true}
}

// done does the same as do, for calls that return nothing.
func done(ctx context.Context, c *Client, o op, f func(*libvirt.Libvirt) error) error {
	_, err := do(ctx, c, o, func(rpc *libvirt.Libvirt) (struct{}, error) { return struct{}{}, f(rpc) })
	return err
}

// Version returns the versions of libvirtd and the hypervisor.
func (c *Client) Version(ctx context.Context) (Versions, error) {
	return do(ctx, c, c.query("version", ""), func(rpc *libvirt.Libvirt) (v Versions, err error) {
		lib, err := rpc.ConnectGetLibVersion()
		if err != nil {
			return v, err
		}
		hv, err := rpc.ConnectGetVersion()
		return Versions{Number(lib), Number(hv)}, err
	})
}

// Capabilities returns the host's capabilities as XML.
func (c *Client) Capabilities(ctx context.Context) ([]byte, error) {
	return do(ctx, c, c.query("capabilities", ""), func(rpc *libvirt.Libvirt) ([]byte, error) {
		s, err := rpc.ConnectGetCapabilities()
		return []byte(s), err
	})
}

// CPU is the processor that a domain needs, and the emulator of its other hardware. Only
// the qemu driver uses Emulator to Type.
type CPU struct {
	XML                           string
	Emulator, Arch, Machine, Type string
}

// HasCPU reports whether domains can get such a processor on this host.
func (c *Client) HasCPU(ctx context.Context, cpu CPU) (bool, error) {
	opt := func(s string) libvirt.OptString {
		if s == "" {
			return nil
		}
		return libvirt.OptString{s}
	}
	return do(ctx, c, c.query("cpu-compare", ""), func(rpc *libvirt.Libvirt) (bool, error) {
		var n int32
		var err error
		if c.driver == QEMU {
			n, err = rpc.ConnectCompareHypervisorCPU(opt(cpu.Emulator), opt(cpu.Arch), opt(cpu.Machine), opt(cpu.Type), cpu.XML, 0)
		} else {
			n, err = rpc.ConnectCompareCPU(cpu.XML, 0)
		}
		return n == cpuIdentical || n == cpuSuperset, err
	})
}

// Results of virConnectCompareCPU.
const (
	cpuIdentical = 1
	cpuSuperset  = 2
)

// Hostname returns the host's name, from libvirtd.
func (c *Client) Hostname(ctx context.Context) (string, error) {
	return do(ctx, c, c.query("hostname", ""), func(rpc *libvirt.Libvirt) (string, error) { return rpc.ConnectGetHostname() })
}

// Domains lists all domains, running or not.
func (c *Client) Domains(ctx context.Context) ([]Domain, error) {
	return do(ctx, c, c.query("list", ""), func(rpc *libvirt.Libvirt) ([]Domain, error) {
		raw, _, err := rpc.ConnectListAllDomains(1, libvirt.ConnectListDomainsActive|libvirt.ConnectListDomainsInactive)
		if err != nil {
			return nil, err
		}
		domains := make([]Domain, len(raw))
		for i, d := range raw {
			domains[i] = domainOf(d)
		}
		return domains, nil
	})
}

// Lookup finds a domain by its UUID or name.
func (c *Client) Lookup(ctx context.Context, nameOrUUID string) (Domain, error) {
	if u, err := ParseUUID(nameOrUUID); err == nil {
		d, err := c.LookupUUID(ctx, u)
		if !errors.Is(err, ErrNotFound) {
			return d, err
		} // or a domain has that UUID as its name
	}
	return do(ctx, c, c.query("domid", nameOrUUID), func(rpc *libvirt.Libvirt) (Domain, error) {
		d, err := rpc.DomainLookupByName(nameOrUUID)
		return domainOf(d), err
	})
}

// LookupUUID finds a domain by its UUID.
func (c *Client) LookupUUID(ctx context.Context, u UUID) (Domain, error) {
	return do(ctx, c, c.query("domid", u.String()), func(rpc *libvirt.Libvirt) (Domain, error) {
		d, err := rpc.DomainLookupByUUID(libvirt.UUID(u))
		return domainOf(d), err
	})
}

// State returns the state of a domain.
func (c *Client) State(ctx context.Context, d Domain) (State, error) {
	s, _, err := c.StateReason(ctx, d)
	return s, err
}

// PausedMigration is the reason of Paused for a domain that a migration has paused
// (virDomainPausedReason).
const PausedMigration = 2

// StateReason returns the state of a domain and the reason for it, whose meaning depends
// on the state.
func (c *Client) StateReason(ctx context.Context, d Domain) (state State, reason int, err error) {
	state, err = do(ctx, c, c.query("domstate", d.Name), func(rpc *libvirt.Libvirt) (State, error) {
		s, r, err := rpc.DomainGetState(d.raw(), 0)
		reason = int(r)
		return State(s), err
	})
	return state, reason, err
}

// PausedInName reports whether libvirt calls a domain paused that Xen runs, given its state and
// the reason for it. libxl's driver keeps a job on the source as long as it sends the domain. It
// pauses the domain for this reason only after that, if Xen refuses to resume it because it was
// never suspended (libxl_migration.c, libxlDomainMigrationSrcConfirm).
func (c *Client) PausedInName(ctx context.Context, d Domain, state State, reason int) (bool, error) {
	if state != Paused || reason != PausedMigration || c.Driver() != Xen {
		return false, nil
	}
	job, err := c.Job(ctx, d)
	return err == nil && job.State != JobBounded && job.State != JobUnbounded, err
}

// XMLFlags select which XML of a domain is returned.
type XMLFlags uint32

// Flags of XML (virDomainXMLFlags).
const (
	// XMLSecure includes passwords. It is needed to define the domain again. Do not show
	// them to anybody.
	XMLSecure XMLFlags = 1
	// XMLInactive selects the persistent definition, which the next start uses, instead
	// of the running domain.
	XMLInactive XMLFlags = 2
	// XMLMigratable omits what a destination would refuse.
	XMLMigratable XMLFlags = 8
)

// XML returns a domain's XML. Without flags it is that of the running domain, if it runs.
func (c *Client) XML(ctx context.Context, d Domain, flags XMLFlags) ([]byte, error) {
	return do(ctx, c, c.query("dumpxml", d.Name), func(rpc *libvirt.Libvirt) ([]byte, error) {
		s, err := rpc.DomainGetXMLDesc(d.raw(), libvirt.DomainXMLFlags(flags))
		return []byte(s), err
	})
}

// fits returns an error if the XML is too long for libvirt's protocol.
func fits(o op, xml []byte) error {
	if len(xml) > maxString {
		return o.failed(fmt.Errorf("%w: XML of %d bytes; libvirt takes up to %d", ErrInvalid, len(xml), maxString))
	}
	return nil
}

// Define makes a domain persistent, or changes the definition of the domain with the same
// name and UUID. A running domain changes only at its next start.
func (c *Client) Define(ctx context.Context, xml []byte) (Domain, error) {
	o := c.change("define", nameIn(xml))
	if err := fits(o, xml); err != nil {
		return Domain{}, err
	}
	return do(ctx, c, o, func(rpc *libvirt.Libvirt) (Domain, error) {
		d, err := rpc.DomainDefineXMLFlags(string(xml), 0)
		return domainOf(d), err
	})
}

// nameIn returns the name in a domain's XML, for errors.
func nameIn(xml []byte) string {
	var d struct {
		Name string `xml:"name"`
	}
	if len(xml) > maxString || stdxml.Unmarshal(xml, &d) != nil {
		return ""
	}
	return strings.TrimSpace(d.Name)
}

// Snapshots returns how many snapshots and checkpoints libvirt has of a domain. With some, it neither removes the
// definition nor, with snapshots, migrates the domain.
func (c *Client) Snapshots(ctx context.Context, d Domain) (snapshots, checkpoints int, err error) {
	if c.driver != QEMU { // the others know none
		return 0, 0, nil
	}
	count := func(name string, f func(*libvirt.Libvirt) (int32, error)) int {
		n, e := do(ctx, c, c.query(name, d.Name), f)
		if e != nil && !errors.Is(e, ErrUnsupported) {
			err = e
		}
		return max(0, int(n))
	}
	snapshots = count("snapshot-list", func(rpc *libvirt.Libvirt) (int32, error) { return rpc.DomainSnapshotNum(d.raw(), 0) })
	checkpoints = count("checkpoint-list", func(rpc *libvirt.Libvirt) (int32, error) {
		_, n, err := rpc.DomainListAllCheckpoints(d.raw(), 0, 0)
		return n, err
	})
	return snapshots, checkpoints, err
}

// Undefine removes a domain's persistent definition. A running domain goes on. The file with
// the variables of the domain's firmware stays: without being told what to do with it, qemu's
// driver refuses. libxl's knows no such file, and refuses to be told.
func (c *Client) Undefine(ctx context.Context, d Domain) error {
	var flags libvirt.DomainUndefineFlagsValues
	if c.driver == QEMU {
		flags = libvirt.DomainUndefineKeepNvram
	}
	return done(ctx, c, c.change("undefine", d.Name), func(rpc *libvirt.Libvirt) error { return rpc.DomainUndefineFlags(d.raw(), flags) })
}

// Start starts a defined domain and returns it with its ID (virDomainCreate).
func (c *Client) Start(ctx context.Context, d Domain) (Domain, error) {
	return do(ctx, c, c.change("start", d.Name), func(rpc *libvirt.Libvirt) (Domain, error) {
		d, err := rpc.DomainCreateWithFlags(d.raw(), 0)
		return domainOf(d), err
	})
}

// Shutdown asks the guest to shut down. The guest may refuse or need some time. The event
// Stopped follows when it has shut down.
func (c *Client) Shutdown(ctx context.Context, d Domain) error {
	return done(ctx, c, c.change("shutdown", d.Name), func(rpc *libvirt.Libvirt) error { return rpc.DomainShutdownFlags(d.raw(), 0) })
}

// Destroy ends a running domain at once.
func (c *Client) Destroy(ctx context.Context, d Domain) error {
	return done(ctx, c, c.change("destroy", d.Name), func(rpc *libvirt.Libvirt) error { return rpc.DomainDestroyFlags(d.raw(), 0) })
}

// Suspend pauses a running domain.
func (c *Client) Suspend(ctx context.Context, d Domain) error {
	return done(ctx, c, c.change("suspend", d.Name), func(rpc *libvirt.Libvirt) error { return rpc.DomainSuspend(d.raw()) })
}

// Resume lets a paused domain run.
func (c *Client) Resume(ctx context.Context, d Domain) error {
	return done(ctx, c, c.change("resume", d.Name), func(rpc *libvirt.Libvirt) error { return rpc.DomainResume(d.raw()) })
}

// Affect selects what an attach or detach changes.
type Affect uint32

// What is changed (virDomainDeviceModifyFlags). Both may be combined.
const (
	Live   Affect = 1 // the running domain
	Config Affect = 2 // its persistent definition
)

// Attach adds the device in the XML. Success proves nothing: see the package's
// documentation.
func (c *Client) Attach(ctx context.Context, d Domain, device []byte, what Affect) error {
	o := c.change("attach-device", d.Name)
	if err := fits(o, device); err != nil {
		return err
	}
	return done(ctx, c, o, func(rpc *libvirt.Libvirt) error {
		return rpc.DomainAttachDeviceFlags(d.raw(), string(device), uint32(what))
	})
}

// Detach removes the device in the XML. On qemu it returns when the guest was asked, and
// the event DeviceRemoved or DeviceRemovalFailed follows if the guest does not answer
// soon. On Xen it waits for the guest. It must not be called unless the guest is known to
// answer: see the package's documentation.
func (c *Client) Detach(ctx context.Context, d Domain, device []byte, what Affect) error {
	o := c.change("detach-device", d.Name)
	if err := fits(o, device); err != nil {
		return err
	}
	return done(ctx, c, o, func(rpc *libvirt.Libvirt) error {
		return rpc.DomainDetachDeviceFlags(d.raw(), string(device), uint32(what))
	})
}

// Persistent reports whether a domain has a stored definition.
func (c *Client) Persistent(ctx context.Context, d Domain) (bool, error) {
	return do(ctx, c, c.query("dominfo", d.Name), func(rpc *libvirt.Libvirt) (bool, error) {
		n, err := rpc.DomainIsPersistent(d.raw())
		return n == 1, err
	})
}

// Autostart reports whether libvirt starts a domain when its host has booted. Only a domain with
// a stored definition can have that.
func (c *Client) Autostart(ctx context.Context, d Domain) (bool, error) {
	return do(ctx, c, c.query("dominfo", d.Name), func(rpc *libvirt.Libvirt) (bool, error) {
		n, err := rpc.DomainGetAutostart(d.raw())
		return n == 1, err
	})
}

// SetAutostart says whether it does.
func (c *Client) SetAutostart(ctx context.Context, d Domain, on bool) error {
	var n int32
	if on {
		n = 1
	}
	return done(ctx, c, c.change("autostart", d.Name), func(rpc *libvirt.Libvirt) error { return rpc.DomainSetAutostart(d.raw(), n) })
}

// FreeMemory returns how much memory the host can still give to domains, in bytes.
func (c *Client) FreeMemory(ctx context.Context) (uint64, error) {
	return do(ctx, c, c.query("freecell", ""), func(rpc *libvirt.Libvirt) (uint64, error) { return rpc.NodeGetFreeMemory() })
}
