package isolation

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/xen"
)

// Verdict is whether a card may be given to a VM. A greater value is worse.
type Verdict uint8

// Verdicts.
const (
	Yes  Verdict = iota // for a reason: only a note
	Care                // possible, if the operator accepts a risk
	No
)

func (v Verdict) String() string {
	return [...]string{"may be given away", "may be given away with care", "may not be given away"}[min(v, No)]
}

// MarshalText returns "yes", "care" or "no", for JSON.
func (v Verdict) MarshalText() ([]byte, error) {
	return []byte([...]string{"yes", "care", "no"}[min(v, No)]), nil
}

// Code is the code of a reason, for programs.
type Code string

// Reasons.
const (
	CodeBridge             Code = "bridge"
	CodeClass              Code = "wrong-class"
	CodeDead               Code = "dead"
	CodeIOMMUOff           Code = "iommu-off"
	CodeIOMMUUnknown       Code = "iommu-unknown"
	CodeInterruptRemapping Code = "no-interrupt-remapping"
	CodeSharedGroup        Code = "shared-group"
	CodeNoACS              Code = "no-acs"
	CodeUnreadable         Code = "config-unreadable"
	CodeXenGroup           Code = "xen-group"
	CodeReserved           Code = "rmrr"
	CodeRootBus            Code = "root-bus"
	CodeNoReset            Code = "no-reset"
	CodeFunctions          Code = "functions-missing"
	CodeVFs                Code = "vfs-enabled"
	CodeBootVGA            Code = "boot-vga"
	CodeFaults             Code = "dma-faults"
	CodeUnanswered         Code = "unanswered"
)

// Reason is a reason against giving a card to a VM, and what to do.
type Reason struct {
	Code    Code    `json:"code"`
	Verdict Verdict `json:"verdict"`
	Text    string  `json:"text"`
	Do      string  `json:"do"`
}

// Report is the judgement of a card.
type Report struct {
	Card     pci.Address   `json:"card"`
	Source   string        `json:"source"` // source of the facts
	Verdict  Verdict       `json:"verdict"`
	Together []pci.Address `json:"together"` // what must be given away together, including functions of the card
	Reasons  []Reason      `json:"reasons"`  // worst first
}

// String returns the report as text for operators.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s (asked: %s)\n", r.Card, r.Verdict, r.Source)
	if len(r.Together) > 1 {
		fmt.Fprintf(&b, "  always together: %s\n", list(r.Together))
	}
	for _, reason := range r.Reasons {
		fmt.Fprintf(&b, "  %s: %s\n    %s\n", [...]string{"note", "care", "no"}[min(reason.Verdict, No)], reason.Text, reason.Do)
	}
	return b.String()
}

// Source provides the facts that are not in the card's own data.
type Source interface {
	Facts(ctx context.Context, card *pci.Card) (Facts, error)
}

// Facts are what a source knows about a card.
type Facts struct {
	Source             string // "Xen 4.17.7" or "the kernel's IOMMU groups"
	Xen                bool   // the hypervisor controls the IOMMU
	IOMMU              xen.State
	InterruptRemapping xen.State
	Neighbours         map[pci.Address]Neighbour // devices that share something with the card
	Group              []pci.Address             // Xen's device group, without the card's functions
	Reserved           []xen.Reserved            // reserved regions to which a function of the card belongs
	Refused            []xen.Refused             // functions of the card that Xen has refused
	Faults             map[pci.Address]int       // number of DMA faults, by function of the card
	Unanswered         []string                  // facts that could not be obtained, and why
}

// Neighbour is a device that shares something with a card.
type Neighbour struct {
	Class  uint16
	Driver string // empty: none
}

// Examine gets the facts from the source and judges the card.
func Examine(ctx context.Context, card *pci.Card, source Source) (Report, error) {
	facts, err := source.Facts(ctx, card)
	if err != nil {
		return Report{}, fmt.Errorf("isolation of %s: %w", card.Address, err)
	}
	return Judge(card, facts), nil
}

// Judge judges a card. It is a pure function.
func Judge(card *pci.Card, f Facts) Report {
	r := Report{Card: card.Address, Source: f.Source}
	for _, d := range card.Functions {
		r.Together = append(r.Together, d.Address)
	}
	j := judge{card, f, &r}
	j.device()
	j.iommu()
	j.sharing()
	j.reserved()
	j.reset()
	j.use()
	for _, what := range f.Unanswered {
		r.add(CodeUnanswered, Yes, what, "what it would have said is not in this report")
	}
	slices.SortStableFunc(r.Reasons, func(a, b Reason) int { return int(b.Verdict) - int(a.Verdict) })
	slices.SortFunc(r.Together, pci.Address.Compare)
	r.Together = slices.Compact(r.Together)
	return r
}

func (r *Report) add(code Code, v Verdict, text, do string) {
	r.Reasons = append(r.Reasons, Reason{code, v, text, do})
	r.Verdict = max(r.Verdict, v)
}

type judge struct {
	card *pci.Card
	f    Facts
	r    *Report
}

// device judges the card itself.
func (j judge) device() {
	for _, d := range j.card.Functions {
		if d.Class>>8 == pci.ClassBridge {
			j.r.add(CodeBridge, No, fmt.Sprintf("%s is a bridge: the devices below it are not its own", d.Address),
				"give away the devices below it instead")
		}
		if d.Dead() {
			j.r.add(CodeDead, No, fmt.Sprintf("%s does not answer: its configuration space reads all ones", d.Address),
				"reset the card; if it stays dead, switch the host off and on again")
		}
	}
	main := j.card.Main()
	if main == nil {
		j.r.add(CodeFunctions, No, fmt.Sprintf("%s, the main function of the card, is not there", j.card.Address),
			"rescan the bus; if it stays away, reseat the card")
		return
	}
	if !main.Managed() && main.Class>>8 != pci.ClassBridge {
		j.r.add(CodeClass, No, fmt.Sprintf("%s (%s) is neither a display controller nor an accelerator", main.Address, class(uint16(main.Class>>8))),
			"choose another device: only classes 03 and 12 are managed")
	}
	if main.PF != nil {
		return // virtual functions can be given away one by one
	}
	switch first := j.card.Functions[0].Address; {
	case first.Function != 0:
		j.r.add(CodeFunctions, Care, fmt.Sprintf("function 0 of %s is missing, the card begins with %s", first.Slot(), first),
			"rescan the bus: functions of one card are given away together")
	case main.Config.Multifunction && len(j.card.Functions) == 1 && len(j.card.VFs) == 0 && main.SRIOV == nil:
		j.r.add(CodeFunctions, Care, fmt.Sprintf("%s says that its card has several functions, and it is the only one", main.Address),
			"rescan the bus if another was removed: functions of one card are given away together")
	}
}

func (j judge) iommu() {
	switch {
	case j.f.IOMMU == xen.Off && j.f.Xen:
		j.r.add(CodeIOMMUOff, No, "the IOMMU is off in Xen: the card could write to all of the host's memory, and Xen refuses it",
			`switch VT-d or AMD-Vi on in the firmware and take "iommu=off" from Xen's command line; after the next boot "xl info" lists hvm_directio`)
	case j.f.IOMMU == xen.Off:
		j.r.add(CodeIOMMUOff, No, "the card is in no IOMMU group: it could write to all of the host's memory, and the kernel refuses it",
			`switch VT-d or AMD-Vi on in the firmware and boot the kernel with "intel_iommu=on" (Intel) or without "amd_iommu=off" (AMD)`)
	case j.f.IOMMU == xen.Unknown:
		j.r.add(CodeIOMMUUnknown, Care, "it is not known whether the IOMMU is on",
			`look for hvm_directio in "xl info"; without it the card cannot be given away`)
	}
	if j.f.InterruptRemapping == xen.Off && j.f.IOMMU != xen.Off {
		j.r.add(CodeInterruptRemapping, Care, "interrupt remapping is off: a guest with the card can send the host any interrupt",
			`switch it on in the firmware, and take "iommu=no-intremap" from Xen's command line; until then give the card to guests that you trust`)
	}
}

// sharing judges devices that are not isolated from the card.
func (j judge) sharing() {
	own := func(a pci.Address) bool {
		return slices.ContainsFunc(j.card.Functions, func(d *pci.Device) bool { return d.Address == a })
	}
	for _, a := range j.f.Group {
		if own(a) {
			continue
		}
		n := j.f.Neighbours[a]
		j.together(a)
		j.r.add(CodeXenGroup, unlessFree(n), fmt.Sprintf("Xen cannot tell its DMA from that of %s: they are in one device group", n.name(a)),
			fmt.Sprintf("give %s to the same guest, or move one of them to another slot", a))
	}
	for _, a := range j.card.Shared {
		n := j.f.Neighbours[a]
		if slices.Contains(j.f.Group, a) {
			continue // a worse reason covers it already
		}
		if !j.f.Xen {
			j.iommuGroup(a, n)
			continue
		}
		why := "the ports above it do not keep devices apart"
		if j.card.Leak != nil {
			why = j.card.Leak.String()
		}
		if j.card.Leak != nil && strings.HasSuffix(j.card.Leak.Why, "cannot be read") {
			j.r.add(CodeUnreadable, Care, fmt.Sprintf("%s: whether %s can be reached from it is not known", why, n.name(a)),
				"run hostd as root: the kernel shows others a quarter of the configuration space")
			continue
		}
		j.r.add(CodeNoACS, Care, fmt.Sprintf("%s: %s can be reached from it past the IOMMU", why, n.name(a)),
			fmt.Sprintf("switch ACS on in the firmware if it offers that, give %s to the same guest, or move one of them to another slot", a))
	}
}

// iommuGroup judges another device in the card's IOMMU group. The kernel gives a group
// away only if no other driver uses any device of it.
func (j judge) iommuGroup(a pci.Address, n Neighbour) {
	text := fmt.Sprintf("it shares %s with %s", group(j.card.Why), n.name(a))
	if j.card.Leak != nil {
		text += fmt.Sprintf(", as %s", j.card.Leak)
	}
	j.together(a)
	if n.free() {
		j.r.add(CodeSharedGroup, Care, text, fmt.Sprintf("leave %s unbound or give it to the same guest: no other can have it", a))
		return
	}
	j.r.add(CodeSharedGroup, No, text,
		fmt.Sprintf("unbind %s from %s or bind it to vfio-pci, and the host loses it; or move one of them to another slot", a, n.Driver))
}

func group(why string) string {
	if s, _, ok := strings.Cut(why, ";"); ok || s == "" {
		return "an IOMMU group"
	}
	return why
}

func (j judge) together(a pci.Address) { j.r.Together = append(j.r.Together, a) }

// unlessFree returns No while the host uses the neighbour.
func unlessFree(n Neighbour) Verdict {
	if n.free() {
		return Care
	}
	return No
}

// free reports whether the host does not use the neighbour.
func (n Neighbour) free() bool { return n.Driver == "" || passthroughDriver(n.Driver) }

func passthroughDriver(name string) bool {
	return name == "pciback" || name == "pci-stub" || strings.HasPrefix(name, "vfio") || strings.Contains(name, "vfio_pci") || strings.Contains(name, "vfio-pci")
}

// reserved judges memory that the firmware reserves for devices.
func (j judge) reserved() {
	said := map[pci.Address]bool{}
	for _, refused := range j.f.Refused {
		if said[refused.Device] {
			continue
		}
		said[refused.Device] = true
		verdict, verb := No, "has refused to give"
		if refused.Risky {
			verdict, verb = Care, "calls it risky to give"
		}
		j.r.add(CodeReserved, verdict, fmt.Sprintf("Xen %s %s away: it shares memory that the firmware reserves (RMRR at %#x)", verb, refused.Device, refused.Start), doReserved)
	}
	for _, region := range j.f.Reserved {
		var mine, others []pci.Address
		for _, a := range region.Devices {
			switch own := slices.ContainsFunc(j.card.Functions, func(d *pci.Device) bool { return d.Address == a }); {
			case own && !said[a]:
				mine = append(mine, a)
			case !own:
				others = append(others, a)
			}
		}
		if len(mine) == 0 {
			continue
		}
		where := "memory"
		if region.End != 0 {
			where = fmt.Sprintf("memory at %#x to %#x", region.Start, region.End)
		}
		switch {
		case !j.f.Xen:
			j.r.add(CodeReserved, No, fmt.Sprintf("the firmware reserves %s for %s (RMRR), and the kernel does not give such devices away", where, list(mine)),
				"ask the maker of the host for a firmware that does not, or switch off in it what monitors the card")
		case len(region.Devices) > 1: // Xen refuses that, even if all devices belong to one card
			with := "each other"
			if len(others) > 0 {
				with = list(others)
			}
			j.r.add(CodeReserved, No, fmt.Sprintf("Xen will refuse to give %s away: the firmware reserves %s (RMRR) for it and %s", list(mine), where, with), doReserved)
		default:
			j.r.add(CodeReserved, Care, fmt.Sprintf("the firmware reserves %s for %s (RMRR): it stays mapped while a guest has the card", where, list(mine)),
				"nothing, unless the guest does not start: then set rdm_policy=relaxed for the device")
		}
	}
}

const doReserved = "ask the maker of the host for a firmware that does not, or, if the card needs that memory only until the system boots, set rdm_policy=relaxed for the device"

// reset judges whether the card can be reset. libvirt refuses a device that it cannot
// reset.
func (j judge) reset() {
	for _, d := range j.card.Functions {
		own := d.Config.FLR || d.Config.PM && !d.Config.NoSoftReset
		if d.Dead() || len(d.ResetMethods) > 0 || own {
			continue
		}
		if len(d.Upstream) == 0 {
			j.r.add(CodeRootBus, No, fmt.Sprintf("%s is on the root bus and has no reset of its own (FLR or power management): libvirt refuses it", d.Address),
				"move the card to a slot behind a root port; what is part of the chipset stays with the host")
			continue
		}
		if d.Address != j.card.Address {
			continue // the bus is reset for the whole card
		}
		j.r.add(CodeNoReset, Care, fmt.Sprintf("%s has no reset that the kernel knows: what one guest leaves in it the next one finds", d.Address),
			"reset it by the bus above or by its power, or switch the host off and on between guests that must not know of each other")
	}
}

// use judges what the host does with the card.
func (j judge) use() {
	for _, d := range j.card.Functions {
		if d.SRIOV != nil && d.SRIOV.NumVFs > 0 {
			j.r.add(CodeVFs, No, fmt.Sprintf("%s has %d virtual functions switched on: who has it rules them", d.Address, d.SRIOV.NumVFs),
				"take its virtual functions back and switch them off (sriov_numvfs 0) first, or give virtual functions away instead of the card")
		}
		if d.BootVGA {
			j.r.add(CodeBootVGA, Care, fmt.Sprintf("%s is the host's console (boot VGA): the screen goes dark, and a framebuffer of the firmware may hold its memory", d.Address),
				`use a serial or network console, and boot the kernel with "video=efifb:off" or "nomodeset" if the card cannot be taken`)
		}
		if n := j.f.Faults[d.Address]; n > 0 {
			j.r.add(CodeFaults, Care, fmt.Sprintf("the IOMMU has stopped %d accesses of %s to memory that is not its own", n, d.Address),
				"look at the log of the hypervisor or the kernel: the card, its firmware or a guest's driver may be at fault")
		}
	}
}

func (n Neighbour) name(a pci.Address) string {
	switch {
	case n.Class == 0 && n.Driver == "":
		return a.String()
	case n.Driver == "":
		return fmt.Sprintf("%s (%s, no driver)", a, class(n.Class))
	}
	return fmt.Sprintf("%s (%s, driver %s)", a, class(n.Class), n.Driver)
}

// class returns the name of a class of devices that are often beside a card.
func class(c uint16) string {
	switch c {
	case 0x0100, 0x0104, 0x0107:
		return "storage controller"
	case 0x0106:
		return "SATA controller"
	case 0x0108:
		return "NVMe drive"
	case 0x0200:
		return "network controller"
	case 0x0207:
		return "InfiniBand controller"
	case pci.ClassVGA:
		return "VGA controller"
	case pci.Class3D:
		return "3D controller"
	case pci.ClassDisplay:
		return "display controller"
	case pci.ClassAudio:
		return "audio device"
	case pci.ClassBridge:
		return "PCI bridge"
	case pci.ClassUSB:
		return "USB controller"
	case pci.ClassAccelerator:
		return "accelerator"
	}
	return fmt.Sprintf("device of class %04x", c)
}

func list(addresses []pci.Address) string {
	var s []string
	for _, a := range addresses {
		s = append(s, a.String())
	}
	return strings.Join(s, ", ")
}
