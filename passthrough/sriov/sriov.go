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

// ErrReadBack says that the kernel took what was written and shows something
// else.
var ErrReadBack = errors.New("the kernel shows another state")

const (
	numFile  = "sriov_numvfs"
	maxVFs   = 1<<16 - 1 // as PCI has them
	undoTime = 10 * time.Second
)

// Device is a device's folder, with symbolic links or without.
type Device struct {
	Root sysfs.Root
	Dir  string // as sys/bus/pci/devices/0000:65:00.0
	// Write sets the number where the kernel's file is not enough; ok is false
	// where it is. It may be nil.
	Write func(ctx context.Context, n int) (ok bool, err error)
}

// Most is how many virtual functions the device can have; 0: none, or its
// driver does not say.
func (d Device) Most() int { n, _ := d.number("sriov_totalvfs"); return n }

// Now is how many there are. ok reports whether the device can have any.
func (d Device) Now() (n int, ok bool) { return d.number(numFile) }

func (d Device) number(file string) (int, bool) {
	data, err := d.Root.ReadFile(path.Join(d.Dir, file))
	if err != nil {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(data)))
	return n, err == nil && n >= 0 && n <= maxVFs
}

// Functions are the virtual functions by their numbers.
func (d Device) Functions() map[int]pci.Address {
	n, ok := d.Now()
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

// Resize sets the number and reads it back. The kernel changes it only from
// none and to none, so all that are there go away. If the new ones cannot be
// made there are as many as before, or the error says that this failed, too.
// It is not to be called twice at a time.
func (d Device) Resize(ctx context.Context, n int) error {
	before, ok := d.Now()
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
	if now, _ := d.Now(); now != before {
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
	if now, ok := d.Now(); !ok || now != n {
		return fail(fmt.Errorf("%w: %d", ErrReadBack, now))
	}
	return nil
}
