package endpoint

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"

	"libvirt.org/go/libvirtxml"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/passthrough/domxml"
)

// MachineFacts returns what a plan needs to know about a VM of this host.
func (l *Local) MachineFacts(ctx context.Context, uuid string) (*gpuctlv1.SiteMachineFacts, error) {
	d, err := l.domain(ctx, uuid)
	if err != nil {
		return nil, err
	}
	text, err := l.Client.XML(ctx, d, 0)
	if err != nil {
		return nil, err
	}
	doc, err := domxml.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("vm %s: %w", d.Name, err)
	}
	var x libvirtxml.Domain
	if err := x.Unmarshal(string(text)); err != nil {
		return nil, fmt.Errorf("vm %s: %w", d.Name, err)
	}
	m, err := l.VMs.Find(ctx, uuid)
	if err != nil {
		return nil, err
	}
	out := &gpuctlv1.SiteMachineFacts{
		Uuid: uuid, Name: m.Name, State: m.State, Type: m.Type, Memory: m.Memory, Passthrough: !doc.Xen() || doc.Passthrough(), Disks: files(&x),
	}
	if out.Cpu, err = l.cpu(ctx, &x); err != nil {
		return nil, err
	}
	out.Stays = stays(&x)
	snapshots, checkpoints, err := l.Client.Snapshots(ctx, d)
	if err != nil {
		return nil, err
	}
	out.Snapshots, out.Checkpoints = uint32(snapshots), uint32(checkpoints)
	if l.Locks != nil && m.State == virt.Running.String() {
		out.Unlocked = l.unlocked(out.GetDisks())
	}
	if l.Serves != nil {
		out.Serves = l.Serves(uuid)
	}
	if l.Parts != nil {
		out.Parts = l.Parts.Parts(uuid)
	}
	ours := map[string]bool{}
	cards, err := l.Keeper.Cards(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range cards {
		if c.GetMachine() != uuid {
			continue
		}
		out.Gpus = append(out.Gpus, l.Name+"/"+c.GetGpu())
		for _, f := range c.GetFunctions() {
			ours[f.GetAddress()] = true
		}
	}
	for _, h := range doc.HostDevices() {
		if h.Source.MDev != "" || !ours[h.Source.PCI.String()] {
			out.OtherDevices = append(out.OtherDevices, h.Source.String())
		}
	}
	if out.Persistent = m.Persistent; m.Persistent {
		if out.Stored, err = l.stores(ctx, d, ours); err != nil {
			return nil, err
		}
	}
	l.agentFacts(ctx, out)
	return out, nil
}

// stores reports whether the VM's stored definition contains one of these functions.
func (l *Local) stores(ctx context.Context, d virt.Domain, functions map[string]bool) (bool, error) {
	text, err := l.Client.XML(ctx, d, virt.XMLInactive)
	if err != nil {
		return false, err
	}
	doc, err := domxml.Parse(text)
	if err != nil {
		return false, fmt.Errorf("vm %s: %w", d.Name, err)
	}
	return slices.ContainsFunc(doc.HostDevices(), func(h domxml.HostDevice) bool { return functions[h.Source.PCI.String()] }), nil
}

// cpu returns the processor model and features that the VM needs on every host: those in
// its definition, or all of this host's if it got those.
func (l *Local) cpu(ctx context.Context, x *libvirtxml.Domain) (*gpuctlv1.SiteCPU, error) {
	out := &gpuctlv1.SiteCPU{Type: x.Type}
	if x.OS != nil && x.OS.Type != nil {
		out.Arch, out.Machine = x.OS.Type.Arch, x.OS.Type.Machine
	}
	if x.Devices != nil {
		out.Emulator = x.Devices.Emulator
	}
	mode := "host-passthrough" // Xen's default
	if x.CPU != nil {
		mode = x.CPU.Mode
	} else if l.Client.Driver() == virt.QEMU {
		return nil, nil //nolint:nilnil // any processor is an answer
	}
	if x.CPU != nil && x.CPU.Model != nil && mode == "custom" {
		data, err := xml.Marshal(x.CPU)
		out.Xml = string(data)
		return out, err
	}
	caps, err := l.Client.Capabilities(ctx)
	if err != nil {
		return nil, err
	}
	// The host's <cpu> is the first one, before those that VMs can have.
	_, rest, found := strings.Cut(string(caps), "<cpu>")
	body, _, closed := strings.Cut(rest, "</cpu>")
	if !found || !closed {
		return nil, nil //nolint:nilnil // libvirt knows no model for it, so it cannot compare
	}
	out.Xml = "<cpu>" + body + "</cpu>"
	return out, nil
}

// agentFacts adds what the VM's agent reports. One that takes requests and does not answer
// must not keep who plans for many VMs.
func (l *Local) agentFacts(ctx context.Context, out *gpuctlv1.SiteMachineFacts) {
	ctx, cancel := context.WithTimeout(ctx, l.Guests.Patience)
	defer cancel()
	hello, err := l.Guests.Hello(ctx, out.GetUuid())
	if err != nil {
		out.AgentError = strings.TrimPrefix(err.Error(), errNoAgent.Error()+": ")
		return
	}
	all, refused, err := l.adopted(ctx, out.GetUuid())
	if err != nil {
		out.AgentError = strings.TrimPrefix(err.Error(), errNoAgent.Error()+": ")
		return
	}
	out.Agent, out.Refused = true, refused
	out.Hello = l.summary(hello)
	for _, s := range all {
		if abroad(s) {
			continue // it goes on where it is
		}
		switch s.GetState() {
		case gpuctlv1.SessionState_SESSION_STATE_ENDED, gpuctlv1.SessionState_SESSION_STATE_LOST:
		default:
			out.Sessions = append(out.Sessions, siteSession(s))
		}
	}
}

func siteSession(s *gpuctlv1.Session) *gpuctlv1.SiteSession {
	return &gpuctlv1.SiteSession{
		Id: s.GetId(), Command: s.GetCommand(), Usage: s.GetUsage(), Frozen: s.GetState() == gpuctlv1.SessionState_SESSION_STATE_SUSPENDED,
		Engine: s.GetEngine(),
	}
}

// summary returns the part of an agent's Hello that a plan needs.
func (l *Local) summary(hello *gpuctlv1.HelloResponse) *gpuctlv1.HelloResponseSummary {
	return &gpuctlv1.HelloResponseSummary{
		Version: hello.GetVersion(), Protocol: hello.GetProtocol(), Hotplug: hello.GetHotplug(), HotplugReason: hello.GetHotplugReason(), FreeMemory: hello.GetFreeMemory(),
		Bulk: l.Guests.speed(),
	}
}

// files returns the VM's files that must exist on the destination, too.
func files(x *libvirtxml.Domain) (out []*gpuctlv1.SiteDisk) {
	add := func(path string, readOnly bool) {
		if strings.HasPrefix(path, "/") {
			out = append(out, &gpuctlv1.SiteDisk{Path: path, ReadOnly: readOnly})
		}
	}
	if x.OS != nil {
		add(x.OS.Kernel, true)
		add(x.OS.Initrd, true)
		if path := variables(x.OS.NVRam); strings.HasPrefix(path, "/") {
			// One that another start has left on a host is not this one.
			out = append(out, &gpuctlv1.SiteDisk{Path: path, Start: true, Sum: sum(path)})
		}
	}
	if x.Devices == nil {
		return out
	}
	for _, d := range x.Devices.Disks {
		if d.Source == nil {
			continue
		}
		switch {
		case d.Source.File != nil:
			add(d.Source.File.File, d.ReadOnly != nil)
		case d.Source.Block != nil:
			add(d.Source.Block.Dev, d.ReadOnly != nil)
		}
	}
	return out
}

// variables returns the path of the file with the variables of a VM's firmware; empty: none.
func variables(n *libvirtxml.DomainNVRam) string {
	switch {
	case n == nil:
		return ""
	case n.Source != nil && n.Source.File != nil:
		return n.Source.File.File
	}
	return strings.TrimSpace(n.NVRam)
}

// largestVariables is the most that is compared of such a file.
const largestVariables = 64 << 20

// sum returns the SHA-256 of a file; nil: it cannot be read.
func sum(path string) []byte {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO would keep it waiting
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if i, err := f.Stat(); err != nil || !i.Mode().IsRegular() {
		return nil
	}
	if _, err := io.Copy(h, io.LimitReader(f, largestVariables)); err != nil {
		return nil
	}
	return h.Sum(nil)
}

// stays returns what of a VM is on this host only, and is not found where the VM is started next.
func stays(x *libvirtxml.Domain) (out []string) {
	if x.Devices != nil && len(x.Devices.TPMs) > 0 {
		out = append(out, "a TPM")
	}
	return out
}

// missing returns which of a VM's files are not on this host, or differ.
func (l *Local) missing(disks []*gpuctlv1.SiteDisk) (out []string) {
	for _, d := range disks {
		if err := l.Files(d.GetPath()); err != nil || len(d.GetSum()) > 0 && !bytes.Equal(d.GetSum(), sum(d.GetPath())) {
			out = append(out, d.GetPath())
		}
	}
	return out
}

// HostFacts returns what a plan needs to know about this host.
func (l *Local) HostFacts(ctx context.Context, r *gpuctlv1.SiteHostFactsRequest) (*gpuctlv1.SiteHostFacts, error) {
	if l.Client == nil {
		return nil, errors.New("it has no libvirt")
	}
	out := &gpuctlv1.SiteHostFacts{Name: l.Name, Hypervisor: "kvm"}
	if l.Client.Driver() == virt.Xen {
		out.Hypervisor = "xen"
	}
	var err error
	if out.FreeMemory, err = l.Client.FreeMemory(ctx); err != nil {
		return nil, err
	}
	out.Missing = l.missing(r.GetDisks())
	if c := r.GetCpu(); c != nil && r.GetFrom() != l.Name {
		switch has, err := l.Client.HasCPU(ctx, virt.CPU{XML: c.GetXml(), Emulator: c.GetEmulator(), Arch: c.GetArch(), Machine: c.GetMachine(), Type: c.GetType()}); {
		case errors.Is(err, virt.ErrUnsupported): // whether it works is only known after the attempt
		case err != nil:
			return nil, err
		case !has:
			out.Cpu = "libvirt says that it lacks features of it: virsh cpu-compare tells which"
		}
	}
	if l.Parts != nil {
		out.PartRoom = l.Parts.Room()
	}
	out.LockManager, out.LockManagerError = l.lockManager(ctx)
	if r.GetFrom() != "" && r.GetFrom() != l.Name && l.Link != nil {
		out.Link = l.Link(ctx, r.GetFrom())
	}
	if l.Stash != nil {
		if out.Keep, err = l.Stash.Room(); err != nil {
			return nil, err
		}
		out.Keeps = l.Stash.Keeps()
	}
	cards, err := l.Keeper.Cards(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range cards {
		s := &gpuctlv1.SiteCard{Gpu: l.Name + "/" + c.GetGpu(), Holder: c.GetMachineName()}
		if c.GetPhase() == gpuctlv1.CardPhase_CARD_PHASE_QUARANTINED {
			s.Health = "quarantined: " + c.GetMessage()
		}
		if s.Holder == "" && c.GetMachine() != "" {
			s.Holder = c.GetMachine()
		}
		if s.Holder != "" {
			s.Holder = "VM " + s.GetHolder()
		}
		if report, err := l.Keeper.Isolated(ctx, c.GetAddress()); err != nil {
			s.Isolation = err.Error()
		} else {
			for _, f := range report.GetFindings() {
				if f.GetSeverity() == "refuse" {
					s.Isolation = f.GetMessage()
					break
				}
			}
		}
		if s.GetIsolation() == "" {
			if s.Isolation, err = l.Keeper.HotplugBlocker(c.GetAddress()); err != nil {
				return nil, err
			}
		}
		for _, f := range c.GetFunctions() {
			if f.GetAddress() == c.GetAddress() {
				s.Id = &gpuctlv1.PCIIdentity{
					VendorId: f.GetVendorId(), DeviceId: f.GetDeviceId(), SubVendorId: f.GetSubVendorId(), SubDeviceId: f.GetSubDeviceId(), Class: f.GetClass(),
				}
			}
		}
		out.Cards = append(out.Cards, s)
	}
	return out, nil
}
