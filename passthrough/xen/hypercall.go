package xen

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// ErrVersion means that the running Xen has an unknown control interface.
var ErrVersion = errors.New("unknown control interface of Xen")

// The control interface of Xen 4.17 (xen/include/public/{domctl,sysctl}.h). Both versions
// are 0x15.
const (
	domctlVersion = 0x15
	sysctlVersion = 0x15

	hypercallSysctl = 35
	hypercallDomctl = 36

	sysctlReadConsole = 1
	sysctlPhysInfo    = 3
	sysctlDomainList  = 6
	sysctlPCITopology = 22
	domctlDeviceGroup = 50

	capDirectIO = 1 << 2

	sysctlBody = 8 // offset of the union
	domctlBody = 16

	domainInfoSize   = 112
	domainDying      = 1 << 0
	domainHVM        = 1 << 1
	domainPaused     = 1 << 3
	emulatesPM       = 1 << 2 // HVM domains have more emulated devices than a local APIC, PVH domains do not
	cpuTimeOffset    = 56
	handleOffset     = 76
	emulationOffset  = 104
	maxDomainsAtOnce = 128

	invalidDevice = 0xfffffffe
	invalidNode   = 0xffffffff

	ioctlHypercall = 0x305000 // _IOC(NONE, 'P', 0, 48)

	memorySize = 16 * 4096 // the kernel provides at most 64 pages
	dataOffset = 4096      // first the arguments, then arrays
	maxGroup   = 1024
	maxLog     = 8 << 20
)

// Privcmd calls the hypervisor by hypercall. Its calls are short: the hypervisor answers
// at once and never waits.
type Privcmd struct {
	mu     sync.Mutex
	memory []byte // memory that the hypervisor can access
	base   uint64 // address of memory
	call   func(op, arg uint64) error
	close  func() error
}

var _ Hypervisor = (*Privcmd)(nil)

// OpenPrivcmd opens the kernel's devices privcmd and hypercall in dir, such as /dev/xen,
// for the release v. If the release is unknown, the error wraps ErrVersion. It needs root
// in a control domain, and Linux 4.18.
func OpenPrivcmd(dir string, v Version) (*Privcmd, error) {
	if v.Major != 4 || v.Minor != 17 {
		return nil, fmt.Errorf("%w: this is Xen %s and only that of 4.17 is known: device groups are not read, and everything else is asked of the program xl", ErrVersion, v)
	}
	fd, err := open(filepath.Join(dir, "privcmd"))
	if err != nil {
		return nil, err
	}
	buffer, err := open(filepath.Join(dir, "hypercall"))
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	memory, err := unix.Mmap(buffer, 0, memorySize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		_ = unix.Close(fd)
		_ = unix.Close(buffer)
		return nil, fmt.Errorf("memory for hypercalls: %w", err)
	}
	return &Privcmd{
		memory: memory, base: uint64(uintptr(unsafe.Pointer(&memory[0]))),
		call: func(op, arg uint64) error {
			c := struct {
				op  uint64
				arg [5]uint64
			}{op, [5]uint64{arg}}
			_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctlHypercall, uintptr(unsafe.Pointer(&c)))
			if errno != 0 {
				return errno
			}
			return nil
		},
		close: func() error {
			return errors.Join(unix.Munmap(memory), unix.Close(buffer), unix.Close(fd))
		},
	}, nil
}

func open(name string) (int, error) {
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return fd, nil
}

// Close closes the devices. No other call may be in progress.
func (p *Privcmd) Close() error { return p.close() }

// control makes a control hypercall. head writes the header, fill writes the body, and
// take reads the result.
func (p *Privcmd) control(ctx context.Context, what string, op uint64, head func([]byte), fill, take func(body, data []byte)) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("ask Xen for %s: %w", what, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	at := sysctlBody
	if op == hypercallDomctl {
		at = domctlBody
	}
	clear(p.memory[:dataOffset])
	head(p.memory)
	fill(p.memory[at:at+128], p.memory[dataOffset:])
	if err := p.call(op, p.base); err != nil {
		if errors.Is(err, syscall.EACCES) {
			err = fmt.Errorf("%w: this Xen refuses that of 4.17 (domctl %#x, sysctl %#x)", ErrVersion, domctlVersion, sysctlVersion)
		}
		return fmt.Errorf("ask Xen for %s: %w", what, err)
	}
	if take != nil {
		take(p.memory[at:at+128], p.memory[dataOffset:])
	}
	return nil
}

func (p *Privcmd) sysctl(ctx context.Context, what string, cmd uint32, fill, take func(body, data []byte)) error {
	return p.control(ctx, what, hypercallSysctl, func(b []byte) {
		le.PutUint32(b[0:], cmd)
		le.PutUint32(b[4:], sysctlVersion)
	}, fill, take)
}

func (p *Privcmd) domctl(ctx context.Context, what string, cmd uint32, domain uint16, fill, take func(body, data []byte)) error {
	return p.control(ctx, what, hypercallDomctl, func(b []byte) {
		le.PutUint32(b[0:], cmd)
		le.PutUint32(b[4:], domctlVersion)
		le.PutUint16(b[8:], domain)
	}, fill, take)
}

var le = binary.LittleEndian //nolint:gochecknoglobals // a name

// data returns the address of the arrays.
func (p *Privcmd) data() uint64 { return p.base + dataOffset }

// Running returns the domains.
func (p *Privcmd) Running(ctx context.Context) ([]Running, error) {
	var out []Running
	for first := uint32(0); first < 0x7ff0; {
		n := 0
		err := p.sysctl(ctx, "its domains", sysctlDomainList, func(b, _ []byte) {
			le.PutUint16(b[0:], uint16(first))
			le.PutUint32(b[4:], maxDomainsAtOnce)
			le.PutUint64(b[8:], p.data())
		}, func(b, data []byte) {
			n = int(min(le.Uint32(b[16:]), maxDomainsAtOnce))
			for i := range n {
				r := parseDomain(data[i*domainInfoSize:])
				out = append(out, r)
				first = max(first, uint32(r.ID)+1)
			}
		})
		if err != nil {
			return nil, err
		}
		if n < maxDomainsAtOnce {
			return out, nil
		}
	}
	return out, nil
}

func parseDomain(b []byte) Running {
	flags := le.Uint32(b[4:])
	r := Running{ID: le.Uint16(b[0:]), Dying: flags&domainDying != 0, Paused: flags&domainPaused != 0, Ran: le.Uint64(b[cpuTimeOffset:]) != 0, Type: TypePV}
	if flags&domainHVM != 0 {
		r.Type = TypePVH
		if le.Uint32(b[emulationOffset:])&emulatesPM != 0 {
			r.Type = TypeHVM
		}
	}
	if h := b[handleOffset : handleOffset+16]; !bytes.Equal(h, make([]byte, 16)) {
		s := hex.EncodeToString(h)
		r.UUID = s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:]
	}
	return r
}

// IOMMU returns whether Xen uses an IOMMU.
func (p *Privcmd) IOMMU(ctx context.Context) (State, error) {
	state := Off
	err := p.sysctl(ctx, "its capabilities", sysctlPhysInfo, func([]byte, []byte) {}, func(b, _ []byte) {
		if le.Uint32(b[28:])&capDirectIO != 0 {
			state = On
		}
	})
	if err != nil {
		return Unknown, err
	}
	return state, nil
}

// Group returns the devices with which a device shares its requester id, for example
// behind a bridge to conventional PCI. Xen looks only at the devices of one domain at a
// time, so the hypercall is made for each domain. It does not return devices in
// quarantine.
func (p *Privcmd) Group(ctx context.Context, a pci.Address) ([]pci.Address, error) {
	if a.Domain > 0xffff {
		return nil, fmt.Errorf("%w: PCI domain %x is not Xen's", ErrUnsupported, a.Domain)
	}
	domains, err := p.Running(ctx)
	if err != nil {
		return nil, err
	}
	var out []pci.Address
	for _, d := range domains {
		err := p.domctl(ctx, "the device group of "+a.String(), domctlDeviceGroup, d.ID, func(b, _ []byte) {
			le.PutUint32(b[0:], machineBDF(a))
			le.PutUint32(b[4:], maxGroup)
			le.PutUint64(b[16:], p.data())
		}, func(b, data []byte) {
			for i := range min(le.Uint32(b[8:]), maxGroup) {
				// Here, bus and function are shifted by one byte.
				bdf := le.Uint32(data[4*i:]) >> 8
				out = append(out, pci.Address{Domain: a.Domain, Bus: uint8(bdf >> 8), Device: uint8(bdf >> 3 & 0x1f), Function: uint8(bdf & 7)})
			}
		})
		if errors.Is(err, syscall.ESRCH) { // the domain has ended meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
	}
	slices.SortFunc(out, pci.Address.Compare)
	return slices.Compact(out), nil
}

func machineBDF(a pci.Address) uint32 {
	return a.Domain<<16 | uint32(a.Bus)<<8 | uint32(a.Device)<<3 | uint32(a.Function)
}

// Nodes returns the NUMA nodes of devices. Devices without a node, and unknown ones, are
// left out.
func (p *Privcmd) Nodes(ctx context.Context, devices []pci.Address) (map[pci.Address]int, error) {
	const most = 1024
	out := map[pci.Address]int{}
	rest := slices.DeleteFunc(slices.Clone(devices), func(a pci.Address) bool { return a.Domain > 0xffff })
	for len(rest) > 0 {
		batch := rest[:min(len(rest), most)]
		done := 0
		err := p.sysctl(ctx, "the nodes of devices", sysctlPCITopology, func(b, data []byte) {
			for i, a := range batch {
				le.PutUint16(data[4*i:], uint16(a.Domain))
				data[4*i+2], data[4*i+3] = a.Bus, a.Device<<3|a.Function
			}
			le.PutUint32(b[0:], uint32(len(batch)))
			le.PutUint64(b[8:], p.data())
			le.PutUint64(b[16:], p.data()+4*most)
		}, func(b, data []byte) {
			done = int(min(le.Uint32(b[0:]), uint32(len(batch))))
			for i, a := range batch[:done] {
				if node := le.Uint32(data[4*most+4*i:]); node != invalidNode && node != invalidDevice && node < 1<<16 {
					out[a] = int(node)
				}
			}
		})
		if err != nil {
			return nil, err
		}
		if done == 0 {
			return nil, fmt.Errorf("ask Xen for the nodes of devices: it answered for none of %d", len(batch))
		}
		rest = rest[done:]
	}
	return out, nil
}

// Log returns the hypervisor's log without clearing it.
func (p *Privcmd) Log(ctx context.Context) (string, error) {
	const most = 32 << 10
	var out []byte
	index := uint32(0)
	for len(out) < maxLog {
		n := 0
		err := p.sysctl(ctx, "its log", sysctlReadConsole, func(b, _ []byte) {
			b[1] = 1 // incremental: from index on
			le.PutUint32(b[4:], index)
			le.PutUint64(b[8:], p.data())
			le.PutUint32(b[16:], most)
		}, func(b, data []byte) {
			n = int(min(le.Uint32(b[16:]), most))
			index = le.Uint32(b[4:])
			out = append(out, data[:n]...)
		})
		if err != nil {
			return "", err
		}
		if n == 0 {
			break
		}
	}
	return string(out), nil
}
