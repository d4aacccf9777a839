package domxml

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"libvirt.org/go/libvirtxml"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Errors of edits.
var (
	// ErrNotFound means that the domain does not have the device.
	ErrNotFound = errors.New("the domain has no such device")
	// ErrExists means that the domain has the device already.
	ErrExists = errors.New("the domain has this device already")
	// ErrInvalid means that a device or channel is invalid.
	ErrInvalid = errors.New("not a valid device")
)

// Source is the host's side of a device: a PCI function, or a mediated device.
type Source struct {
	PCI pci.Address
	// MDev is the UUID of a mediated device, in lower case with hyphens. It is
	// empty for a PCI function.
	MDev string
}

// String returns the address or the UUID.
func (s Source) String() string {
	if s.MDev != "" {
		return s.MDev
	}
	return s.PCI.String()
}

// HostDevice is a <hostdev mode='subsystem'> of type pci or mdev.
type HostDevice struct {
	Source Source
	// Managed makes libvirt bind the device itself. gpuctl does that, so it should be
	// false.
	Managed bool
	// Driver is the name in <driver>, or empty.
	Driver string
	// Model is the model of a mediated device; empty: vfio-pci.
	Model string
	// Alias is libvirt's alias of the device, or empty.
	Alias string
	// Guest is the address in the guest; nil: libvirt chooses one.
	Guest *pci.Address
}

// XML returns the device as an XML element.
func (h HostDevice) XML() []byte {
	var b strings.Builder
	kind := "pci"
	if h.Source.MDev != "" {
		kind = "mdev"
	}
	fmt.Fprintf(&b, "<hostdev mode='subsystem' type='%s' managed='%s'", kind, map[bool]string{true: "yes", false: "no"}[h.Managed])
	if h.Source.MDev != "" {
		model := h.Model
		if model == "" {
			model = "vfio-pci"
		}
		fmt.Fprintf(&b, " model='%s'", escape(model))
	}
	b.WriteString(">")
	if h.Driver != "" {
		fmt.Fprintf(&b, "<driver name='%s'/>", escape(h.Driver))
	}
	if h.Source.MDev != "" {
		fmt.Fprintf(&b, "<source><address uuid='%s'/></source>", escape(h.Source.MDev))
	} else {
		fmt.Fprintf(&b, "<source><address%s/></source>", address(h.Source.PCI))
	}
	if h.Alias != "" {
		fmt.Fprintf(&b, "<alias name='%s'/>", escape(h.Alias))
	}
	if h.Guest != nil {
		fmt.Fprintf(&b, "<address type='pci'%s/>", address(*h.Guest))
	}
	b.WriteString("</hostdev>")
	return []byte(b.String())
}

func address(a pci.Address) string {
	return fmt.Sprintf(" domain='0x%04x' bus='0x%02x' slot='0x%02x' function='0x%x'", a.Domain, a.Bus, a.Device, a.Function)
}

// Channel is a byte stream between host and guest: a PV console on Xen, a virtio-serial
// port on qemu.
type Channel struct {
	// Name is the name by which the guest finds it.
	Name string
	// Path is the Unix socket on the host. Each domain needs its own: otherwise a second
	// domain would silently take over the socket of the first one.
	Path string
}

// Document is the XML of a domain.
type Document struct {
	raw  []byte
	root *node
}

// Parse parses the XML of a domain. Errors wrap ErrSyntax.
func Parse(text []byte) (*Document, error) {
	root, err := parseTree(text)
	if err != nil {
		return nil, err
	}
	var x libvirtxml.Domain
	if err := x.Unmarshal(string(text)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSyntax, err)
	}
	return &Document{raw: slices.Clone(text), root: root}, nil
}

// Bytes returns the XML in its present form.
func (d *Document) Bytes() []byte { return slices.Clone(d.raw) }

// Name returns the domain's name.
func (d *Document) Name() string { return d.root.child("name").content() }

// UUID returns the domain's UUID as it is written.
func (d *Document) UUID() string { return d.root.child("uuid").content() }

// Xen reports whether the domain is of the libxl driver.
func (d *Document) Xen() bool { return d.root.attr("type") == "xen" }

// edit is a range of bytes to be replaced.
type edit struct {
	span
	with string
}

// apply makes edits, which must not overlap, and parses the result. The document changes
// only if that succeeds.
func (d *Document) apply(edits ...edit) error {
	slices.SortFunc(edits, func(a, b edit) int { return a.from - b.from })
	var out []byte
	at := 0
	for _, e := range edits {
		out = append(append(out, d.raw[at:e.from]...), e.with...)
		at = e.to
	}
	changed, err := Parse(append(out, d.raw[at:]...))
	if err != nil {
		return fmt.Errorf("domain %s: the edit makes it invalid: %w", d.Name(), err)
	}
	*d = *changed
	return nil
}

// lead returns the newline and the indentation before an element, if it begins a line.
func (d *Document) lead(n *node) string {
	i := n.start
	for i > 0 && (d.raw[i-1] == ' ' || d.raw[i-1] == '\t') {
		i--
	}
	if i == 0 || d.raw[i-1] != '\n' {
		return ""
	}
	i--
	if i > 0 && d.raw[i-1] == '\r' {
		i--
	}
	return string(d.raw[i:n.start])
}

// insert returns the edit that appends an element to a parent. It is on a line of its own
// if its siblings are, and after the last element of the same name, if there is one,
// otherwise after the last one.
func (d *Document) insert(parent *node, element string) edit {
	if parent.empty() {
		return edit{span{parent.open - len("/>"), parent.end}, ">" + element + "</" + parent.name + ">"}
	}
	if len(parent.children) == 0 {
		return edit{span{parent.open, parent.open}, element}
	}
	after := parent.children[len(parent.children)-1]
	for _, c := range parent.children {
		if strings.HasPrefix(element, "<"+c.name+" ") {
			after = c
		}
	}
	return edit{span{after.end, after.end}, d.lead(after) + element}
}

// remove returns the edit that removes an element with the newline before it.
func (d *Document) remove(n *node) edit {
	return edit{span{n.start - len(d.lead(n)), n.end}, ""}
}

// set returns the edit that sets an attribute.
func (d *Document) set(n *node, name, to string) edit {
	tag := d.raw[n.start:n.open]
	if v, ok := value(tag, name); ok {
		return edit{span{n.start + v.from, n.start + v.to}, escape(to)}
	}
	end := n.open - len(">")
	if n.empty() {
		end = n.open - len("/>")
	}
	return edit{span{end, end}, " " + name + "='" + escape(to) + "'"}
}

// hostdev is a host device with its element.
type hostdev struct {
	HostDevice
	node *node
	err  error
}

// hostdevs returns the host devices that are PCI functions or mediated devices.
func (d *Document) hostdevs() []hostdev {
	var out []hostdev
	for _, n := range d.root.child("devices").all("hostdev") {
		kind := n.attr("type")
		if mode := n.attr("mode"); mode != "" && mode != "subsystem" || kind != "pci" && kind != "mdev" {
			continue
		}
		h := hostdev{node: n}
		h.Managed = n.attr("managed") == "yes"
		h.Driver = n.child("driver").attr("name")
		h.Model = n.attr("model")
		h.Alias = n.child("alias").attr("name")
		source := n.child("source", "address")
		switch {
		case source == nil:
			h.err = errors.New("it has no source address")
		case kind == "pci":
			h.Source.PCI, h.err = parseAddress(source)
		default:
			h.Source.MDev, h.err = parseUUID(source.attr("uuid"))
		}
		if g := n.child("address"); g != nil && g.attr("type") == "pci" {
			if a, err := parseAddress(g); err == nil {
				h.Guest = &a
			}
		}
		out = append(out, h)
	}
	return out
}

// HostDevices returns the domain's host devices. A device whose address cannot be parsed
// is left out; Check reports it.
func (d *Document) HostDevices() []HostDevice {
	var out []HostDevice
	for _, h := range d.hostdevs() {
		if h.err == nil {
			out = append(out, h.HostDevice)
		}
	}
	return out
}

// Interfaces returns the PCI functions that the domain has as network interfaces.
func (d *Document) Interfaces() []pci.Address {
	var out []pci.Address
	for _, n := range d.root.child("devices").all("interface") {
		if source := n.child("source", "address"); n.attr("type") == "hostdev" && source != nil {
			if a, err := parseAddress(source); err == nil {
				out = append(out, a)
			}
		}
	}
	return out
}

// Occupied reports whether a device of the domain is in the slot of an address in the guest.
func (d *Document) Occupied(at pci.Address) bool {
	devices := d.root.child("devices")
	if devices == nil {
		return false
	}
	for _, n := range devices.children {
		g := n.child("address")
		if g == nil || g.attr("type") != "pci" {
			continue
		}
		if a, err := parseAddress(g); err == nil && a.Slot() == at.Slot() {
			return true
		}
	}
	return false
}

// find returns the host device with a source. The error wraps ErrNotFound if there is
// none.
func (d *Document) find(s Source) (hostdev, error) {
	for _, h := range d.hostdevs() {
		if h.err == nil && h.Source == s {
			return h, nil
		}
	}
	return hostdev{}, fmt.Errorf("domain %s, device %s: %w", d.Name(), s, ErrNotFound)
}

// parseAddress parses a PCI address, with numbers in the forms that libvirt accepts:
// 0x65, 101 or 0145.
func parseAddress(n *node) (pci.Address, error) {
	var parts [4]uint64
	for i, p := range []struct {
		name     string
		most     uint64
		optional bool
	}{{"domain", 1<<32 - 1, true}, {"bus", 0xff, false}, {"slot", 0x1f, false}, {"function", 7, true}} {
		text := n.attr(p.name)
		if text == "" && p.optional {
			continue
		}
		v, err := strconv.ParseUint(text, 0, 32)
		if err != nil || v > p.most || strings.Contains(text, "_") {
			return pci.Address{}, fmt.Errorf("%s=%.20q is no part of a PCI address", p.name, text)
		}
		parts[i] = v
	}
	return pci.Address{Domain: uint32(parts[0]), Bus: uint8(parts[1]), Device: uint8(parts[2]), Function: uint8(parts[3])}, nil
}

// parseUUID returns a UUID in the canonical form.
func parseUUID(s string) (string, error) {
	digits := strings.ToLower(strings.ReplaceAll(s, "-", ""))
	if len(digits) != 32 || strings.Trim(digits, "0123456789abcdef") != "" {
		return "", fmt.Errorf("%.60q is no UUID", s)
	}
	return digits[:8] + "-" + digits[8:12] + "-" + digits[12:16] + "-" + digits[16:20] + "-" + digits[20:], nil
}

// normal checks a source and returns it in the canonical form.
func (s Source) normal() (Source, error) {
	if s.MDev != "" {
		u, err := parseUUID(s.MDev)
		if err != nil {
			return s, fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		if s.PCI != (pci.Address{}) {
			return s, fmt.Errorf("%w: it is both %s and %s", ErrInvalid, s.PCI, u)
		}
		return Source{MDev: u}, nil
	}
	if s.PCI.Device > 0x1f || s.PCI.Function > 7 {
		return s, fmt.Errorf("%w: there is no PCI function %s", ErrInvalid, s.PCI)
	}
	return s, nil
}

// Add appends a host device. Errors wrap ErrExists or ErrInvalid.
func (d *Document) Add(h HostDevice) error {
	var err error
	if h.Source, err = h.Source.normal(); err != nil {
		return err
	}
	if _, err := d.find(h.Source); err == nil {
		return fmt.Errorf("domain %s, device %s: %w", d.Name(), h.Source, ErrExists)
	}
	return d.apply(d.addDevice(string(h.XML())))
}

// addDevice returns the edit that appends to <devices>, and makes that element if it does
// not exist.
func (d *Document) addDevice(element string) edit {
	if devices := d.root.child("devices"); devices != nil {
		return d.insert(devices, element)
	}
	return d.insert(d.root, "<devices>"+element+"</devices>")
}

// Remove removes a host device. The error wraps ErrNotFound if there is none.
func (d *Document) Remove(s Source) error {
	h, err := d.find(s)
	if err != nil {
		return err
	}
	return d.apply(d.remove(h.node))
}

// DeviceXML returns a host device's element as it is in the document, for detaching it.
// The error wraps ErrNotFound if there is none.
func (d *Document) DeviceXML(s Source) ([]byte, error) {
	h, err := d.find(s)
	if err != nil {
		return nil, err
	}
	return slices.Clone(d.raw[h.node.start:h.node.end]), nil
}

// Replace replaces a device by another one of the same kind. Everything that the guest
// sees stays: address, ROM, boot order, alias.
func (d *Document) Replace(old, by Source) error {
	h, err := d.find(old)
	if err != nil {
		return err
	}
	if by, err = by.normal(); err != nil {
		return err
	}
	if (old.MDev == "") != (by.MDev == "") {
		return fmt.Errorf("domain %s: %w: a PCI function and a mediated device can't take each other's place, remove %s and add %s", d.Name(), ErrInvalid, old, by)
	}
	if old == by {
		return nil
	}
	if _, err := d.find(by); err == nil {
		return fmt.Errorf("domain %s, device %s: %w", d.Name(), by, ErrExists)
	}
	source := h.node.child("source", "address")
	if by.MDev != "" {
		return d.apply(d.set(source, "uuid", by.MDev))
	}
	edits := []edit{}
	for _, p := range []struct {
		name, to string
		same     bool
	}{
		{"domain", fmt.Sprintf("0x%04x", by.PCI.Domain), by.PCI.Domain == old.PCI.Domain},
		{"bus", fmt.Sprintf("0x%02x", by.PCI.Bus), by.PCI.Bus == old.PCI.Bus},
		{"slot", fmt.Sprintf("0x%02x", by.PCI.Device), by.PCI.Device == old.PCI.Device},
		{"function", fmt.Sprintf("0x%x", by.PCI.Function), by.PCI.Function == old.PCI.Function},
	} {
		if !p.same {
			edits = append(edits, d.set(source, p.name, p.to))
		}
	}
	return d.apply(edits...)
}

// SetManaged sets whether libvirt binds a device itself.
func (d *Document) SetManaged(s Source, managed bool) error {
	h, err := d.find(s)
	if err != nil || h.Managed == managed {
		return err
	}
	return d.apply(d.set(h.node, "managed", map[bool]string{true: "yes", false: "no"}[managed]))
}

// Passthrough reports whether the domain has <features><xen><passthrough state='on'/>.
func (d *Document) Passthrough() bool {
	return d.root.child("features", "xen", "passthrough").attr("state") == "on"
}

// EnablePassthrough sets the flag without which Xen gives no device to a running domain.
// It takes effect at the next start.
func (d *Document) EnablePassthrough() error {
	const flag = "<passthrough state='on'/>"
	if d.Passthrough() {
		return nil
	}
	features := d.root.child("features")
	xen := features.child("xen")
	switch p := xen.child("passthrough"); {
	case p != nil:
		return d.apply(d.set(p, "state", "on"))
	case xen != nil:
		return d.apply(d.insert(xen, flag))
	case features != nil:
		return d.apply(d.insert(features, "<xen>"+flag+"</xen>"))
	default:
		return d.apply(d.insert(d.root, "<features><xen>"+flag+"</xen></features>"))
	}
}

// channelType returns the target type of the domain's guest channels.
func (d *Document) channelType() string {
	if d.Xen() {
		return "xen"
	}
	return "virtio"
}

// Channels returns the guest channels on Unix sockets that libvirt makes.
func (d *Document) Channels() []Channel {
	var out []Channel
	for _, n := range d.channels() {
		out = append(out, Channel{Name: n.child("target").attr("name"), Path: n.child("source").attr("path")})
	}
	return out
}

func (d *Document) channels() []*node {
	var out []*node
	for _, n := range d.root.child("devices").all("channel") {
		if n.attr("type") == "unix" && n.child("target").attr("type") == d.channelType() {
			out = append(out, n)
		}
	}
	return out
}

// VsockCID returns the context id by which vsock reaches the running domain; 0: it has no vsock.
func (d *Document) VsockCID() uint32 {
	cid, err := strconv.ParseUint(d.root.child("devices").child("vsock").child("cid").attr("address"), 10, 32)
	if err != nil || cid < 3 { // those are the hypervisor's and the host's
		return 0
	}
	return uint32(cid)
}

// AddChannel adds a guest channel.
func (d *Document) AddChannel(c Channel) error {
	if c.Name == "" || strings.Trim(c.Name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") != "" {
		return fmt.Errorf("%w: a channel named %.60q", ErrInvalid, c.Name)
	}
	// longest sun_path with its terminating zero (unix(7)).
	if !strings.HasPrefix(c.Path, "/") || len(c.Path) > 107 || bytes.IndexByte([]byte(c.Path), 0) >= 0 {
		return fmt.Errorf("%w: channel %s at %.120q: a socket's path begins with / and has at most 107 bytes", ErrInvalid, c.Name, c.Path)
	}
	for _, other := range d.Channels() {
		if other.Name == c.Name {
			return fmt.Errorf("domain %s, channel %s: %w", d.Name(), c.Name, ErrExists)
		}
	}
	return d.apply(d.addDevice(fmt.Sprintf("<channel type='unix'><source mode='bind' path='%s'/><target type='%s' name='%s'/></channel>",
		escape(c.Path), d.channelType(), escape(c.Name))))
}

// RemoveChannel removes a guest channel. The error wraps ErrNotFound if there is none.
func (d *Document) RemoveChannel(name string) error {
	for _, n := range d.channels() {
		if n.child("target").attr("name") == name {
			return d.apply(d.remove(n))
		}
	}
	return fmt.Errorf("domain %s, channel %s: %w", d.Name(), name, ErrNotFound)
}
