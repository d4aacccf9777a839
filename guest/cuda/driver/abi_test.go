package driver

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
)

// The bytes of the arguments are the driver's interface, so they are written out here.
func TestArguments(t *testing.T) {
	lock := make([]byte, argsSize)
	putLock(lock, 1500)
	want := make([]byte, 64)
	binary.NativeEndian.PutUint32(want, 1500)
	if !bytes.Equal(lock, want) {
		t.Errorf("lock: %x", lock)
	}
	restore := make([]byte, argsSize)
	putRestore(restore, 0x1122334455667788, 2)
	want = make([]byte, 64)
	binary.NativeEndian.PutUint64(want, 0x1122334455667788)
	binary.NativeEndian.PutUint32(want[8:], 2)
	if !bytes.Equal(restore, want) {
		t.Errorf("restore: %x", restore)
	}
	pairs := make([]byte, pairBytes)
	err := putPairs(pairs, []ask.Pair{{Old: "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", New: "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"}})
	for i := range pairs {
		if pairs[i] != byte(i) {
			t.Fatalf("pairs: %x, %v", pairs, err)
		}
	}
}

func TestPairsAreNotGuessed(t *testing.T) {
	for cuda, allowed := range map[int]bool{12080: false, 12090: false, 13000: true, 13030: true, 13040: true, 13050: false, 14000: false} {
		if err := pairsAllowed(cuda); (err == nil) != allowed || err != nil && !errors.Is(err, errNoPairs) {
			t.Errorf("%d: %v", cuda, err)
		}
	}
}

func TestStates(t *testing.T) {
	for n, want := range map[uint32]ask.State{0: ask.Running, 1: ask.Locked, 2: ask.Checkpointed, 3: ask.Failed, 5: ask.Restoring, 6: ask.Unknown, 1 << 31: ask.Unknown} {
		if got := stateOf(n); got != want {
			t.Errorf("%d is %s, want %s", n, got, want)
		}
	}
}
