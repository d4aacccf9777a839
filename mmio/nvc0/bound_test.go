package nvc0

import (
	"testing"
	"time"
)

// TestCopyOfManyLinesIsLittleWorkAtOnce: a copy goes in pieces, is at rest between them, goes on
// at another place, and takes the GPU's time by its lines.
func TestCopyOfManyLinesIsLittleWorkAtOnce(t *testing.T) {
	const lines = 40_000 // of 4 bytes, one over the other
	b := newBare(t)
	b.store64(0x80000, 0x1122334455667788)
	b.submit(0,
		Incr(0, MethodObject, 1), ClassM2MF,
		Incr(0, M2MFOutHigh, 2), smallVA>>32, smallVA+0x90000,
		Incr(0, M2MFInHigh, 6), smallVA>>32, smallVA+0x80000, 0, 0, 4, lines,
		Incr(0, M2MFExec, 1), 0x110,
		Incr(0, MethodRef, 1), 3,
	)
	for range 10_000 {
		if b.Position(0).Context.Copied > 0 {
			break
		}
		b.Advance(b.Now()+time.Second, 1)
	}
	done := b.Position(0).Context.Copied
	if done == 0 || done > 4*copyPiece/leastLine {
		t.Fatalf("a step has copied %d bytes of %d", done, 4*lines)
	}
	before := b.Now()
	b.Advance(before+time.Second, 1+pieceStep)
	if n := b.Position(0).Context.Copied - done; n != 4*copyPiece/leastLine {
		t.Errorf("the steps of a piece have copied %d bytes", n)
	}
	p := b.Position(0)
	b.SetPosition(0, p)
	b.Doorbell(0, b.put[0])
	took := b.run()
	if b.load32(0x90000) != 0x55667788 || b.load32(userd+UserdRef) != 3 {
		t.Errorf("copied %#x, reference %d", b.load32(0x90000), b.load32(userd+UserdRef))
	}
	if least := (lines - 1000) * leastLine / bytesPerUS * time.Microsecond; took < least {
		t.Errorf("%d lines took %v of the GPU's time, less than %v", lines, took, least)
	}
	b.well()
}

// TestLargeKernelCountsAsManySteps: who lets the GPU do a little does not get two large launches.
func TestLargeKernelCountsAsManySteps(t *testing.T) {
	b := newBare(t)
	b.store64(0x80000, KernelMagic|KernelNop<<32)
	b.Store(me, 0x81000, Params(smallVA+0x82000, 0, 0, 1))
	words := []uint32{
		Incr(0, MethodObject, 1), ClassCompute,
		Incr(0, ComputeCodeHigh, 2), smallVA >> 32, smallVA + 0x80000,
		Incr(0, ComputeParamHigh, 2), smallVA >> 32, smallVA + 0x81000,
		Incr(0, ComputeGridYX, 2), 1<<16 | 1024, 1, Incr(0, ComputeBlockYX, 2), 1<<16 | 1024, 1,
		NonIncr(0, ComputeLaunch, 4), 0, 0, 0, 0,
	}
	b.submit(0, words...)
	launches := 0
	for range 10_000 {
		if !b.Busy() {
			break
		}
		before := b.Position(0).Context
		b.Advance(b.Now()+time.Second, 64)
		after := b.Position(0).Context
		if n := int(before.Count) - int(after.Count); before.Method == ComputeLaunch && n > 0 {
			if launches += n; n > 1 {
				t.Fatalf("64 steps did %d launches of a million threads", n)
			}
		}
	}
	if launches < 3 {
		t.Errorf("%d launches were seen", launches)
	}
	b.well()
}

// TestKernelOfTooManyRoundsIsIllegal bounds what a launch takes of the host.
func TestKernelOfTooManyRoundsIsIllegal(t *testing.T) {
	b := newBare(t)
	b.store64(0x80000, KernelMagic|KernelMix<<32)
	b.Store(me, 0x81000, Params(smallVA+0x82000, smallVA+0x82000, 0, 64))
	b.submit(0,
		Incr(0, MethodObject, 1), ClassCompute,
		Incr(0, ComputeCodeHigh, 2), smallVA>>32, smallVA+0x80000,
		Incr(0, ComputeParamHigh, 2), smallVA>>32, smallVA+0x81000,
		Incr(0, ComputeGridYX, 2), 1<<16|1024, 1, Incr(0, ComputeBlockYX, 2), 1<<16|1024, 1,
		Incr(0, ComputeLaunch, 1), 0,
	)
	b.run()
	if e := b.Take(); len(e) != 1 || e[0].Kind != Illegal {
		t.Errorf("%+v", e)
	}
}
