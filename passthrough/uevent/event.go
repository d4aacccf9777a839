package uevent

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Action is what has happened to a device.
type Action string

// Actions with the kernel's names, and Lost.
const (
	Add     Action = "add"
	Remove  Action = "remove"
	Bind    Action = "bind"
	Unbind  Action = "unbind"
	Change  Action = "change"
	Move    Action = "move"
	Online  Action = "online"
	Offline Action = "offline"
	// Lost means that events were dropped. It belongs to no device.
	Lost Action = "lost"
)

// ErrMessage means that a message is not a valid uevent.
var ErrMessage = errors.New("not a uevent")

// maxMessage is larger than the largest event: 2 KiB of variables and the path.
const maxMessage = 16 << 10

// Event is an event of one device.
type Event struct {
	Action    Action
	Sequence  uint64 // SEQNUM, which increases
	Subsystem string
	Path      string // DEVPATH, relative to sys

	// Set for a device of the subsystem pci:
	Address                                      pci.Address
	Driver                                       string // empty: none, or not reported
	VendorID, DeviceID, SubVendorID, SubDeviceID uint16
	Class                                        uint32 // base class, sub-class and programming interface
}

// Parse parses a message of the kernel: "action@path" and variables, each terminated by a
// zero byte. Errors wrap ErrMessage.
func Parse(message []byte) (Event, error) {
	if len(message) == 0 || len(message) > maxMessage || message[len(message)-1] != 0 {
		return Event{}, fmt.Errorf("%w: %d bytes", ErrMessage, len(message))
	}
	fields := strings.Split(string(bytes.TrimSuffix(message, []byte{0})), "\x00")
	action, path, ok := strings.Cut(fields[0], "@")
	if !ok || action == "" || !strings.HasPrefix(path, "/") {
		return Event{}, fmt.Errorf("%w: it begins with %.40q", ErrMessage, fields[0])
	}
	e := Event{Action: Action(action), Path: path}
	var slot string
	for _, field := range fields[1:] {
		name, value, ok := strings.Cut(field, "=")
		if !ok {
			return Event{}, fmt.Errorf("%w: %.40q is no variable", ErrMessage, field)
		}
		switch name {
		case "ACTION":
			ok = value == action
		case "DEVPATH":
			ok = value == path
		case "SUBSYSTEM":
			e.Subsystem = value
		case "SEQNUM":
			n, err := strconv.ParseUint(value, 10, 64)
			e.Sequence, ok = n, err == nil
		case "DRIVER":
			e.Driver = value
		case "PCI_SLOT_NAME":
			slot = value
		case "PCI_ID":
			ok = ids(value, &e.VendorID, &e.DeviceID)
		case "PCI_SUBSYS_ID":
			ok = ids(value, &e.SubVendorID, &e.SubDeviceID)
		case "PCI_CLASS":
			n, err := strconv.ParseUint(value, 16, 24)
			e.Class, ok = uint32(n), err == nil
		}
		if !ok {
			return Event{}, fmt.Errorf("%w: %.60q", ErrMessage, field)
		}
	}
	if e.Subsystem == "" {
		return Event{}, fmt.Errorf("%w: no subsystem", ErrMessage)
	}
	if e.Subsystem == "pci" && slot != "" {
		a, err := pci.ParseAddress(slot)
		if err != nil {
			return Event{}, fmt.Errorf("%w: %w", ErrMessage, err)
		}
		e.Address = a
	}
	return e, nil
}

// ids parses "10DE:1EB1".
func ids(s string, first, second *uint16) bool {
	a, b, ok := strings.Cut(s, ":")
	m, err1 := strconv.ParseUint(a, 16, 16)
	n, err2 := strconv.ParseUint(b, 16, 16)
	*first, *second = uint16(m), uint16(n)
	return ok && err1 == nil && err2 == nil
}

// device reports whether an event is about a PCI device. The subsystem also has drivers
// and buses.
func (e Event) device() bool {
	return e.Subsystem == "pci" && strings.HasSuffix(e.Path, "/"+e.Address.String())
}
