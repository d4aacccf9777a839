package session

import (
	"context"
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// remoteTarget is a remote GPU. A fetch makes contents come straight from another one.
func remoteTarget(fetch string) *gpuctlv1.Target {
	t := proto.CloneOf(testTarget)
	t.Runtime = &gpuctlv1.Runtime{Remote: &gpuctlv1.Remote{Addresses: []string{"host:1"}, Token: []byte("t"), PrivateKey: []byte("k"), Fetch: fetch}}
	return t
}

func (b *bench) swapTo(to *gpuctlv1.Target) (*gpuctlv1.SwapResult, []*gpuctlv1.Progress) {
	b.t.Helper()
	var said []*gpuctlv1.Progress
	res, err := b.m.Swap(context.Background(), &gpuctlv1.SwapRequest{Session: b.id, Target: to}, func(p *gpuctlv1.Progress) { said = append(said, p) })
	if err != nil {
		b.t.Fatal(err)
	}
	return res, said
}

func says(said []*gpuctlv1.Progress, text string) bool {
	for _, p := range said {
		if strings.Contains(p.Message, text) {
			return true
		}
	}
	return false
}

func TestContentsGoStraightBetweenRemoteGPUs(t *testing.T) {
	b := newBench(t)
	if res, said := b.swapTo(remoteTarget("")); res.Error != "" || res.BytesStraight != 0 || says(said, wayStraight) {
		t.Fatalf("%v", res)
	}
	b.runsOn(2)
	res, said := b.swapTo(remoteTarget("name"))
	if res.Error != "" || res.BytesStraight < 128 || res.Detour != "" || !says(said, wayStraight) {
		t.Fatalf("%v; %v", res, said)
	}
	b.runsOn(3)
	if f := b.session().Target.Runtime.Remote.Fetch; f != "" {
		t.Errorf("the session's target still names the fetch %q", f)
	}
	// Nothing was prepared: the way through this host.
	if res, said := b.swapTo(remoteTarget("")); res.Error != "" || res.BytesStraight != 0 || says(said, wayStraight) {
		t.Fatalf("%v", res)
	}
	b.runsOn(4)
}

func TestContentsThatCannotGoStraightGoThroughThisHost(t *testing.T) {
	b := newBench(t)
	b.swapTo(remoteTarget(""))
	b.l.setFailure("Straight", errors.New("the other one has not come"))
	res, said := b.swapTo(remoteTarget("name"))
	if res.Error != "" || res.BytesStraight != 0 || !strings.Contains(res.Detour, "the other one has not come") || !says(said, wayHome) {
		t.Fatalf("%v; %v", res, said)
	}
	b.runsOn(3)
}

// What is still on its way straight could arrive after newer contents. If the target cannot
// say that nothing comes any more, nothing is sent the other way.
func TestNoDetourWhileContentsMayStillCome(t *testing.T) {
	b := newBench(t)
	b.swapTo(remoteTarget(""))
	b.l.setFailure("Straight", errors.New("cut"))
	b.l.setFailure("EndFetch", errors.New("no answer"))
	res, _ := b.swapTo(remoteTarget("name"))
	if !res.RolledBack || !strings.Contains(res.Error, "no answer") || !strings.Contains(res.Error, "cut") {
		t.Fatalf("%v", res)
	}
	b.runsOn(2)
}

// While the application stands still there is no time for all of it once more.
func TestFetchThatBreaksAtTheEndLeavesTheSessionWhereItWas(t *testing.T) {
	b := newBench(t)
	b.swapTo(remoteTarget(""))
	b.l.setFailure("StraightFinal", errors.New("cut"))
	res, _ := b.swapTo(remoteTarget("name"))
	if !res.RolledBack || !strings.Contains(res.Error, "cut") {
		t.Fatalf("%v", res)
	}
	b.runsOn(2)
	if res, _ := b.swapTo(remoteTarget("")); res.Error != "" {
		t.Fatalf("%v", res)
	}
	b.runsOn(4)
}
