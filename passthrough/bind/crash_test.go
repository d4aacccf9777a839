package bind_test

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
)

// One write fails, whichever: nothing has changed, or it is all done.
func TestAnyWriteFails(t *testing.T) {
	for n := 1; ; n++ {
		r := newRig(t)
		before := places(r.machine)
		r.machine.FailWrite(n, syscall.EIO)
		err := r.Take(t.Context(), gpuCard, bind.XenPciback)
		if err == nil {
			if n < 14 {
				t.Fatalf("only %d writes", n)
			}
			return
		}
		if !errors.Is(err, syscall.EIO) {
			t.Errorf("write %d: %v", n, err)
		}
		r.same(before)
		r.sound()
		if left := r.journal.Records(); len(left) > 0 {
			t.Errorf("write %d: left %+v", n, left)
		}
		r.journal.Close()
	}
}

// One write hangs, whichever: the rest of the card goes back, and when the
// kernel lets go, so does that function.
func TestAnyWriteHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for n := 1; ; n++ {
			r := newRig(t)
			before := places(r.machine)
			release := r.machine.HangWrite(n)
			err := r.Take(t.Context(), amdCard, bind.XenPciback)
			writes := r.machine.Writes()
			switch {
			case len(writes) < n:
				return
			case writes[n-1] == "journal": // does not hang
				r.must(err)
				release()
				continue
			case !errors.Is(err, sysfs.ErrStuck):
				t.Errorf("write %d: %v", n, err)
			}
			if left := r.journal.Records(); len(left) != 1 || left[0].Phase != bind.Taking {
				t.Errorf("write %d: left %+v", n, left)
			}
			if err := r.Take(t.Context(), amdCard, bind.XenPciback); !errors.Is(err, bind.ErrUnfinished) {
				t.Errorf("write %d: taken again: %v", n, err)
			}
			// What still hangs is not declared done.
			if _, err := r.Recover(t.Context()); !errors.Is(err, sysfs.ErrStuck) {
				t.Errorf("write %d: recovered: %v", n, err)
			}
			release()
			_, err = r.Recover(t.Context())
			r.must(err)
			r.same(before)
			r.sound()
			if left := r.journal.Records(); len(left) > 0 {
				t.Errorf("write %d: left %+v", n, left)
			}
		}
	})
}

// The process dies at every write in turn, before it or after, and also while
// it recovers: it ends with everything where it was, or held, and no device
// lost.
func TestCrashAtAnyWrite(t *testing.T) {
	all := append(slices.Clone(gpuCard), amdCard...)
	for name, c := range map[string]struct {
		before func(r *rig)
		do     func(ctx context.Context, r *rig) error
		after  bool // what it does is undone, not finished
	}{
		"take":   {do: func(ctx context.Context, r *rig) error { return r.Take(ctx, all, bind.XenPciback) }, after: true},
		"vfio":   {do: func(ctx context.Context, r *rig) error { return r.Take(ctx, gpuCard, bind.VFIOPCI) }, after: true},
		"return": {before: func(r *rig) { r.must(r.Take(t.Context(), all, bind.XenPciback)) }, do: func(ctx context.Context, r *rig) error { return r.Return(ctx, all) }},
		"again":  {before: func(r *rig) { r.must(r.Take(t.Context(), all, bind.XenPciback)) }, do: func(ctx context.Context, r *rig) error { return r.Take(ctx, all, bind.VFIOPCI) }, after: true},
	} {
		t.Run(name, func(t *testing.T) {
			runs := 0
			for n := 1; ; n++ {
				done := true
				for _, second := range []int{0, 1 + n%11} { // a crash while recovering too
					for _, after := range []bool{false, true} {
						runs++
						r := newRig(t)
						native := places(r.machine)
						if c.before != nil {
							c.before(r)
						}
						start := places(r.machine)
						if after {
							r.machine.CrashAfter(n)
						} else {
							r.machine.CrashBefore(n)
						}
						err := c.do(t.Context(), r)
						crashed := r.machine.Crashed()
						done = done && !crashed
						if !crashed && err != nil {
							t.Fatal(err)
						}
						end := places(r.machine2())
						r.restart()
						if second > 0 {
							r.machine.CrashBefore(second)
							_, _ = r.Recover(t.Context())
							r.restart()
						}
						got, err := r.Recover(t.Context())
						if err != nil {
							t.Fatalf("crash at %d: %v", n, err)
						}
						now := places(r.machine)
						if crashed && !cmp.Equal(now, start) && !cmp.Equal(now, end) && !cmp.Equal(now, native) {
							t.Fatalf("crash at %d: %+v\nleft %s", n, got, cmp.Diff(start, now))
						}
						r.must(r.Return(t.Context(), all))
						r.same(native)
						r.sound()
						if left := r.journal.Records(); len(left) > 0 {
							t.Errorf("left %+v", left)
						}
						r.journal.Close()
					}
				}
				if done {
					t.Logf("%d writes, %d runs", n-1, runs)
					return
				}
			}
		})
	}
}

// machine2 is the machine as it is, whatever became of the process.
func (r *rig) machine2() *sysfstest.Machine {
	r.machine.Restart()
	return r.machine
}

// outcomes recovers, and counts what became of functions.
func (r *rig) outcomes() map[bind.Outcome]int {
	r.t.Helper()
	got, err := r.Recover(r.t.Context())
	r.must(err)
	out := map[bind.Outcome]int{}
	for _, g := range got {
		out[g.Outcome]++
	}
	return out
}

func TestRecoverAfterAReboot(t *testing.T) {
	t.Run("after a reboot the kernel's choice stays", func(t *testing.T) {
		r := newRig(t)
		before := places(r.machine)
		r.must(r.Take(t.Context(), gpuCard, bind.XenPciback))
		r.machine.Reboot()
		r.restart()
		if got := r.outcomes(); got[bind.Rebooted] != 4 || len(r.journal.Records()) != 0 {
			t.Errorf("%v", got)
		}
		r.same(before)
	})
	t.Run("a driver that comes late after a reboot is not forgotten", func(t *testing.T) {
		r := newRig(t)
		r.must(r.Take(t.Context(), list(pf), bind.XenPciback))
		r.machine.Unload("nvidia")
		r.machine.Reboot()
		r.restart()
		_, err := r.Recover(t.Context())
		if want := "recover 0000:05:00.0 (held pciback): return 0000:05:00.0 to nvidia: nvidia: driver is not loaded: modprobe nvidia"; err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
		r.machine.Load(sysfstest.Driver{Name: "nvidia", IDs: []sysfstest.ID{{Vendor: 0x10de, Device: 0x2236}}})
		if got := r.outcomes(); got[bind.Finished] != 1 {
			t.Errorf("%v", got)
		}
		r.at("nvidia", list(pf))
	})
	t.Run("virtual functions do not outlive a reboot", func(t *testing.T) {
		r := newRig(t)
		r.must(r.machine.Write(t.Context(), "sys/bus/pci/devices/"+pf+"/sriov_numvfs", "1"))
		r.must(r.Take(t.Context(), list("0000:05:00.4"), bind.VFIOPCI))
		r.machine.Reboot()
		r.restart()
		if got := r.outcomes(); got[bind.Missing] != 1 || len(r.journal.Records()) != 0 {
			t.Errorf("%v, left %+v", got, r.journal.Records())
		}
	})
}

func TestRecoverWhatOthersDid(t *testing.T) {
	t.Run("another card in the slot", func(t *testing.T) {
		r := newRig(t)
		r.must(r.Take(t.Context(), list(pf), bind.XenPciback))
		r.machine.Unplug(at(pf))
		if got := r.outcomes(); got[bind.Missing] != 1 {
			t.Errorf("%v", got)
		}
		if err := r.Return(t.Context(), list(pf)); !errors.Is(err, bind.ErrNotFound) {
			t.Errorf("returned: %v", err)
		}
		r.machine.Add(pcitest.Function{Address: pf, Vendor: 0x1002, Device: 1, Class: pci.Class3D << 8, IOMMUGroup: -1, NUMANode: -1, Driver: "amdgpu"})
		if got := r.outcomes(); got[bind.Replaced] != 1 || len(r.journal.Records()) != 0 {
			t.Errorf("%v", got)
		}
		r.at("amdgpu", list(pf))
	})
	t.Run("pulled and put back", func(t *testing.T) {
		r := newRig(t)
		before := places(r.machine)
		r.must(r.Take(t.Context(), list(pf), bind.VFIOPCI))
		r.machine.Unplug(at(pf))
		r.machine.Plug(at(pf))
		if got := r.outcomes(); got[bind.Undone] != 1 {
			t.Errorf("%v", got)
		}
		r.same(before)
	})
	t.Run("an override that somebody removed", func(t *testing.T) {
		r := newRig(t)
		r.must(r.Take(t.Context(), list(pf), bind.VFIOPCI))
		r.must(r.machine.Write(t.Context(), "sys/bus/pci/devices/"+pf+"/driver_override", "\n"))
		if got := r.outcomes(); got[bind.Kept] != 1 || r.machine.Override(at(pf)) != "vfio-pci" {
			t.Errorf("%v", got)
		}
	})
	t.Run("a card that lost one function keeps one owner", func(t *testing.T) {
		r := newRig(t)
		r.must(r.Take(t.Context(), gpuCard, bind.XenPciback))
		r.must(r.machine.Write(t.Context(), "sys/bus/pci/drivers/pciback/unbind", gpu))
		_, err := r.Recover(t.Context())
		if want := "recover 0000:65:00.0 (held pciback): a card is given away whole: it has lost its driver, and 0000:65:00.1, of the same card, has not: take the card again, or return it"; err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
		r.must(r.Take(t.Context(), gpuCard, bind.XenPciback))
		r.at("pciback", gpuCard)
	})
	t.Run("a driver that refuses its device back", func(t *testing.T) {
		r := newRig(t)
		before := places(r.machine)
		r.must(r.Take(t.Context(), gpuCard, bind.XenPciback))
		r.machine.RefuseProbe("nvidia", at(gpu), syscall.ENXIO)
		if err := r.Return(t.Context(), gpuCard); !errors.Is(err, syscall.ENXIO) || !errors.Is(err, bind.ErrRefused) {
			t.Errorf("got %v", err)
		}
		if left := r.journal.Records(); len(left) != 1 || left[0].Native != "nvidia" || left[0].Phase != bind.Returning {
			t.Errorf("left %+v", left)
		}
		r.machine.RefuseProbe("nvidia", at(gpu), nil)
		if got := r.outcomes(); got[bind.Finished] != 1 {
			t.Errorf("%v", got)
		}
		r.same(before)
	})
}
