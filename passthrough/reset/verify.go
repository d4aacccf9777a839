package reset

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// ErrVerify means that the reset was made, and the card is not as it should be.
var ErrVerify = errors.New("the card is not in order after it")

const (
	devices    = "sys/bus/pci/devices"
	header     = 64 // bytes defined by the standard
	maxConfig  = 4096
	firstPause = 10 * time.Millisecond
	mostPause  = 500 * time.Millisecond

	regCommand = 0x04
	regStatus  = 0x06
	regBIST    = 0x0f
	regHeader  = 0x0e
	regBARs    = 0x10
	regSubsys  = 0x2c
	regROM     = 0x30
	numBARs    = 6

	allOnes = 0xffffffff
	retry   = 0xffff0001 // root ports return this while a device answers with retries

	// Errors that the device itself reports: parity, system error, target abort
	// signalled, data parity. Errors of its peers do not count.
	statusErrors = 1<<15 | 1<<14 | 1<<11 | 1<<8
	fatalError   = 1 << 2 // of the PCI Express device status register
	capExpress   = 0x10
)

// snapshot is a configuration space at one time; empty: it could not be read.
type snapshot struct {
	data []byte
	vf   bool // it has no ids of its own (SR-IOV 1.1, 3.4.1.1)
}

func (s snapshot) u8(at int) uint8 {
	if at >= len(s.data) {
		return 0xff
	}
	return s.data[at]
}

func (s snapshot) u16(at int) uint16 {
	if at+2 > len(s.data) {
		return 0xffff
	}
	return binary.LittleEndian.Uint16(s.data[at:])
}

func (s snapshot) u32(at int) uint32 {
	if at+4 > len(s.data) {
		return allOnes
	}
	return binary.LittleEndian.Uint32(s.data[at:])
}

// alive reports whether the device answers.
func (s snapshot) alive() bool {
	if s.vf {
		return s.u32(8) != allOnes // class and revision
	}
	return s.u32(0) != allOnes && s.u32(0) != retry && s.u32(0) != 0
}

// fatal reports whether the device has reported a fatal error.
func (s snapshot) fatal() bool {
	if s.u16(regStatus)&0x10 == 0 {
		return false
	}
	at := int(s.u8(0x34)) &^ 3
	for range 48 {
		if at < 0x40 || at+12 > len(s.data) {
			return false
		}
		if s.u8(at) == capExpress {
			return s.u16(at+0x0a)&fatalError != 0
		}
		at = int(s.u8(at+1)) &^ 3
	}
	return false
}

func (r *Resetter) at(a pci.Address, name string) string {
	return path.Join(devices, a.String(), name)
}

func (r *Resetter) file(f *pci.Device, name string) string { return r.at(f.Address, name) }

func (r *Resetter) read(f *pci.Device) snapshot {
	s := snapshot{vf: f.PF != nil}
	file, err := r.root.Open(r.file(f, "config"))
	if err != nil {
		return s
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxConfig))
	if err == nil && len(data) >= header {
		s.data = data
	}
	return s
}

func (r *Resetter) text(a pci.Address, name string) string {
	data, err := r.root.ReadFile(r.at(a, name))
	if err != nil || len(data) > maxConfig {
		return ""
	}
	return strings.TrimSpace(string(data))
}

func (r *Resetter) number(f *pci.Device, name string) int {
	n, err := strconv.Atoi(r.text(f.Address, name))
	if err != nil {
		return 0
	}
	return n
}

// driver returns the driver of a device; empty: none.
func (r *Resetter) driver(a pci.Address) string {
	target, err := r.root.ReadLink(r.at(a, "driver"))
	if err != nil {
		return ""
	}
	return path.Base(target)
}

func (r *Resetter) exists(name string) bool {
	_, err := r.root.Lstat(name)
	return err == nil
}

// verify waits until each function answers, and compares it with its state before.
// restored reports that registers had to be restored.
func (j *job) verify(ctx context.Context) (restored bool, err error) {
	for _, f := range j.card.Functions {
		again, err := j.check(ctx, f)
		restored = restored || again
		if err != nil {
			return restored, fmt.Errorf("%w: %s: %w", ErrVerify, f.Address, err)
		}
	}
	return restored, nil
}

func (j *job) check(ctx context.Context, f *pci.Device) (restored bool, err error) {
	after, err := j.wait(ctx, f)
	if err != nil {
		return false, err
	}
	before := j.before[f.Address]
	if err := same(f, before, after); err != nil {
		return false, err
	}
	// After a rescan, a function may have other addresses.
	if why := changed(f, before, after); why != "" && !j.fresh {
		// The kernel restores registers. If it has failed, do it again.
		write, cancel := context.WithTimeout(ctx, undoTime)
		defer cancel()
		if err := j.root.Write(write, j.file(f, "config"), string(headerOf(f, before, after))); err != nil {
			return false, fmt.Errorf("%s, and cannot be written back: %w", why, err)
		}
		restored = true
		if after = j.read(f); !after.alive() {
			return true, errors.New("stopped answering when its registers were written back")
		}
		if why := changed(f, before, after); why != "" {
			return true, fmt.Errorf("%s, also after it was written back", why)
		}
	}
	if e := after.u16(regStatus) & statusErrors &^ errorsOf(before); e != 0 {
		return restored, fmt.Errorf("reports errors: status %#04x", e)
	}
	if after.fatal() && (!before.alive() || !before.fatal()) {
		return restored, errors.New("reports a fatal error")
	}
	return restored, nil
}

func errorsOf(s snapshot) uint16 {
	if !s.alive() {
		return 0
	}
	return s.u16(regStatus)
}

// wait polls until the function answers.
func (j *job) wait(ctx context.Context, f *pci.Device) (snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, j.ready)
	defer cancel()
	for pause := firstPause; ; pause = min(2*pause, mostPause) {
		s := j.read(f)
		if s.alive() {
			return s, nil
		}
		select {
		case <-ctx.Done():
			switch {
			case s.data == nil:
				return s, errors.New("its configuration space cannot be read")
			case s.u32(0) == retry:
				return s, fmt.Errorf("still asks for patience after %s", j.ready)
			}
			return s, errors.New("does not answer: it reads all ones")
		case <-time.After(pause):
		}
	}
}

// same returns an error unless it is the same device as before.
func same(f *pci.Device, before, after snapshot) error {
	if !before.alive() {
		if !after.vf && after.u32(0) != uint32(f.DeviceID)<<16|uint32(f.VendorID) {
			return fmt.Errorf("is another device: %04x:%04x", after.u16(0), after.u16(2))
		}
		return nil
	}
	if before.u32(0) != after.u32(0) {
		return fmt.Errorf("is another device: %04x:%04x, it was %04x:%04x", after.u16(0), after.u16(2), before.u16(0), before.u16(2))
	}
	if before.u32(8) != after.u32(8) || before.u8(regHeader) != after.u8(regHeader) || before.u32(regSubsys) != after.u32(regSubsys) {
		return errors.New("is another device: class, revision or subsystem are not what they were")
	}
	return nil
}

// changed returns which register has changed; empty: none.
func changed(f *pci.Device, before, after snapshot) string {
	if after.vf {
		return "" // its BARs are in its physical function
	}
	for i := range numBARs {
		was, known := bar(f, before, i)
		if now := after.u32(regBARs+4*i) &^ flagsOf(after, i); known && now != was {
			return fmt.Sprintf("lost BAR %d (%#x, it was %#x)", i, now, was)
		}
	}
	if before.alive() && before.u16(regCommand) != after.u16(regCommand) {
		return fmt.Sprintf("lost its command register (%#04x, it was %#04x)", after.u16(regCommand), before.u16(regCommand))
	}
	return ""
}

// bar returns the former value of a BAR without its flags: from the snapshot or, if the
// device did not answer, from the scan.
func bar(f *pci.Device, before snapshot, i int) (uint32, bool) {
	if before.alive() {
		return before.u32(regBARs+4*i) &^ flagsOf(before, i), true
	}
	for _, b := range f.BARs {
		switch {
		case b.Index == i:
			return uint32(b.Start), true
		case b.Is64 && b.Index+1 == i:
			return uint32(b.Start >> 32), true
		}
	}
	return 0, false
}

// flagsOf returns the bits of a BAR that are not address bits. The upper half of a 64-bit
// BAR has none.
func flagsOf(s snapshot, i int) uint32 {
	upper := false
	for k := 0; k < i; k++ {
		upper = !upper && s.u32(regBARs+4*k)&0x7 == 0x4
	}
	switch {
	case upper:
		return 0
	case s.u32(regBARs+4*i)&1 != 0:
		return 0x3
	}
	return 0xf
}

// headerOf returns the header to be restored: with the former BARs, and without bits that
// have an effect when they are written.
func headerOf(f *pci.Device, before, after snapshot) []byte {
	from := after.data
	if before.alive() {
		from = before.data
	}
	b := append([]byte(nil), from[:header]...)
	for i := range numBARs {
		if was, known := bar(f, before, i); known && !before.alive() {
			binary.LittleEndian.PutUint32(b[regBARs+4*i:], was)
		}
	}
	binary.LittleEndian.PutUint16(b[regStatus:], 0)
	b[regBIST] = 0
	if before.alive() {
		binary.LittleEndian.PutUint32(b[regROM:], before.u32(regROM))
	}
	return b
}
