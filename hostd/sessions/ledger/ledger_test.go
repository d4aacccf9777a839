package ledger

import (
	"errors"
	"maps"
	"testing"

	"pgregory.net/rapid"
)

// Whatever is asked for in whatever order: one owner, or several whose sum fits.
func TestNeverTwoOwnersAndNeverMoreThanThereIs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		capacity := map[string]uint64{"a": 10, "b": 4, "c": 0}
		l := New()
		for gpu, n := range capacity {
			l.SetGPU(gpu, n)
		}
		gpus := rapid.SampledFrom([]string{"a", "b", "c", "nowhere"})
		claims := rapid.SampledFrom([]string{"1", "2", "3", "4"})
		t.Repeat(map[string]func(*rapid.T){
			"reserve": func(t *rapid.T) {
				claim := claims.Draw(t, "claim")
				want := rapid.SliceOfNDistinct(gpus, 1, 3, rapid.ID[string]).Draw(t, "gpus")
				amount := rapid.Uint64Range(0, 11).Draw(t, "amount")
				before := snapshot(l, capacity)
				err := l.Reserve(claim, want, amount)
				for _, gpu := range want {
					if got, ok := l.Holds(claim, gpu); err == nil && (!ok || got != amount) {
						t.Fatalf("reserved, but holds %d of %s", got, gpu)
					}
				}
				if err == nil {
					return
				}
				if !errors.Is(err, ErrBusy) && !errors.Is(err, ErrUnknownGPU) {
					t.Fatalf("unexpected error %v", err)
				}
				for gpu, was := range before {
					if !maps.Equal(was, l.Owners(gpu)) {
						t.Fatalf("a refusal changed %s from %v to %v", gpu, was, l.Owners(gpu))
					}
				}
			},
			"retain": func(t *rapid.T) {
				claim, keep := claims.Draw(t, "claim"), gpus.Draw(t, "keep")
				l.Retain(claim, []string{keep})
				for gpu := range capacity {
					if _, ok := l.Holds(claim, gpu); ok && gpu != keep {
						t.Fatalf("still holds %s", gpu)
					}
				}
			},
			"": func(t *rapid.T) {
				for gpu, n := range capacity {
					owners := l.Owners(gpu)
					var sum uint64
					for claim, amount := range owners {
						if amount == Whole && len(owners) > 1 {
							t.Fatalf("%s: claim %s holds all of it, among %v", gpu, claim, owners)
						}
						sum += amount
					}
					if sum > n {
						t.Fatalf("%s: %d of %d given away", gpu, sum, n)
					}
				}
			},
		})
	})
}

func snapshot(l *Ledger, gpus map[string]uint64) map[string]map[string]uint64 {
	out := map[string]map[string]uint64{}
	for gpu := range gpus {
		out[gpu] = l.Owners(gpu)
	}
	return out
}
