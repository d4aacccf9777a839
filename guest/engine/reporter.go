package engine

import (
	"sync"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Reporter sends the progress of one operation.
type Reporter struct {
	sink func(*gpuctlv1.Progress)

	mu  sync.Mutex
	now gpuctlv1.Progress // step and bytes as last reported
}

// NewReporter returns a reporter that sends to sink. The sink must not block.
func NewReporter(sink func(*gpuctlv1.Progress)) *Reporter { return &Reporter{sink: sink} }

// Step reports that step i of n begins.
func (r *Reporter) Step(i, n int, name string) {
	r.report(func(now *gpuctlv1.Progress) {
		proto.Reset(now)
		now.Step, now.StepIndex, now.Steps = name, uint32(i), uint32(n)
	})
}

// Bytes reports how much the running step has done, and what it waits for.
func (r *Reporter) Bytes(done, total uint64, text string) {
	r.report(func(now *gpuctlv1.Progress) { now.BytesDone, now.BytesTotal, now.Message = done, total, text })
}

// Waits reports what the running step waits for.
func (r *Reporter) Waits(text string) {
	r.report(func(now *gpuctlv1.Progress) { now.Message = text })
}

func (r *Reporter) report(change func(*gpuctlv1.Progress)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&r.now)
	r.sink(proto.CloneOf(&r.now))
}
