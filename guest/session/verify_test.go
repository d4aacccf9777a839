package session

import (
	"strings"
	"testing"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

func verified(c *Config) { c.Verify = true }

// differs fails the test unless an operation was taken back in a step because contents differ.
func differs(t *testing.T, res *gpuctlv1.SwapResult, step string) {
	t.Helper()
	if !res.RolledBack || !strings.Contains(res.Error, step+": memory object 7 of") {
		t.Fatalf("%v", res)
	}
}

// A target that has not got everything does not get the session, which goes on where it was.
func TestVerifiedSessionGoesToNoTargetThatHasOtherContents(t *testing.T) {
	b := newBench(t, verified)
	b.l.loses = 2
	res, _ := b.swapTo(testTarget)
	differs(t, res, "transfer")
	b.runsOn(1)
	if res, _ := b.swapTo(testTarget); res.Error != "" {
		t.Fatalf("%v", res)
	}
	b.runsOn(3)

	if res := b.suspend("", ""); res.Error != "" {
		t.Fatalf("%v", res)
	}
	b.l.loses = 4
	differs(t, b.resume(""), "load")
	if res := b.resume(""); res.Error != "" {
		t.Fatalf("%v", res)
	}
	b.runsOn(5)
}

// What was away is compared with what the session had when it left.
func TestStateThatComesBackIsVerified(t *testing.T) {
	h := newAwayHost(t, verified)
	if res, _ := h.swapTo(testTarget); res.Error != "" {
		t.Fatalf("%v", res)
	}
	if res := h.suspend("a1", ""); res.Error != "" {
		t.Fatalf("%v", res)
	}
	h.l.loses = 3
	differs(t, h.resume(""), "load")
	if res := h.resume(""); res.Error != "" {
		t.Fatalf("%v", res)
	}
	h.runsOn(4)
}

// Who asks for no comparison gets none.
func TestSessionIsVerifiedOnlyIfThatIsAsked(t *testing.T) {
	b := newBench(t)
	b.l.loses = 2
	if res, _ := b.swapTo(testTarget); res.Error != "" {
		t.Fatalf("%v", res)
	}
	b.runsOn(2)
}

func TestDigestsThatDiffer(t *testing.T) {
	digest := func(os ...*gpuctlv1.ObjectDigest) *gpuctlv1.DigestResponse {
		return &gpuctlv1.DigestResponse{Objects: os}
	}
	object := func(id uint32, bytes uint64, sums ...uint32) *gpuctlv1.ObjectDigest {
		return &gpuctlv1.ObjectDigest{Id: id, Bytes: bytes, Sums: sums}
	}
	want := digest(object(1, 8, 5), object(2, 40<<20, 1, 2, 3))
	for text, got := range map[string]*gpuctlv1.DigestResponse{
		"":                                       digest(object(2, 40<<20, 1, 2, 3), object(1, 8, 5)),
		"1 memory objects, and the source 2":     digest(object(1, 8, 5)),
		"object 2 has 0 bytes on the target":     digest(object(1, 8, 5), object(3, 40<<20, 1, 2, 3)),
		"object 1 has 9 bytes on the target":     digest(object(1, 9, 5), object(2, 40<<20, 1, 2, 3)),
		"of its 3 parts of 16 MiB: [0 2]":        digest(object(1, 8, 5), object(2, 40<<20, 9, 2, 9)),
		"object 2 has 41943040 bytes on the tar": digest(object(1, 8, 5), object(2, 40<<20, 1, 2)),
	} {
		err := differ(want, got)
		if text == "" && err != nil || text != "" && (err == nil || !strings.Contains(err.Error(), text)) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
