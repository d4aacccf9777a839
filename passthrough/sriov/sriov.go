package sriov

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// ErrReadBack means that the kernel has accepted a write, but shows another value.
var ErrReadBack = errors.New("the kernel shows another state")

const (
	numFile  = "sriov_numvfs"
	maxVFs   = 1<<16 - 1 // the limit of PCI
	undoTime = 10 * time.Second
)

// Device is a device's folder. Its path may contain symbolic links.
type Device struct {
	Root sysfs.Root
	Dir  string // such as sys/bus/pci/devices/0000:65:00.0
	// Write sets the number if the kernel's file cannot be used; ok is false if it can.
	// It may be nil.
	Write func(ctx context.Context, n int) (ok bool, err error)
}

// Most returns the highest number of virtual functions; 0: none, or the driver does not
// report it.
func (d Device) Most() int { n, _ := d.number("sriov_totalvfs"); return n }

// now returns the present number. ok reports whether the device can have virtual
// functions.
func (d Device) now() (n int, ok bool) { return d.number(numFile) }

func (d Device) number(file string) (int, bool) {
	data, err := d.Root.ReadFile(path.Join(d.Dir, file))
	if err != nil {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(data)))
	return n, err == nil && n >= 0 && n <= maxVFs
}

// Functions returns the virtual functions by their index.
func (d Device) Functions() map[int]pci.Address {
	n, ok := d.now()
	if !ok {
		return nil
	}
	out := map[int]pci.Address{}
	for i := range n {
		target, err := d.Root.ReadLink(path.Join(d.Dir, "virtfn"+strconv.Itoa(i)))
		if err != nil {
			continue
		}
		if a, err := pci.ParseAddress(path.Base(target)); err == nil {
			out[i] = a
		}
	}
	return out
}

// Resize sets the number of virtual functions and reads it back. The kernel changes the
// number only from 0 and to 0, so all existing functions are removed. If the new ones
// cannot be made, the former number is restored, or the error contains that this failed,
// too. It must not be called twice at the same time.
func (d Device) Resize(ctx context.Context, n int) error {
	before, ok := d.now()
	if !ok {
		return fmt.Errorf("%s has no %s", d.Dir, numFile)
	}
	if n == before {
		return nil
	}
	if before > 0 {
		if err := d.set(ctx, 0); err != nil {
			return err
		}
	}
	if n == 0 {
		return nil
	}
	err := d.set(ctx, n)
	if err == nil {
		return nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if now, _ := d.now(); now != before {
		if now > 0 {
			err = errors.Join(err, d.set(undo, 0))
		}
		if before > 0 {
			err = errors.Join(err, d.set(undo, before))
		}
	}
	return err
}

func (d Device) set(ctx context.Context, n int) error {
	fail := func(err error) error { return fmt.Errorf("%d virtual functions of %s: %w", n, path.Base(d.Dir), err) }
	done := false
	if d.Write != nil {
		var err error
		if done, err = d.Write(ctx, n); err != nil {
			return fail(err)
		}
	}
	if !done {
		if err := d.Root.Write(ctx, path.Join(d.Dir, numFile), strconv.Itoa(n)); err != nil {
			return fail(err)
		}
	}
	if now, ok := d.now(); !ok || now != n {
		return fail(fmt.Errorf("%w: %d", ErrReadBack, now))
	}
	return nil
}
