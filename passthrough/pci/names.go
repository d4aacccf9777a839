package pci

import (
	"bufio"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/gpuctl/gpuctl/internal/excerpt"
)

const (
	maxNamesFile = 16 << 20
	maxName      = 256
)

// id is the id of a vendor, of a device, or of a subsystem. Parts that do not apply are
// zero.
type id struct {
	vendor, device, subVendor, subDevice uint16
}

// readNames finds the names of ids in the host's pci.ids, if it exists. It reads the file
// as a stream and keeps only the requested names: the whole database would take much of
// the daemon's memory.
func readNames(root fs.FS, want map[id]bool) map[id]string {
	for _, name := range []string{"usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids", "var/lib/pciutils/pci.ids", "usr/share/pci.ids"} {
		f, err := root.Open(name)
		if err != nil {
			continue
		}
		defer f.Close()
		return parseNames(f, want)
	}
	return nil
}

func parseNames(r io.Reader, want map[id]bool) map[id]string {
	found := map[id]string{}
	lines := bufio.NewScanner(io.LimitReader(r, maxNamesFile))
	vendors := map[uint16]bool{}
	for i := range want {
		vendors[i.vendor] = true
	}
	var at id
	for lines.Scan() {
		// Most lines are about other vendors, and the file is read at each scan.
		if b := lines.Bytes(); len(b) == 0 || b[0] == '\t' && !vendors[at.vendor] {
			continue
		}
		line := lines.Text()
		depth := len(line) - len(strings.TrimLeft(line, "\t"))
		line = line[depth:]
		if line == "" || line[0] == '#' {
			continue
		}
		number, name, _ := strings.Cut(line, " ")
		first, ok := hex(number, 4, 4)
		switch depth {
		case 0:
			if !ok { // "C 03": the list of classes follows that of vendors
				return found
			}
			at = id{vendor: uint16(first)}
		case 1:
			at = id{vendor: at.vendor, device: uint16(first)}
		case 2:
			var sub uint32
			number, name, _ = strings.Cut(strings.TrimLeft(name, " "), " ")
			var ok2 bool
			sub, ok2 = hex(number, 4, 4)
			ok = ok && ok2
			at.subVendor, at.subDevice = uint16(first), uint16(sub)
		default:
			ok = false
		}
		if ok && want[at] {
			found[at] = clean(name)
		}
	}
	return found
}

// clean returns a text from outside as one printable line of limited length.
func clean(s string) string { return excerpt.Line(s, maxName) }

// name sets the names. Without a name, it uses the ids in hexadecimal digits.
func (d *Device) name(names map[id]string) {
	d.VendorName = orHex(names[id{vendor: d.VendorID}], d.VendorID)
	d.DeviceName = orHex(names[id{vendor: d.VendorID, device: d.DeviceID}], d.DeviceID)
	d.SubsystemName = names[id{d.VendorID, d.DeviceID, d.SubVendorID, d.SubDeviceID}]
}

func orHex(name string, n uint16) string {
	if name != "" {
		return name
	}
	return fmt.Sprintf("%04x", n)
}
