package state

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

const testCapacity = 100

// rig applies commands one after the other and checks the state each time.
type rig struct {
	testing.TB
	*Store
	at uint64
}

func newRig(t testing.TB) *rig { return &rig{t, New(), 0} }

func (r *rig) do(op any) *clusterv1.Result {
	r.Helper()
	return r.send(command(r, op))
}

func (r *rig) send(c *clusterv1.Command) *clusterv1.Result {
	r.Helper()
	r.at++
	before := r.View()
	res := r.Apply(r.at, c)
	if err := r.View().Check(); err != nil {
		r.Fatalf("after %v: %v", c, err)
	}
	if o := res.GetOutcome(); o == invalid || o == notFound && len(r.View().Events(0, "", 0)) == len(before.Events(0, "", 0)) || o == exists || o == refused {
		for _, kind := range persistOrder() {
			select {
			case <-before.Changed(kind):
				r.Fatalf("%v: %s, but %s changed", c, o, kind)
			default:
			}
		}
	}
	return res
}

func (r *rig) want(o clusterv1.Outcome, words string, op any) *clusterv1.Result {
	r.Helper()
	res := r.do(op)
	if res.GetOutcome() != o || !strings.Contains(res.GetMessage(), words) {
		r.Fatalf("%T: %s %q, want %s %q", op, res.GetOutcome(), res.GetMessage(), o, words)
	}
	return res
}

// command wraps an operation, found among the fields of Command by its type.
func command(t testing.TB, op any) *clusterv1.Command {
	c := &clusterv1.Command{Version: 1, Actor: "ann", UnixMs: 1000}
	m := op.(proto.Message).ProtoReflect()
	fields := c.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if fd.Message() != nil && fd.Message().FullName() == m.Descriptor().FullName() {
			c.ProtoReflect().Set(fd, c.ProtoReflect().NewField(fd))
			proto.Merge(c.ProtoReflect().Get(fd).Message().Interface(), op.(proto.Message))
			return c
		}
	}
	t.Fatalf("%T is no operation", op)
	return nil
}

// testHost reports a host with GPUs g0, g1, … of 100 bytes.
func testHost(name string, gpus int) *clusterv1.ReportHost {
	op := &clusterv1.ReportHost{Host: &clusterv1.Host{Name: name, Id: "id-" + name, Address: name + ":7070", Protocol: 1}}
	for n := range gpus {
		op.Gpus = append(op.Gpus, &clusterv1.GPU{
			Name: fmt.Sprintf("g%d", n), Model: "M", Vendor: "V", Rank: 3, Health: clusterv1.Health_HEALTH_OK,
			Limits:   &gpuctlv1.Limits{GlobalMemory: testCapacity, Extensions: []string{"x"}},
			Profiles: []*clusterv1.Profile{{Name: "p", Memory: 20, MaxInstances: 2}},
		})
	}
	return op
}

func whole(gpu string) *clusterv1.Choice { return &clusterv1.Choice{Gpu: gpu} }

func share(gpu string, memory uint64) *clusterv1.Choice {
	return &clusterv1.Choice{Gpu: gpu, Memory: memory}
}

func slice(gpu string) *clusterv1.Choice {
	return &clusterv1.Choice{Gpu: gpu, Kind: clusterv1.VGPUKind_VGPU_KIND_VF, Profile: "p"}
}

func put(id string, choices ...*clusterv1.Choice) *clusterv1.PutClaim {
	return &clusterv1.PutClaim{Claim: &clusterv1.Claim{Id: id, Count: uint32(len(choices))}, Choices: choices}
}

func (r *rig) confirm(host string, gone bool, as ...*clusterv1.Assignment) *clusterv1.ConfirmAssignments {
	op := &clusterv1.ConfirmAssignments{Host: host}
	for _, a := range as {
		op.Confirmations = append(op.Confirmations, &clusterv1.Confirmation{Assignment: a.GetId(), Token: a.GetToken(), Gone: gone})
	}
	return op
}

func codes(r *clusterv1.Result) string {
	var out []string
	for _, x := range r.GetReasons() {
		out = append(out, x.GetCode())
	}
	return strings.Join(out, " ")
}
