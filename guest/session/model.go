package session

import (
	"sync"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// model predicts the times of a swap:
//
//	total = start + programs·build + memory/rate + stop
//	stop  = fixed + memory·dirty/rate
//
// Its constants begin with cautious values and follow the swaps that this process has
// measured. The newest swap counts half.
type model struct {
	mu    sync.Mutex
	start float64 // seconds until a target serves
	build float64 // seconds to prepare one program
	rate  float64 // bytes per second of copying
	dirty float64 // share of the memory that is copied while frozen
	fixed float64 // seconds of downtime in addition to copying
	seen  int     // swaps
}

// How far off a prediction may be: a factor without any swap measured before, and with one.
const (
	guessLow, guessHigh = 4, 16
	seenOff             = 2
)

func newModel() *model {
	return &model{start: 0.2, build: 0.15, rate: 1 << 30, dirty: 0.05, fixed: 0.005}
}

func (m *model) predict(u *gpuctlv1.Usage) (total, stop time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	mem := float64(u.GetMemory())
	s := m.fixed + mem*m.dirty/m.rate
	t := m.start + m.build*float64(u.GetPrograms()) + mem/m.rate + s
	return seconds(t), seconds(s)
}

// spread returns the range in which a predicted time is expected.
func (m *model) spread(d time.Duration) *gpuctlv1.Prediction {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.seen == 0 {
		return &gpuctlv1.Prediction{LowNs: int64(d / guessLow), HighNs: int64(d * guessHigh)}
	}
	return &gpuctlv1.Prediction{LowNs: int64(d / seenOff), HighNs: int64(d * seenOff), Measured: true}
}

// learn updates the model from a swap that succeeded.
func (m *model) learn(r *gpuctlv1.SwapResult, u *gpuctlv1.Usage) {
	took := map[string]float64{}
	for _, t := range r.Steps {
		took[t.Step] = time.Duration(t.DurationNs).Seconds()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	first := m.seen == 0
	m.seen++
	follow := func(v *float64, seen float64) {
		if first {
			*v = seen // a measured value replaces the guess
			return
		}
		*v += (seen - *v) / 2
	}
	follow(&m.start, took[stepStart])
	if n := u.GetPrograms(); n > 0 {
		follow(&m.build, took[stepPrepare]/float64(n))
	}
	const enough = 1 << 20 // bytes; less is too little to measure the rate
	if n := r.BytesPrecopied; n > enough && took[stepPrecopy] > 0 {
		follow(&m.rate, float64(n)/took[stepPrecopy])
	}
	if n := u.GetMemory(); n > 0 {
		follow(&m.dirty, min(float64(r.BytesFrozen)/float64(n), 1))
	}
	stopped := time.Duration(r.StoppedNs).Seconds()
	follow(&m.fixed, max(stopped-float64(r.BytesFrozen)/m.rate, 0))
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
