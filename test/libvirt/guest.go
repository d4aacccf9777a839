package libvirt

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// counter is a boot sector that counts timer ticks, 18 a second, and writes
// each number as four hexadecimal digits and a newline to the serial port:
//
//	       xor bx,bx
//	tick:  sti
//	       hlt
//	       inc bx
//	       mov cx,4
//	digit: rol bx,4
//	       mov al,bl
//	       and al,15
//	       cmp al,10
//	       jb  below
//	       add al,'a'-10-'0'
//	below: add al,'0'
//	       mov dx,0x3f8
//	       out dx,al
//	       loop digit
//	       mov al,10
//	       out dx,al
//	       jmp tick
func counter() []byte {
	return []byte{
		0x31, 0xdb, 0xfb, 0xf4, 0x43, 0xb9, 0x04, 0x00, 0xc1, 0xc3, 0x04, 0x88, 0xd8, 0x24, 0x0f, 0x3c, 0x0a, 0x72, 0x02, 0x04, 0x27,
		0x04, 0x30, 0xba, 0xf8, 0x03, 0xee, 0xe2, 0xeb, 0xb0, 0x0a, 0xee, 0xeb, 0xe0,
	}
}

// diskSize is more than SeaBIOS takes for a disk that has no cylinders.
const diskSize = 4 << 20

// Disk makes a disk image; one that boots counts.
func (r *Rig) Disk(name string, boots bool) (path string, err error) {
	path = filepath.Join(r.Dir, name+".img")
	sector := make([]byte, 512)
	if boots {
		copy(sector, counter())
		sector[510], sector[511] = 0x55, 0xaa
	}
	if err := os.WriteFile(path, sector, 0o600); err != nil {
		return "", err
	}
	return path, os.Truncate(path, diskSize)
}

// Guest is the XML of a domain that counts, with free PCIe ports and the given
// devices. Its disk is in the rig, where all hosts see it.
func (r *Rig) Guest(name, uuid, devices string) ([]byte, error) {
	disk, err := r.Disk(name, true)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, `<domain type='qemu'>
  <name>%[1]s</name>
  <uuid>%[2]s</uuid>
  <memory unit='MiB'>64</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='pc-q35-6.0'>hvm</type><boot dev='hd'/></os>
  <features><acpi/></features>
  <devices>
    <emulator>%[5]s</emulator>
    <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='%[3]s'/><target dev='sda' bus='sata'/></disk>
    <controller type='pci' model='pcie-root'/>
    <controller type='pci' model='pcie-root-port'/>
    <controller type='pci' model='pcie-root-port'/>
    <controller type='pci' model='pcie-root-port'/>
    <serial type='file'><source path='/var/log/libvirt/%[1]s.serial'/></serial>
    <memballoon model='none'/>
%[4]s  </devices>
</domain>
`, name, uuid, disk, devices, r.emulator), nil
}

// Count is the last number that a guest wrote on this host, zero for none, and
// an error when it did not count on by one each time.
func (h *Host) Count(guest string) (int, error) {
	b, err := os.ReadFile(filepath.Join(h.dir, "log", guest+".serial"))
	if err != nil {
		return 0, err
	}
	b = b[:bytes.LastIndexByte(b, '\n')+1]
	last := 0
	for line := range strings.Lines(string(b)) {
		n, err := strconv.ParseUint(strings.TrimSpace(line), 16, 16)
		if err != nil && last == 0 {
			continue // the digits that the other host did not see
		}
		if err != nil {
			return 0, fmt.Errorf("guest %s on %s wrote %q after %d", guest, h.Name, line, last)
		}
		if last != 0 && int(n) != last+1 && len(strings.TrimSpace(line)) == 4 {
			return 0, fmt.Errorf("guest %s on %s counted from %d to %d", guest, h.Name, last, n)
		}
		last = int(n)
	}
	return last, nil
}
