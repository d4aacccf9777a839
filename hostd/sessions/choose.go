package sessions

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/sessions/ledger"
	"github.com/gpuctl/gpuctl/internal/size"
)

// placement is the GPUs that a claim uses. They belong to one runtime, and their order
// matters.
type placement []*gpuctlv1.GPU

func (p placement) ids() []string {
	ids := make([]string, len(p))
	for i, g := range p {
		ids[i] = g.GetId()
	}
	return ids
}

func (p placement) String() string { return strings.Join(p.ids(), separator) }

// separator is put between the GPUs of one target.
const separator = ","

func splitIDs(ids string) []string {
	if ids == "" {
		return nil
	}
	return strings.Split(ids, separator)
}

// target describes the placement to gpuguest. amount is how much of each GPU the claim
// has, in bytes; 0 is the whole GPU.
func (p placement) target(amount uint64) *gpuctlv1.Target {
	limits := cloneLimits(p[0].GetLimits())
	if amount != ledger.Whole {
		limits.GlobalMemory = min(limits.GlobalMemory, amount)
		limits.MaxAlloc = min(limits.MaxAlloc, amount)
	}
	runtime := &gpuctlv1.Runtime{Library: p[0].GetRuntime().GetLibrary(), Env: p[0].GetRuntime().GetEnv()}
	for _, g := range p {
		runtime.Devices = append(runtime.Devices, g.GetRuntime().GetDevices()...)
	}
	return &gpuctlv1.Target{Gpu: p.String(), Model: p[0].GetModel(), Runtime: runtime, Limits: limits}
}

// example is the target of a plan. For a GPU of another host it has no lease, so nothing
// can be started with it.
func (p placement) example(amount uint64) *gpuctlv1.Target {
	t := p.target(amount)
	if p.far() {
		t.Runtime = &gpuctlv1.Runtime{Remote: &gpuctlv1.Remote{}}
	}
	return t
}

// runtimeKey returns the same key for all GPUs that one executor can use together.
func runtimeKey(g *gpuctlv1.GPU) string {
	r := g.GetRuntime()
	var env []string
	for k, v := range r.GetEnv() {
		env = append(env, k+"="+v)
	}
	slices.Sort(env)
	sum := sha256.Sum256([]byte(r.GetLibrary() + "\x00" + strings.Join(env, "\x00")))
	return hex.EncodeToString(sum[:8])
}

func because(code, format string, args ...any) *gpuctlv1.Reason {
	return &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)}
}

func rejected(g *gpuctlv1.GPU, reasons ...*gpuctlv1.Reason) *gpuctlv1.Candidate {
	return &gpuctlv1.Candidate{Gpu: g.GetId(), Model: g.GetModel(), Reasons: reasons}
}

func ownerNames(l *ledger.Ledger, gpu, but string) []string {
	var names []string
	for other := range l.Owners(gpu) {
		if other != but {
			names = append(names, other)
		}
	}
	slices.Sort(names)
	return names
}

// judgeRoom returns the reason why the claim does not fit on the GPU beside the other
// claims, or nil if it fits.
func judgeRoom(g *gpuctlv1.GPU, c *claim, l *ledger.Ledger, room uint64, free bool) *gpuctlv1.Reason {
	owners := strings.Join(ownerNames(l, g.GetId(), c.ID), ", ")
	switch {
	case c.Min == 0 && !free:
		return because("busy", "held by claim %s; wait for it, or share the GPU with --min-memory", owners)
	case c.Min > 0 && room < c.Min:
		return because("busy", "%s needed, %s left beside claim %s", size.Format(c.Min), size.Format(room), owners)
	}
	return nil
}
