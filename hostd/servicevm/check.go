package servicevm

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Protocol is the lowest version of gpuguest that lends the VM's cards.
const Protocol = 5

// Bounds of what a VM says of itself.
const (
	mostDevices   = 64       // of a VM
	mostLent      = 16       // of them, that it lends
	mostAddresses = 8        // at which carriers reach it
	mostModel     = 128      // bytes of a model's name
	mostMemory    = 4 << 40  // bytes of a card
	mostTarget    = 16 << 10 // bytes of what is said of one card
	mostTexts     = 1024     // in it
	mostNumbers   = 16       // sizes of work-items, devices of a runtime
	mostText      = 4096     // bytes of a text in it
)

// device is a card that a VM lends.
type device struct {
	address string // in the VM
	target  *gpuctlv1.Target
}

// offer is what a VM lends.
type offer struct {
	addresses []string // of carriers
	devices   []device
	withheld  map[string]string // why other devices are not lent, by address
}

// check returns what a VM lends. The VM is hostile: an offer that is out of bounds is none.
// loopback permits addresses of this machine, for hosts that are reached there themselves.
func check(hello *gpuctlv1.HelloResponse, loopback bool) (*offer, error) {
	if p := hello.GetProtocol(); p < Protocol {
		return nil, fmt.Errorf("its gpuguest speaks protocol %d, and lending takes %d: install a newer one there", p, Protocol)
	}
	all := hello.GetLendAddresses()
	if len(all) == 0 {
		return nil, errors.New("its gpuguest lends nothing: say lend in gpuguest.yaml there")
	}
	if n := len(all); n > mostAddresses {
		return nil, fmt.Errorf("it is reached at %d addresses, more than %d", n, mostAddresses)
	}
	o := &offer{withheld: map[string]string{}}
	for _, a := range all {
		if err := checkAddress(a, loopback); err != nil {
			return nil, err
		}
		o.addresses = append(o.addresses, a)
	}
	if n := len(hello.GetDevices()); n > mostDevices {
		return nil, fmt.Errorf("it has %d devices, more than %d", n, mostDevices)
	}
	seen := map[string]bool{}
	for _, d := range hello.GetDevices() {
		at, err := pci.ParseAddress(d.GetAddress())
		switch {
		case err != nil:
			return nil, fmt.Errorf("one of its devices has no address: %.40q", d.GetAddress())
		case seen[at.String()]:
			return nil, fmt.Errorf("it has two devices at %s", at)
		}
		seen[at.String()] = true
		if !d.GetLends() {
			o.withheld[at.String()] = words(d.GetMessage())
			continue
		}
		if err := checkTarget(d.GetTarget()); err != nil {
			return nil, fmt.Errorf("device %s: %w", at, err)
		}
		o.devices = append(o.devices, device{at.String(), proto.CloneOf(d.GetTarget())})
	}
	if n := len(o.devices); n > mostLent {
		return nil, fmt.Errorf("it lends %d devices, more than %d", n, mostLent)
	}
	slices.SortFunc(o.devices, func(a, b device) int { return strings.Compare(a.address, b.address) })
	return o, nil
}

// checkAddress refuses addresses by which a VM would have carriers connect to themselves.
func checkAddress(text string, loopback bool) error {
	at, err := netip.ParseAddrPort(text)
	if err != nil || at.Port() == 0 {
		return fmt.Errorf("it is reached at %.80q, which is not IP:PORT", text)
	}
	a := at.Addr().Unmap()
	if a.Zone() == "" && (a.IsGlobalUnicast() || loopback && a.IsLoopback()) {
		return nil
	}
	return fmt.Errorf("it is reached at %s, which is no address of another machine", at)
}

// checkTarget checks what is said of one card.
func checkTarget(t *gpuctlv1.Target) error {
	rt, l := t.GetRuntime(), t.GetLimits()
	switch {
	case proto.Size(t) > mostTarget:
		return fmt.Errorf("%d bytes are said of it, more than %d", proto.Size(t), mostTarget)
	case rt.GetLibrary() == "" || rt.GetRemote() != nil:
		return errors.New("it names no runtime of the VM")
	case len(rt.GetDevices()) > mostNumbers || len(l.GetMaxWorkItemSizes()) > mostNumbers:
		return fmt.Errorf("it has more than %d devices or sizes of work-items", mostNumbers)
	case l.GetGlobalMemory() == 0 || l.GetGlobalMemory() > mostMemory:
		return fmt.Errorf("it has %d bytes of memory, not 1 to %s", l.GetGlobalMemory(), size.Format(mostMemory))
	case l.GetMaxAlloc() > l.GetGlobalMemory():
		return fmt.Errorf("one allocation may have %d bytes, and it has %d", l.GetMaxAlloc(), l.GetGlobalMemory())
	case t.GetModel() == "" || len(t.GetModel()) > mostModel || strings.ContainsFunc(t.GetModel(), func(r rune) bool { return !unicode.IsPrint(r) }):
		return fmt.Errorf("its model %.40q is not a name of 1 to %d printable bytes", t.GetModel(), mostModel)
	}
	texts := slices.Concat([]string{rt.GetLibrary(), l.GetVersion(), l.GetCVersion()}, l.GetExtensions(), l.GetCFeatures(), l.GetIlVersions())
	for k, v := range rt.GetEnv() {
		texts = append(texts, k, v)
	}
	if len(texts) > mostTexts {
		return fmt.Errorf("%d texts are said of it, more than %d", len(texts), mostTexts)
	}
	for _, text := range texts {
		if len(text) > mostText || strings.ContainsRune(text, 0) || !utf8.ValidString(text) {
			return fmt.Errorf("a text in it has more than %d bytes, or a NUL", mostText)
		}
	}
	return nil
}

// words is a text, some of which a VM may have written, as it is passed on. The cluster's log
// would refuse the whole host's report for one that it cannot store.
func words(text string) string {
	clean := strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
	if len(clean) > 200 {
		clean = strings.ToValidUTF8(clean[:200], "") + "…"
	}
	return clean
}
