package virt

import (
	"testing"
	"time"
)

func TestSilence(t *testing.T) {
	type look struct {
		at         time.Duration
		sent, left uint64
		unseen     bool
	}
	for name, c := range map[string]struct {
		looks   []look
		over    bool // by the last look
		longest time.Duration
	}{
		"nothing was ever sent":             {[]look{{at: 9}, {at: 11}}, true, 0},
		"the first byte took long":          {[]look{{at: 9}, {at: 10, sent: 1, left: 9}, {at: 20, sent: 1, left: 9}}, false, 10},
		"nothing more is sent":              {[]look{{at: 1, sent: 1, left: 9}, {at: 12, sent: 1, left: 9}}, true, 1},
		"it is slow":                        {[]look{{at: 8, sent: 1, left: 9}, {at: 16, sent: 2, left: 8}, {at: 25, sent: 3, left: 7}}, false, 9},
		"all is sent, and it is taken over": {[]look{{at: 1, sent: 9}, {at: 30, sent: 9}, {at: 60, sent: 9}}, false, 1},
		"memory is sent again":              {[]look{{at: 1, sent: 9}, {at: 30, sent: 9}, {at: 41, sent: 9, left: 4}}, true, 1},
		"nobody saw it":                     {[]look{{at: 9}, {at: 60, unseen: true}, {at: 65}}, false, 0},
	} {
		start := time.Now()
		s := silence{limit: 10, since: start}
		over := false
		for _, l := range c.looks {
			if over {
				t.Errorf("%s: over before %v", name, l)
			}
			if l.unseen {
				s.unseen(start.Add(l.at))
				continue
			}
			over = s.look(Job{Processed: l.sent, Left: l.left}, start.Add(l.at))
		}
		if over != c.over || s.longest != c.longest {
			t.Errorf("%s: over %v, longest %d", name, over, s.longest)
		}
	}
}
