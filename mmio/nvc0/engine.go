package nvc0

import (
	"encoding/binary"
	"fmt"
	"time"
)

// Limits of one command, beyond which it is illegal.
const (
	MaxCopy    = 64 << 20 // bytes
	MaxThreads = 1 << 20
	MaxLoop    = 10_000_000 // µs, of KernelLoop
	MaxRounds  = 4 << 20    // of KernelMix, in all threads

	// A copy goes in pieces, and a piece of a line counts as so much at least. What the model does
	// in one step has to be little: all VMs wait for it.
	copyPiece = 64 << 10
	leastLine = 1 << 10
	pieceStep = 16 // steps as which a piece counts
	// threadsInStep is how many threads, or rounds of one, count as a step.
	threadsInStep = 1024
)

func high(to *uint64, v uint32) { *to = *to&0xffffffff | uint64(v&0xff)<<32 }
func low(to *uint64, v uint32)  { *to = *to&^0xffffffff | uint64(v) }

func (g *GPU) m2mf(c *channel, m, v uint32) bool {
	s := &c.State
	switch m {
	case M2MFOutHigh:
		high(&s.Out, v)
	case M2MFOutLow:
		low(&s.Out, v)
	case M2MFInHigh:
		high(&s.In, v)
	case M2MFInLow:
		low(&s.In, v)
	case M2MFPitchIn:
		s.PitchIn = v
	case M2MFPitchOut:
		s.PitchOut = v
	case M2MFLength:
		s.Length = v
	case M2MFCount:
		s.Lines = v
	case M2MFQueryHigh:
		high(&s.Query, v)
	case M2MFQueryLow:
		low(&s.Query, v)
	case M2MFQuerySeq:
		return g.put32(c, s.Query, v)
	case M2MFData:
		if s.Push < 4 {
			g.illegal(c, "more data than the copy takes")
			return false
		}
		if !g.put32(c, s.Out, v) {
			return false
		}
		s.Out, s.Push = s.Out+4, s.Push-4
	case M2MFExec:
		total := uint64(s.Length) * uint64(s.Lines)
		if total > MaxCopy {
			g.illegal(c, fmt.Sprintf("a copy of %d bytes", total))
			return false
		}
		if v&M2MFPush != 0 {
			s.Push = uint32(total)
			return true
		}
		return g.copyLines(c)
	default:
		g.illegal(c, fmt.Sprintf("method %#x of M2MF", m))
		return false
	}
	return true
}

// copyLines does a piece of a copy, through a buffer of a page, so a copy takes no memory. It
// reports whether the copy is done; if not, the method is to be done again.
func (g *GPU) copyLines(c *channel) bool {
	s := &c.State
	length, total := uint64(s.Length), uint64(s.Length)*uint64(s.Lines)
	var b [PageSize]byte
	spent := uint64(0)
	for s.Copied < total && spent < copyPiece {
		line, at := s.Copied/length, s.Copied%length
		n := min(length-at, PageSize)
		f := g.virtual(c, s.In+line*uint64(s.PitchIn)+at, b[:n], false, UnitGraph)
		if f == nil {
			f = g.virtual(c, s.Out+line*uint64(s.PitchOut)+at, b[:n], true, UnitGraph)
		}
		if f != nil {
			g.fault(c, f)
			return false
		}
		s.Copied += n
		if spent += n; length < leastLine {
			spent += leastLine - n
		}
	}
	g.effort += pieceStep
	took := time.Duration(spent) * time.Microsecond / bytesPerUS
	if s.Copied < total {
		g.spend(took)
		return false
	}
	s.Copied = 0
	g.spend(time.Microsecond + took)
	return true
}

// Kernels of the compute class. Code is 8 bytes: [KernelMagic] and one of these.
const (
	KernelMagic = 0x4b43564e

	KernelNop  = 0
	KernelLoop = 1 // keeps the GPU busy for X µs
	KernelFill = 2 // out[i] = X + i
	KernelAdd  = 3 // out[i] = a[i] + b[i]
	KernelMadd = 4 // out[i] = a[i]*b[i] + X
	KernelMmul = 5 // out = a b, matrices of X by X
	KernelSum  = 6 // out[0] = the sum of a
	KernelMix  = 7 // out[i] = X rounds of xorshift over a[i]
)

// ParamsSize is how long a kernel's parameters are: addresses of out, a and b, then X.
const ParamsSize = 32

// Params returns them in memory's form.
func Params(out, a, b uint64, x uint32) []byte {
	p := make([]byte, ParamsSize)
	binary.LittleEndian.PutUint64(p, out)
	binary.LittleEndian.PutUint64(p[8:], a)
	binary.LittleEndian.PutUint64(p[16:], b)
	binary.LittleEndian.PutUint32(p[24:], x)
	return p
}

func (g *GPU) compute(c *channel, m, v uint32) bool {
	s := &c.State
	switch m {
	case ComputeGridYX:
		s.GridYX = v
	case ComputeGridZ:
		s.GridZ = v
	case ComputeBlockYX:
		s.BlockYX = v
	case ComputeBlockZ:
		s.BlockZ = v
	case ComputeCodeHigh:
		high(&s.Code, v)
	case ComputeCodeLow:
		low(&s.Code, v)
	case ComputeParamHigh:
		high(&s.Params, v)
	case ComputeParamLow:
		low(&s.Params, v)
	case ComputeQueryHigh:
		high(&s.ComQuery, v)
	case ComputeQueryLow:
		low(&s.ComQuery, v)
	case ComputeQuerySeq:
		s.ComSeq = v
	case ComputeQueryGet:
		return g.put32(c, s.ComQuery, s.ComSeq)
	case ComputeLaunch:
		return g.launch(c)
	default:
		g.illegal(c, fmt.Sprintf("method %#x of the compute class", m))
		return false
	}
	return true
}

func (g *GPU) launch(c *channel) bool {
	s := &c.State
	threads := uint64(1)
	for _, n := range []uint32{s.GridYX & 0xffff, s.GridYX >> 16, s.GridZ & 0xffff, s.BlockYX & 0xffff, s.BlockYX >> 16, s.BlockZ & 0xffff} {
		if threads *= uint64(max(n, 1)); threads > MaxThreads {
			g.illegal(c, "a launch of too many threads")
			return false
		}
	}
	var code [8]byte
	var params [ParamsSize]byte
	f := g.virtual(c, s.Code, code[:], false, UnitGraph)
	if f == nil {
		f = g.virtual(c, s.Params, params[:], false, UnitGraph)
	}
	if f != nil {
		g.fault(c, f)
		return false
	}
	if binary.LittleEndian.Uint32(code[:]) != KernelMagic {
		g.illegal(c, "code that is no kernel")
		return false
	}
	k := kernel{
		g: g, c: c, n: threads,
		out: binary.LittleEndian.Uint64(params[:]), a: binary.LittleEndian.Uint64(params[8:]),
		b: binary.LittleEndian.Uint64(params[16:]), x: binary.LittleEndian.Uint32(params[24:]),
	}
	work, why := k.run(binary.LittleEndian.Uint32(code[4:]))
	g.effort += int(k.n * uint64(max(k.rounds, 1)) / threadsInStep)
	if k.fault != nil {
		g.fault(c, k.fault)
		return false
	}
	if why != "" {
		g.illegal(c, why)
		return false
	}
	g.spend(costLaunch + work)
	return true
}

// kernel is a launch.
type kernel struct {
	g         *GPU
	c         *channel
	n         uint64 // threads
	out, a, b uint64
	x         uint32
	rounds    uint32 // of each thread, if they are many
	fault     *Fault
}

// words reads or writes n dwords.
func (k *kernel) words(va, n uint64, from []uint32) []uint32 {
	if k.fault != nil {
		return make([]uint32, n)
	}
	b := make([]byte, n*4)
	for i, w := range from {
		binary.LittleEndian.PutUint32(b[4*i:], w)
	}
	if k.fault = k.g.virtual(k.c, va, b, from != nil, UnitGraph); k.fault != nil || from != nil {
		return make([]uint32, n)
	}
	w := make([]uint32, n)
	for i := range w {
		w[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return w
}

// run does it, and returns how long it keeps the GPU, or why it can't be.
func (k *kernel) run(id uint32) (took time.Duration, why string) {
	took = time.Duration(k.n) * time.Microsecond / threadsInUS
	switch id {
	case KernelNop:
	case KernelLoop:
		if k.x > MaxLoop {
			return 0, "a loop that is too long"
		}
		took = time.Duration(k.x) * time.Microsecond
	case KernelMmul:
		if k.x == 0 || k.x > 128 {
			return 0, "matrices that are too large"
		}
		return took, k.multiply()
	case KernelSum:
		k.words(k.out, 1, []uint32{Compute(id, k.words(k.a, k.n, nil), nil, k.x, int(k.n))[0]})
	case KernelFill:
		k.words(k.out, k.n, Compute(id, nil, nil, k.x, int(k.n)))
	case KernelAdd, KernelMadd:
		k.words(k.out, k.n, Compute(id, k.words(k.a, k.n, nil), k.words(k.b, k.n, nil), k.x, int(k.n)))
	case KernelMix:
		if k.x > 64 || k.n*uint64(k.x) > MaxRounds {
			return 0, "too many rounds"
		}
		k.rounds = k.x
		k.words(k.out, k.n, Compute(id, k.words(k.a, k.n, nil), nil, k.x, int(k.n)))
	default:
		return 0, fmt.Sprintf("kernel %d", id)
	}
	return took, ""
}

func (k *kernel) multiply() string {
	n := uint64(k.x) * uint64(k.x)
	k.n, k.rounds = n, k.x
	k.words(k.out, n, Compute(KernelMmul, k.words(k.a, n, nil), k.words(k.b, n, nil), k.x, int(n)))
	return ""
}

// Compute is what a kernel makes of its input, for those who check results: n
// threads, or elements of the matrix.
func Compute(kernel uint32, a, b []uint32, x uint32, n int) []uint32 {
	out := make([]uint32, n)
	switch kernel {
	case KernelMmul:
		side := int(x)
		for i := range side {
			for j := range side {
				for l := range side {
					out[i*side+j] += a[i*side+l] * b[l*side+j]
				}
			}
		}
		return out
	case KernelSum:
		for _, v := range a {
			out[0] += v
		}
		return out
	}
	for i := range out {
		switch kernel {
		case KernelFill:
			out[i] = x + uint32(i)
		case KernelAdd:
			out[i] = a[i] + b[i]
		case KernelMadd:
			out[i] = a[i]*b[i] + x
		case KernelMix:
			v := a[i]
			for range x {
				v ^= v << 13
				v ^= v >> 17
				v ^= v << 5
			}
			out[i] = v
		}
	}
	return out
}
