package session

import (
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// A GPU that is not offered any more may be somebody else's as soon as its caller knows. So no
// session begins there later, however long its executor has been loading.
func TestNoSessionBeginsByAnOfferThatWasReplaced(t *testing.T) {
	b := newBench(t)
	other := proto.CloneOf(testTarget)
	other.Gpu = "other"
	var once sync.Once
	during := func(do func() error) {
		once = sync.Once{}
		b.l.mu.Lock()
		defer b.l.mu.Unlock()
		b.l.loads = func() {
			once.Do(func() {
				if err := do(); err != nil {
					t.Error(err)
				}
			})
		}
	}
	during(func() error {
		return b.m.offer(&gpuctlv1.OfferRequest{Token: "tok", Claim: "claim-1", Target: other})
	})
	status, id := b.connect("tok")
	if status != 0 {
		t.Fatal(status, id)
	}
	sessions := b.m.List(t.Context())
	i := slices.IndexFunc(sessions, func(s *gpuctlv1.Session) bool { return s.Id == id })
	if i < 0 || sessions[i].Target.GetGpu() != "other" {
		t.Errorf("%s of %v", id, sessions)
	}
	during(func() error { return b.m.withdraw("tok") })
	if status, text := b.connect("tok"); status == 0 || !strings.Contains(text, "unknown token") {
		t.Error(status, text)
	}
	if n := len(b.m.list()); n != 2 {
		t.Errorf("%d sessions", n)
	}
	testkit.Until(t, "the other executors have ended", func() error {
		b.l.mu.Lock()
		defer b.l.mu.Unlock()
		return testkit.Want(len(b.l.live) == 2, len(b.l.live))
	})
}
