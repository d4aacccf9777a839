package network

import (
	"net/netip"
	"testing"
	"time"
)

func TestFlow(t *testing.T) {
	p := newPair(t)
	ctx := t.Context()
	to := netip.MustParseAddr("10.9.0.2")
	p.listen("10.9.0.2:49215") // the last port that libvirt takes
	p.listen("10.9.0.2:49216")
	const rate = 80 * mbit
	first, err := p.host.Follow(ctx, to, rate)
	if err != nil {
		t.Fatal(err)
	}
	second, err := p.host.Follow(ctx, to, rate)
	if err != nil {
		t.Fatal(err)
	}
	all, err := p.host.Follow(ctx, to, 0)
	if err != nil {
		t.Fatal(err)
	}
	if caps, err := p.host.Limits(ctx); err != nil || len(caps) != 1 {
		t.Errorf("two flows to a host have the limits %v (%v)", caps, err)
	}
	if got := p.send("10.9.0.2:49215", time.Second); got > 1.15*rate {
		t.Errorf("capped at %d Mbit/s: %.1f", rate/mbit, got/mbit)
	}
	one, err := first.Sent(ctx)
	if err != nil || one < 1<<20 {
		t.Errorf("%d bytes are counted (%v)", one, err)
	}
	var got float64
	for range 3 { // a machine with much else to do can be too slow
		if got = p.send("10.9.0.2:49216", 300*time.Millisecond); got > 2*rate {
			break
		}
	}
	if got < 2*rate {
		t.Errorf("what is no VM has %.1f Mbit/s", got/mbit)
	}
	if n, err := all.Sent(ctx); err != nil || n < one+1<<20 {
		t.Errorf("the interface has sent %d bytes, of which %d were capped (%v)", n, one, err)
	}
	if err := first.End(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := second.Sent(ctx); err != nil {
		t.Errorf("the end of one flow ends another: %v", err)
	}
	for range 2 {
		if err := second.End(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := all.End(ctx); err != nil {
		t.Fatal(err)
	}
	p.untouched()
	if _, err := p.host.Follow(ctx, netip.MustParseAddr("192.0.2.1"), rate); err == nil {
		t.Error("a host to which there is no way is followed")
	}
}
