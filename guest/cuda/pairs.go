package cuda

import (
	"fmt"
	"slices"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
)

// provedPairs are chips between which processes were moved, beside equal ones. The driver's
// documents speak of the same chip only. A pair is added when it has been measured.
func provedPairs() [][2]uint32 { return nil }

// sameChip reports whether a process can go from a GPU with the one PCI device id to one
// with the other.
func sameChip(from, to uint32) bool {
	return from == to || slices.Contains(provedPairs(), [2]uint32{from, to})
}

// pairsFor returns the pairs for a restore of a process on dest, which has one GPU for each
// that it uses. The driver wants each GPU to be named that it showed when the state was
// taken, used or not, CUDA_VISIBLE_DEVICES notwithstanding. now are those that it shows.
// No pairs are needed if nothing changes.
func pairsFor(uses, dest, shown, now []ask.UUID) ([]ask.Pair, error) {
	if len(uses) != len(dest) {
		return nil, fmt.Errorf("%d GPUs for a process that uses %d", len(dest), len(uses))
	}
	to, taken := map[ask.UUID]ask.UUID{}, map[ask.UUID]bool{}
	same := true
	for i, u := range uses {
		if taken[dest[i]] {
			return nil, fmt.Errorf("two GPUs of a process can't go to one, %s", dest[i])
		}
		if !slices.Contains(now, dest[i]) {
			return nil, fmt.Errorf("the driver shows no %s", dest[i])
		}
		to[u], taken[dest[i]] = dest[i], true
		same = same && u == dest[i]
	}
	if same && !slices.ContainsFunc(shown, func(u ask.UUID) bool { return !slices.Contains(now, u) }) {
		return nil, nil
	}
	var left []ask.UUID
	for _, u := range shown {
		switch {
		case to[u] != "":
		case slices.Contains(now, u) && !taken[u]:
			to[u], taken[u] = u, true
		default:
			left = append(left, u)
		}
	}
	for _, u := range left {
		i := slices.IndexFunc(now, func(n ask.UUID) bool { return !taken[n] })
		if i < 0 {
			return nil, fmt.Errorf("the driver showed %d GPUs when the state was taken, and shows %d: each must have one to go to", len(shown), len(now))
		}
		to[u], taken[now[i]] = now[i], true
	}
	var pairs []ask.Pair
	for _, u := range shown {
		pairs = append(pairs, ask.Pair{Old: u, New: to[u]})
	}
	for _, u := range uses {
		if !slices.Contains(shown, u) {
			pairs = append(pairs, ask.Pair{Old: u, New: to[u]})
		}
	}
	return pairs, nil
}
