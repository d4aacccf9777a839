package driver

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
)

// Versions of the driver's interface, as cuDriverGetVersion returns them.
const (
	cudaCheckpoints = 12080 // the first with cuCheckpointProcess functions: driver 570
	cudaPairs       = 13000 // the first that restores on another GPU: driver 580
	// cudaKnown is the newest whose structures are known.
	cudaKnown = 13040
)

// argsSize is the size of each argument structure.
const argsSize = 64

// Offsets in the arguments of a restore. They are published in the driver's reference, and
// did not change: of 13.0 (pointer, count, 44 reserved bytes, 8 reserved), of 13.3 (pointer,
// count, 52 reserved) and of 13.4 (pointer, count, padding, pointer for storage by other
// programs, 40 reserved). So with reserved bytes and that pointer zero all are the same.
const (
	offPairs  = 0
	offCount  = 8
	pairBytes = 32
)

// errNoPairs means that this driver can't restore on another GPU.
var errNoPairs = errors.New("this driver can't restore a process on another GPU")

// pairsAllowed reports whether a restore can have pairs of GPUs with a driver of this
// version. With 12.8 the bytes for them are reserved, and of one that is newer than what is
// known nobody knows.
func pairsAllowed(cuda int) error {
	switch {
	case cuda < cudaPairs:
		return fmt.Errorf("%w: CUDA %s has no pairs of GPUs; it needs 13.0, which is driver 580", errNoPairs, dotted(cuda))
	case cuda > cudaKnown:
		return fmt.Errorf("%w: the arguments of a restore are not known for CUDA %s, but up to %s; install a newer gpuctl",
			errNoPairs, dotted(cuda), dotted(cudaKnown))
	}
	return nil
}

func dotted(cuda int) string { return fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10) }

// putLock writes the arguments of a lock.
func putLock(args []byte, timeoutMS uint32) { binary.NativeEndian.PutUint32(args, timeoutMS) }

// putRestore writes the arguments of a restore. address is where the pairs are.
func putRestore(args []byte, address uint64, count uint32) {
	binary.NativeEndian.PutUint64(args[offPairs:], address)
	binary.NativeEndian.PutUint32(args[offCount:], count)
}

// putPairs writes the pairs.
func putPairs(b []byte, pairs []ask.Pair) error {
	for i, p := range pairs {
		from, err := p.Old.Bytes()
		if err != nil {
			return err
		}
		to, err := p.New.Bytes()
		if err != nil {
			return err
		}
		copy(b[i*pairBytes:], from[:])
		copy(b[i*pairBytes+16:], to[:])
	}
	return nil
}

// states are those of CUprocessState, in its order. The last two came with 13.4.
func states() []ask.State {
	return []ask.State{ask.Running, ask.Locked, ask.Checkpointed, ask.Failed, ask.Checkpointing, ask.Restoring}
}

func stateOf(n uint32) ask.State {
	if s := states(); int(n) < len(s) {
		return s[n]
	}
	return ask.Unknown
}
