package dropin

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
)

const (
	maxDepth   = 128
	maxDevices = 1024
	maxWhy     = 200      // largest size of a reason, in bytes
	maxIDs     = 64 << 10 // largest size of the file with ids, in bytes

	pciDevices = "sys/bus/pci/devices"

	baseDisplay     = "0x03"
	baseAccelerator = "0x12"
)

// hostDevices returns the PCI addresses, and the UUIDs of mediated devices, of the host
// devices in a domain's XML, and the domain's UUID.
func hostDevices(domain []byte) (found []string, uuid string, err error) {
	var at []string // names of the open elements
	kind := ""      // type of the open device
	d := xml.NewDecoder(bytes.NewReader(domain))
	// libvirt writes only UTF-8.
	d.CharsetReader = func(string, io.Reader) (io.Reader, error) { return nil, errors.New("not in UTF-8") }
	for {
		token, err := d.RawToken()
		if errors.Is(err, io.EOF) {
			if len(at) > 0 || len(found) == 0 && len(bytes.TrimSpace(domain)) == 0 {
				return found, uuid, errors.New("domain XML: cut off or empty")
			}
			return found, uuid, nil
		}
		if err != nil {
			return found, uuid, fmt.Errorf("domain XML: %w", err)
		}
		switch t := token.(type) {
		case xml.StartElement:
			at = append(at, t.Name.Local)
			if len(at) > maxDepth || len(found) > maxDevices {
				return found, uuid, errors.New("domain XML: too deep, or too many devices")
			}
			if len(at) == 3 && (t.Name.Local == "hostdev" || t.Name.Local == "interface") && at[0] == "domain" && at[1] == "devices" {
				kind = attr(t, "type")
			}
			if len(at) != 5 || at[0] != "domain" || at[1] != "devices" || at[3] != "source" || at[4] != "address" {
				continue
			}
			hostdev, network := at[2] == "hostdev", at[2] == "interface"
			switch {
			case hostdev && kind == "mdev":
				if uuid := strings.ToLower(attr(t, "uuid")); uuid != "" {
					found = append(found, uuid)
				}
			case hostdev && kind == "pci", network && kind == "hostdev" && attr(t, "type") == "pci":
				a, err := address(t)
				if err != nil {
					return found, uuid, err
				}
				found = append(found, a)
			}
		case xml.CharData:
			if len(at) == 2 && at[0] == "domain" && at[1] == "uuid" {
				uuid = strings.ToLower(strings.TrimSpace(string(t)))
			}
		case xml.EndElement:
			if len(at) == 0 || at[len(at)-1] != t.Name.Local {
				return found, uuid, errors.New("domain XML: elements are not nested")
			}
			at = at[:len(at)-1]
		}
	}
}

func attr(e xml.StartElement, name string) string {
	for _, a := range e.Attr {
		if a.Name.Local == name && a.Name.Space == "" {
			return a.Value
		}
	}
	return ""
}

// address returns a PCI address as sysfs writes it. libvirt omits numbers that are zero.
func address(e xml.StartElement) (string, error) {
	var n [4]uint64
	for i, part := range []struct {
		name string
		most uint64
	}{{"domain", 0xffffffff}, {"bus", 0xff}, {"slot", 0x1f}, {"function", 7}} {
		value := attr(e, part.name)
		if value == "" {
			continue
		}
		var err error
		if n[i], err = strconv.ParseUint(value, 0, 32); err != nil || n[i] > part.most {
			return "", fmt.Errorf("domain XML: PCI %s %.20q makes no sense", part.name, value)
		}
	}
	return fmt.Sprintf("%04x:%02x:%02x.%x", n[0], n[1], n[2], n[3]), nil
}

// known distinguishes GPUs from other devices.
type known struct {
	root fs.FS
	ids  []string // ids of GPUs of any class, such as "1b36:0010"
	vms  []string // UUIDs of VMs with parts of mediated GPUs
	come []string // of those that a migration is to bring here
}

// newKnown reads what hostd has written beside its socket, if anything.
func newKnown(root fs.FS, socket string) known {
	words := func(name string) []string {
		f, err := os.Open(path.Join(path.Dir(socket), name))
		if err != nil {
			return nil
		}
		defer f.Close()
		data, err := io.ReadAll(io.LimitReader(f, maxIDs))
		if err != nil {
			return nil
		}
		return strings.Fields(string(data))
	}
	return known{root: root, ids: words(wire.IDsName), vms: words(wire.PartsName), come: words(wire.ArrivalsName)}
}

// mediatedGPU stands for the address of a mediated GPU, in a message about GPUs.
const mediatedGPU = "that is mediated (a part of it)"

// managed returns those of a domain's devices that gpuctl may manage. XML that cannot be
// parsed counts as one if it mentions host devices.
func (k known) managed(domain []byte) []string {
	all, uuid, err := hostDevices(domain)
	var ours []string
	if uuid != "" && slices.Contains(k.vms, uuid) {
		ours = append(ours, mediatedGPU)
	}
	for _, d := range all {
		if k.isGPU(d) {
			ours = append(ours, d)
		}
	}
	if err != nil && len(ours) == 0 && bytes.Contains(domain, []byte("hostdev")) {
		// A parser repeats names of the XML.
		return []string{"of an XML that can't be read (" + excerpt.Of(err.Error(), maxWhy) + ")"}
	}
	return ours
}

// arrives reports whether a migration is to bring the domain, which gets parts of mediated GPUs
// before it runs here.
func (k known) arrives(domain []byte) bool {
	_, uuid, _ := hostDevices(domain)
	return uuid != "" && slices.Contains(k.come, uuid)
}

// isGPU reports whether gpuctl manages a device, or another function in its slot, or its
// physical function. A device that does not exist is not one: then the start fails
// without the hook.
func (k known) isGPU(device string) bool {
	slot, _, ok := strings.Cut(device, ".")
	if !ok { // a mediated device is below its parent
		if !fs.ValidPath("x/"+device) || strings.Contains(device, "/") {
			return false
		}
		target, err := fs.ReadLink(k.root, path.Join("sys/bus/mdev/devices", device))
		if err != nil {
			return false
		}
		for part := range strings.SplitSeq(target, "/") {
			if len(part) >= len("0000:00:00.0") && strings.Contains(part, ":") && k.is(part) {
				return true
			}
		}
		return false
	}
	for function := range 8 {
		if k.is(slot + "." + strconv.Itoa(function)) {
			return true
		}
	}
	physical, err := fs.ReadLink(k.root, path.Join(pciDevices, device, "physfn"))
	return err == nil && k.is(path.Base(physical))
}

func (k known) is(device string) bool {
	class := k.attribute(device, "class")
	if strings.HasPrefix(class, baseDisplay) || strings.HasPrefix(class, baseAccelerator) {
		return true
	}
	if len(k.ids) == 0 || class == "" {
		return false
	}
	vendor, product := k.attribute(device, "vendor"), k.attribute(device, "device")
	return slices.Contains(k.ids, strings.TrimPrefix(vendor, "0x")+":"+strings.TrimPrefix(product, "0x"))
}

// attribute returns an id of a device as sysfs writes it; empty: it does not exist.
func (k known) attribute(device, name string) string {
	f, err := k.root.Open(path.Join(pciDevices, device, name))
	if err != nil {
		return ""
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 16))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
