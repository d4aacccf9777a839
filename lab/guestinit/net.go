package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	netDevice = "eth0"
	netWait   = 20 * time.Second // its front end connects after the module was loaded
)

// address returns the address and network that the kernel's command line, a file, gives the
// guest with lab.ip=ADDRESS/BITS; ok is false if it gives none.
func address(cmdline string) (p netip.Prefix, ok bool, err error) {
	b, err := os.ReadFile(cmdline)
	if err != nil {
		return p, false, err
	}
	for _, word := range strings.Fields(string(b)) {
		if text, found := strings.CutPrefix(word, "lab.ip="); found {
			p, err = netip.ParsePrefix(text)
			if err == nil && !p.Addr().Is4() {
				err = fmt.Errorf("%s is no IPv4 address", text)
			}
			return p, err == nil, err
		}
	}
	return p, false, nil
}

// connect gives an interface its address, and brings it and the loopback up (netdevice(7)).
func connect(device string, p netip.Prefix) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(fd)
	set := func(name string, request uint, change func(*unix.Ifreq) error) error {
		ifr, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		if err := change(ifr); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(fd, request, ifr); err != nil {
			return fmt.Errorf("%s: ioctl %#x: %w", name, request, err)
		}
		return nil
	}
	up := func(ifr *unix.Ifreq) error { ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING); return nil }
	inet := func(b [4]byte) func(*unix.Ifreq) error {
		return func(ifr *unix.Ifreq) error { return ifr.SetInet4Addr(b[:]) }
	}
	if err := set("lo", unix.SIOCSIFFLAGS, up); err != nil {
		return err
	}
	for end := time.Now().Add(netWait); ; time.Sleep(100 * time.Millisecond) {
		err := set(device, unix.SIOCSIFADDR, inet(p.Addr().As4()))
		if err == nil {
			break
		}
		if !errors.Is(err, unix.ENODEV) || time.Now().After(end) {
			return err
		}
	}
	if err := set(device, unix.SIOCSIFNETMASK, inet(mask(p.Bits()))); err != nil {
		return err
	}
	return set(device, unix.SIOCSIFFLAGS, up)
}

// mask returns the netmask with so many ones.
func mask(bits int) (out [4]byte) {
	for i := range bits {
		out[i/8] |= 0x80 >> (i % 8)
	}
	return out
}
