package sessions

import (
	"errors"
	"strings"
	"testing"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

func TestOwnersAndWeightsAreNotFreeToChoose(t *testing.T) {
	user := askedBy{uid: 12345, local: true}
	root := askedBy{uid: 0, local: true, trusted: true}
	for name, c := range map[string]struct {
		by     askedBy
		owner  string
		weight uint32
		most   uint32
		err    error
		want   string
		weighs uint32
	}{
		"a user is the owner":                        {by: user, most: 100, want: "user:12345", weighs: 100},
		"a user takes less":                          {by: user, weight: 10, most: 100, want: "user:12345", weighs: 10},
		"a user takes more":                          {by: user, weight: 101, most: 100, err: errDenied},
		"a user takes more where that is allowed":    {by: user, weight: 300, most: 300, want: "user:12345", weighs: 300},
		"users have less":                            {by: user, most: 50, want: "user:12345", weighs: 50},
		"a user is somebody else":                    {by: user, owner: "vm:1", most: 100, err: errDenied},
		"a user of another host is nobody":           {by: askedBy{}, most: 100, want: "claim:c-1", weighs: 100},
		"a user of another host is somebody":         {by: askedBy{}, owner: "vm:1", most: 100, err: errDenied},
		"root acts for a VM":                         {by: root, owner: "vm:1", weight: 1024, most: 100, want: "vm:1", weighs: 1024},
		"root takes more than there is":              {by: root, weight: 1025, most: 100, err: errInvalid},
		"root names an owner that breaks a table":    {by: root, owner: "a\nb", most: 100, err: errInvalid},
		"root names an owner whose name has no end":  {by: root, owner: strings.Repeat("x", maxOwner+1), most: 100, err: errInvalid},
		"root names an owner with bytes of no text":  {by: root, owner: "\xff\x00", most: 100, err: errInvalid},
		"root gives no weight where users have less": {by: root, most: 50, want: "user:root", weighs: 50},
	} {
		got := &claim{ID: "c-1"}
		err := c.by.chooses(got, &gpuctlv1.CreateClaimRequest{Owner: c.owner, Weight: c.weight}, c.most)
		if !errors.Is(err, c.err) || c.err == nil && (err != nil || got.Owner != c.want || got.Weight != c.weighs) {
			t.Errorf("%s: %q of %d, %v", name, got.Owner, got.Weight, err)
		}
	}
}

func TestSharesOfSessionsAddUp(t *testing.T) {
	var sum *gpuctlv1.Share
	for _, s := range []*gpuctlv1.Share{
		nil, {Shared: true, Turns: 2, BusyNs: 10, WaitedNs: 5}, {Waiting: true, Turns: 3, BusyNs: 1, Lapses: 1, OverrunNs: 4, Keeps: "k", KeepsNs: 1},
	} {
		sum = addShare(sum, s)
	}
	if sum.GetTurns() != 5 || sum.GetBusyNs() != 11 || sum.GetWaitedNs() != 5 || sum.GetLapses() != 1 || sum.GetOverrunNs() != 4 ||
		!sum.GetShared() || !sum.GetWaiting() || sum.GetKeeps() != "k" {
		t.Errorf("%v", sum)
	}
	if addShare(nil, nil) != nil {
		t.Error("a share of nobody")
	}
}
