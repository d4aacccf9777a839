package nvc0

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"testing"
	"time"
)

const (
	me    Owner = 5
	other Owner = 6
	mib         = 1 << 20

	// Where things are. Small pages map the first MiB at smallVA, large ones the second at largeVA.
	inst, directory, small, large, list, userd = 0x1000, 0x10000, 0x20000, 0x60000, 0x3000, 0x4000
	ring, push                                 = 0x5000, 0x6000
	smallVA                                    = 3 * TableSpan
	largeVA                                    = 4 * TableSpan
)

// bare is a GPU without a mediator. The last MiB of four is another owner's.
type bare struct {
	*GPU
	t          testing.TB
	violations []Violation
	put        [2]uint32
}

func newBare(t testing.TB) *bare {
	t.Helper()
	b := &bare{t: t}
	var err error
	if b.GPU, err = New(Config{VRAM: 4 * mib, Violated: func(v Violation) { b.violations = append(b.violations, v) }}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		at HostPA
		o  Owner
	}{{0, me}, {mib, me}, {2 * mib, me}, {3 * mib, other}} {
		if err := b.Tag(c.at, mib, Nobody, c.o, Data); err != nil {
			t.Fatal(err)
		}
	}
	b.store64(directory+8*3, uint64(MakePDE(0, small, 0)))
	b.store64(directory+8*4, uint64(MakePDE(large, 0, 3)))
	for i := range uint64(256) {
		b.store64(small+8*HostPA(i), uint64(MakePTE(i*PageSize, TargetVRAM, i == 200)))
	}
	for i := range uint64(8) {
		b.store64(large+8*HostPA(i), uint64(MakePTE(mib+i*LargePage, TargetVRAM, false)))
	}
	for ch := range HostPA(2) { // two channels with the same tables
		at := inst + ch*0x8000
		b.store64(at+InstUserd, userd+uint64(ch)*0x8000)
		b.store64(at+InstRing, smallVA+ring+uint64(ch)*0x8000|9<<48)
		b.store64(at+InstDirectory, directory|1)
		b.store64(at+InstLimit, 1<<40-1)
		b.store64(list+8*ch, uint64(ch)|4<<32)
		b.SetOwner(int(ch), me)
		b.WriteRegister(RegChannel+8*uint32(ch), ChannelValid|uint32(at>>12))
	}
	b.WriteRegister(RegPlaylistAddress, list>>12)
	b.WriteRegister(RegPlaylistLength, 2)
	return b
}

func (b *bare) store64(at HostPA, w uint64) {
	var p [8]byte
	binary.LittleEndian.PutUint64(p[:], w)
	b.Store(me, at, p[:])
}

func (b *bare) load32(at HostPA) uint32 {
	var p [4]byte
	b.Load(me, at, p[:])
	return binary.LittleEndian.Uint32(p[:])
}

// submit gives a channel methods, in two entries of its ring.
func (b *bare) submit(ch int, words ...uint32) {
	at := HostPA(push + ch*0x8000)
	for i, w := range words {
		var p [4]byte
		binary.LittleEndian.PutUint32(p[:], w)
		b.Store(me, at+HostPA(4*i), p[:])
	}
	half := len(words) / 2
	for i, part := range [][2]int{{0, half}, {half, len(words) - half}} {
		entry := HostPA(ring+ch*0x8000) + 8*HostPA((b.put[ch]+uint32(i))%512)
		b.store64(entry, IBEntry(smallVA+uint64(at)+4*uint64(part[0]), uint32(part[1])))
	}
	b.put[ch] = (b.put[ch] + 2) % 512
	b.Doorbell(ch, b.put[ch])
}

// run lets time pass until nothing is to be done.
func (b *bare) run() time.Duration {
	b.t.Helper()
	from := b.Now()
	for range 1 << 16 {
		if !b.Busy() {
			return b.Now() - from
		}
		at, _ := b.NextEvent()
		b.Advance(max(at, b.Now()+time.Microsecond), math.MaxInt)
	}
	b.t.Fatal("it never ends")
	return 0
}

func (b *bare) well() {
	b.t.Helper()
	if e := b.Take(); len(e) > 0 || len(b.violations) > 0 {
		b.t.Fatalf("%+v, %v", e, b.violations)
	}
}

func TestCopiesAndHeadersOfEachKind(t *testing.T) {
	b := newBare(t)
	const to = largeVA + 0x20010 // in the second large page
	b.submit(0,
		Incr(0, MethodObject, 1), ClassM2MF,
		0,                                                       // no operation
		5<<29|4<<16|M2MFOutHigh>>2, to>>32, to&0xffffffff, 0, 0, // once: the rest go to OutLow
		NonIncr(0, M2MFOutLow, 2), 1, to&0xffffffff,
		Inline(0, M2MFLength, 12), Inline(0, M2MFCount, 1),
		Incr(0, M2MFExec, 1), M2MFPush|0x110,
		NonIncr(0, M2MFData, 3), 7, 8, 9,
		Incr(0, M2MFOutHigh, 2), smallVA>>32, smallVA+0x80000,
		Incr(0, M2MFInHigh, 6), to>>32, to&0xffffffff, 4, 16, 4, 3, // three lines of 4 bytes, 16 apart there
		Incr(0, M2MFExec, 1), 0x110,
		Incr(0, M2MFQueryHigh, 3), smallVA>>32, smallVA+0x90000, 77,
		Incr(0, MethodRef, 1), 3, Incr(0, MethodNotify, 1), 0,
	)
	b.run()
	if e := b.Take(); len(e) != 1 || e[0].Kind != Notified || len(b.violations) > 0 {
		t.Fatalf("%+v %v", e, b.violations)
	}
	if w := []uint32{b.load32(mib + 0x20010), b.load32(mib + 0x20014), b.load32(mib + 0x20018)}; !slices.Equal(w, []uint32{7, 8, 9}) {
		t.Errorf("pushed %v", w)
	}
	if w := []uint32{b.load32(0x80000), b.load32(0x80010), b.load32(0x80020), b.load32(0x90000)}; !slices.Equal(w, []uint32{7, 8, 9, 77}) {
		t.Errorf("copied %v", w)
	}
	if get, ref := b.load32(userd+UserdIBGet), b.load32(userd+UserdRef); get != 2 || ref != 3 {
		t.Errorf("USERD says %d and %d", get, ref)
	}
}

func TestChannelWaitsForTheSemaphoreOfAnother(t *testing.T) {
	b := newBare(t)
	at := []uint32{smallVA >> 32, smallVA + 0xa0000}
	b.submit(0, append([]uint32{Incr(0, MethodSemaphoreHigh, 4)}, append(at, 5, SemaphoreAcquireMore, Incr(0, MethodRef, 1), 1)...)...)
	b.Advance(100*time.Microsecond, math.MaxInt)
	if b.load32(userd+UserdRef) != 0 || !b.Busy() {
		t.Fatal("it did not wait")
	}
	b.submit(1, append([]uint32{Incr(0, MethodSemaphoreHigh, 4)}, append(at, 6, SemaphoreRelease, 0, 0)...)...)
	b.run()
	b.well()
	if b.load32(userd+UserdRef) != 1 {
		t.Error("it waits still")
	}
}

func TestKernelsTakeTheirTime(t *testing.T) {
	b := newBare(t)
	b.store64(0xb0000, KernelMagic|KernelLoop<<32)
	b.Store(me, 0xb1000, Params(0, 0, 0, 1000))
	launch := []uint32{
		Incr(1, MethodObject, 1), ClassCompute, Incr(1, ComputeCodeHigh, 2), 0, smallVA + 0xb0000, Incr(1, ComputeParamHigh, 2), 0, smallVA + 0xb1000,
		Incr(1, ComputeLaunch, 1), 0, Incr(1, ComputeQueryHigh, 4), 0, smallVA + 0xb2000, 9, 0,
	}
	b.submit(0, launch...)
	b.Advance(900*time.Microsecond, math.MaxInt)
	if b.load32(0xb2000) != 0 || b.ReadRegister(RegGraphStatus) != 1 {
		t.Error("the query is there before the kernel's end")
	}
	if took := 900*time.Microsecond + b.run(); took < time.Millisecond || took > 1100*time.Microsecond {
		t.Errorf("it took %v", took)
	}
	if b.well(); b.load32(0xb2000) != 9 || b.ReadRegister(RegGraphStatus) != 0 {
		t.Error("there is no query")
	}
}

func TestFaultsNameAddressAndReason(t *testing.T) {
	for name, c := range map[string]struct {
		va     uint64
		reason FaultReason
		setup  func(*bare)
	}{
		"no table":  {7 * TableSpan, FaultNoTable, nil},
		"too short": {largeVA + TableSpan/2, FaultTooShort, nil},
		"no page":   {smallVA + mib, FaultNoPage, nil},
		"read only": {smallVA + 200*PageSize, FaultReadOnly, nil},
		"limit":     {smallVA + 0x80000, FaultLimit, func(b *bare) { b.store64(inst+InstLimit, smallVA+0x7ffff) }},
		"another's": {smallVA + 0x81000, FaultNoPage, func(b *bare) { b.store64(small+8*0x81, uint64(MakePTE(3*mib, TargetVRAM, false))) }},
	} {
		b := newBare(t)
		if c.setup != nil {
			c.setup(b)
		}
		b.submit(0, Incr(0, MethodSemaphoreHigh, 4), uint32(c.va>>32), uint32(c.va), 1, SemaphoreRelease, 0)
		b.run()
		e := b.Take()
		if len(e) != 1 || e[0].Kind != Faulted || e[0].Fault.Reason != c.reason || e[0].Fault.VA != c.va || !e[0].Fault.Write {
			t.Errorf("%s: %+v", name, e)
		}
		if n := len(b.violations); (n == 1) != (name == "another's") {
			t.Errorf("%s: %v", name, b.violations)
		}
		b.submit(0, 0, 0)
		if b.run(); b.load32(userd+UserdIBGet) == b.put[0] {
			t.Errorf("%s: the channel goes on", name)
		}
	}
}

func TestTLBKeepsTranslationsUntilItIsFlushed(t *testing.T) {
	b := newBare(t)
	use := func() []Event {
		b.submit(0, Incr(0, MethodSemaphoreHigh, 4), 0, smallVA+0x80000, 1, SemaphoreRelease, 0)
		b.run()
		return b.Take()
	}
	use()
	b.store64(small+8*0x80, 0)
	if e := use(); len(e) != 0 {
		t.Errorf("a cached page faults: %+v", e)
	}
	b.WriteRegister(RegTLBSpace, 0x50000>>8)
	if b.WriteRegister(RegTLBTrigger, TLBFlush); len(use()) != 0 {
		t.Error("the flush of another directory counts")
	}
	b.WriteRegister(RegTLBSpace, directory>>8)
	if b.WriteRegister(RegTLBTrigger, TLBFlush); len(use()) != 1 {
		t.Error("a flushed page does not fault")
	}
}

func TestOwnersOfFrames(t *testing.T) {
	b := newBare(t)
	p := []byte{1, 2, 3, 4}
	b.Store(me, 3*mib-2, p) // over the border
	b.Load(other, 0, p)
	if len(b.violations) != 2 || b.Violations() != 2 || p[0] != 0 || b.violations[0].Owner != other {
		t.Errorf("%v", b.violations)
	}
	if b.load32(3*mib-4) != 0 {
		t.Error("half of it was stored")
	}
	b.Load(me, 4*mib-2, p)
	b.Load(me, 1<<40, p)
	if b.Violations() != 4 {
		t.Error("beyond the memory")
	}
	if err := b.Tag(0, mib, other, other, Data); !errors.Is(err, ErrTagged) {
		t.Error(err)
	}
	for _, c := range [][2]uint64{{1, PageSize}, {0, 1}, {4 * mib, PageSize}, {0, 1 << 60}} {
		if err := b.Tag(HostPA(c[0]), c[1], me, me, Data); !errors.Is(err, ErrRange) {
			t.Error(err)
		}
	}
}

// TestMediatedHardwareTakesNoTablesOfOthers: with a mediator, an instance block in a VM's
// memory is a violation.
func TestMediatedHardwareTakesNoTablesOfOthers(t *testing.T) {
	b := newBare(t)
	b.config.Mediated = true
	b.channels[0].loaded = false
	b.submit(0, 0, 0)
	if b.run(); len(b.violations) == 0 {
		t.Error("it was taken")
	}
}

func TestKickedChannelGoesOnAndHeldOneWaits(t *testing.T) {
	b := newBare(t)
	b.store64(0xb0000, KernelMagic|KernelLoop<<32)
	b.Store(me, 0xb1000, Params(0, 0, 0, 1000))
	b.submit(0, Incr(1, MethodObject, 1), ClassCompute, Incr(1, ComputeCodeHigh, 2), 0, smallVA+0xb0000, Incr(1, ComputeParamHigh, 2), 0, smallVA+0xb1000,
		Incr(1, ComputeLaunch, 1), 0, Incr(1, MethodRef, 1), 4)
	b.Advance(500*time.Microsecond, math.MaxInt)
	b.WriteRegister(RegKick, 0)
	b.Hold(0)
	if b.Advance(5*time.Millisecond, math.MaxInt); b.Busy() || b.load32(userd+UserdRef) != 0 {
		t.Error("a held channel goes on")
	}
	p := b.Position(0)
	b.SetPosition(0, p)
	b.Doorbell(0, b.put[0])
	if b.run(); b.load32(userd+UserdRef) != 4 {
		t.Error("it does not go on where it was")
	}
	b.well()
}

// FuzzPush runs any push buffer: the channel may be stopped, and no more.
func FuzzPush(f *testing.F) {
	word := func(words ...uint32) (b []byte) {
		for _, w := range words {
			b = binary.LittleEndian.AppendUint32(b, w)
		}
		return b
	}
	f.Add(word(Incr(0, 0, 1), ClassM2MF, Incr(0, M2MFOutHigh, 2), 0, smallVA+0x80000, Incr(0, M2MFLength, 2), 4, 1, Incr(0, M2MFExec, 1), 1, NonIncr(0, M2MFData, 2), 1, 2))
	f.Add(word(Incr(1, 0, 1), ClassCompute, Incr(1, ComputeGridYX, 2), 0xffff, 0xffff, Incr(1, ComputeLaunch, 1), 0))
	f.Add(word(Incr(0, MethodSemaphoreHigh, 4), 0xff, 0xfffffffc, 1, SemaphoreAcquire, 7<<29))
	f.Fuzz(func(t *testing.T, raw []byte) {
		b := newBare(t)
		for k := range uint64(8) {
			b.store64(0xb0000+8*HostPA(k), KernelMagic|k<<32)
		}
		var words []uint32
		for ; len(raw) >= 4 && len(words) < 2000; raw = raw[4:] {
			words = append(words, binary.LittleEndian.Uint32(raw))
		}
		b.submit(0, words...)
		b.Advance(b.Now()+20*time.Millisecond, 100000)
		if len(b.violations) > 0 {
			t.Fatal(b.violations[0])
		}
	})
}
