package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// A message to xenstored has a header of four 32-bit words: type, request id,
// transaction id and length of what follows (xen/include/public/io/xs_wire.h).
const (
	xsDirectory = 1
	xsRead      = 2
	xsError     = 16
	xsMax       = 4096 // bytes that may follow the header
)

// xenstore asks xenstored through the kernel's device.
type xenstore struct {
	rw io.ReadWriter
	id uint32
}

// get sends a request of type kind about path.
func (x *xenstore) get(kind uint32, path string) (string, error) {
	x.id++
	b := binary.LittleEndian.AppendUint32(nil, kind)
	b = binary.LittleEndian.AppendUint32(b, x.id)
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(path)+1))
	if _, err := x.rw.Write(append(append(b, path...), 0)); err != nil {
		return "", err
	}
	var h [16]byte
	if _, err := io.ReadFull(x.rw, h[:]); err != nil {
		return "", err
	}
	n := binary.LittleEndian.Uint32(h[12:])
	if n > xsMax {
		return "", fmt.Errorf("xenstore: an answer of %d bytes", n)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(x.rw, body); err != nil {
		return "", err
	}
	if binary.LittleEndian.Uint32(h[:]) == xsError {
		return "", fmt.Errorf("xenstore %s: %s", path, strings.TrimRight(string(body), "\x00"))
	}
	return string(body), nil
}

// findPV returns the name of the terminal of the PV channel with that name:
// channel N is hvcN, and what it is called is only in xenstore.
func findPV(name string) (string, error) {
	f, err := os.OpenFile("/dev/xen/xenbus", os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return (&xenstore{rw: f}).channel(name)
}

func (x *xenstore) channel(name string) (string, error) {
	list, err := x.get(xsDirectory, "device/console")
	if err != nil {
		return "", err
	}
	for _, n := range strings.Split(strings.TrimRight(list, "\x00"), "\x00") {
		if got, err := x.get(xsRead, "device/console/"+n+"/name"); err == nil && got == name {
			return "hvc" + n, nil
		}
	}
	return "", errors.New("no PV channel " + name)
}
