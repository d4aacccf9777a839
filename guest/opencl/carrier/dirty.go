package carrier

import (
	"hash/maphash"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/internal/wide"
)

// What an application has changed in a mapped region is found by comparing sums of its pages
// with those of what the far executor has shown there. A sum costs less than a copy would,
// and 8 bytes of memory for a page. The sums have a secret seed: nobody can aim at a page
// that changes unseen, and by chance one in 2⁶⁴ does.

const (
	sumPage   = 4 << 10
	leastSums = 2 * sumPage // a smaller region is sent as a whole
	mostShown = 1 << 16     // regions, and such as are to be shown
	mostSums  = 8 << 20
)

// shown is what the far executor has shown of a region that is mapped.
type shown struct {
	block  remote.Block
	got    uint64 // bytes that were shown
	at     uint64 // arena offset of what comes next
	exact  bool   // sums are those of all that was shown, or unknown
	gone   bool   // it is unmapped
	writes bool   // it is mapped for writing
	sums   []uint64
}

// hidden reports whether the application has not seen the region yet.
func (s *shown) hidden() bool { return s.got < s.block.Size() }

// await records that a region will be shown, if its content is wanted. The caller holds c.mu.
func (c *carrier) await(m remote.Mapping) {
	k := mapKey{m.Mem, m.ID}
	c.forget(k)
	if !m.Comes || len(c.shown) >= mostShown || c.awaited >= mostShown {
		return
	}
	s := &shown{block: m.Block, writes: m.Writes}
	s.begin()
	c.shown[k] = s
	if !c.named {
		c.awaited++
		c.awaits[s.at] = append(c.awaits[s.at], s)
	}
}

// begin is called when nothing of the region was shown yet.
func (s *shown) begin() {
	s.got, s.at, s.sums = 0, s.block.At, nil
	s.exact = s.writes && s.block.Tight() && s.block.Size() >= leastSums
}

// showsNext records which mapping the next blocks show. Without that, what a read brings to a
// mapped region looks like the content of a mapping that begins at the same place, and is still to
// be shown. The caller holds c.mu.
func (c *carrier) showsNext(k mapKey) {
	c.named, c.awaited = true, 0
	clear(c.awaits)
	if c.current = c.shown[k]; c.current != nil {
		c.sums -= len(c.current.sums)
		c.current.begin()
	}
}

// unknown is the sum of a page of which nobody knows what the far executor has there.
const unknown = 0

// differs records that the far executor has got other bytes of a mapped region than it has shown,
// or has shown others by a read: a page may be what it was when it was shown, and yet be another
// one there. The caller holds c.mu.
func (c *carrier) differs(x span, but *shown) {
	for _, s := range c.shown {
		at := s.block.At
		if s == but || len(s.sums) == 0 || !x.meets(span{at, s.block.Size()}) {
			continue
		}
		end := min(x.off+x.size-at, s.block.Size())
		for i := (max(x.off, at) - at) / sumPage; i*sumPage < end && i < uint64(len(s.sums)); i++ {
			s.sums[i] = unknown
		}
	}
}

// isHidden reports whether the application has not been shown a range yet, so that what the far
// executor has there is newer: it is in mapped regions that are still to be shown, and in no
// other. The caller holds c.mu.
func (c *carrier) isHidden(x span) (hidden bool) {
	for k, m := range c.mappings {
		if !x.meets(around(&m.Block)) {
			continue
		}
		if s := c.shown[k]; s == nil || !s.hidden() {
			return false
		}
		hidden = true
	}
	return hidden
}

// forget ends the comparison of a region, and returns what was shown of it. The caller holds
// c.mu.
func (c *carrier) forget(k mapKey) *shown {
	s := c.shown[k]
	if s != nil {
		delete(c.shown, k)
		c.sums -= len(s.sums)
		s.gone = true
	}
	return s
}

// shows takes a block that the far executor has sent, whose bytes are in the arena. Only the
// reader of the stream of commands calls it.
func (c *carrier) shows(x *remote.Block, body []byte) {
	if x.End() > c.split {
		return
	}
	c.mu.Lock()
	s := c.current
	if s == nil || x.At < s.at || x.End() > s.block.End() || s.block.Tight() && x.At != s.at {
		s = nil
		if q := c.awaits[x.At]; len(q) > 0 { // the oldest is shown first
			s = q[0]
			c.awaited--
			if len(q) > 1 {
				c.awaits[x.At] = q[1:]
			} else {
				delete(c.awaits, x.At)
			}
		}
	}
	c.current = s
	if s == nil || !c.named {
		c.differs(around(x), s)
	}
	exact := s != nil && s.exact && !s.gone
	c.mu.Unlock()
	var sums []uint64
	if exact {
		sums = c.sumsOf(body)
	}
	if s == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if x.End() > s.block.End() {
		c.current = nil
		return
	}
	if x.Size()%sumPage != 0 && x.End() != s.block.End() || c.sums+len(sums) > mostSums {
		s.exact = false // all will be sent
	}
	if s.exact && !s.gone {
		s.sums = append(s.sums, sums...)
		c.sums += len(sums)
	}
	s.got += x.Size()
	if s.at = x.End(); !s.hidden() {
		c.current = nil
	}
}

// sumsOf returns the sums of all pages.
func (c *carrier) sumsOf(b []byte) []uint64 {
	sums := make([]uint64, (len(b)+sumPage-1)/sumPage)
	wide.Do(len(b), 32*sumPage, func(off, end int) {
		for ; off < end; off += sumPage {
			sums[off/sumPage] = maphash.Bytes(c.seed, b[off:min(off+sumPage, end)])
		}
	})
	return sums
}

// sendWritten sends what the application has written into a region, before the request that
// unmaps it. s is nil if the region was not shown here before it could be written.
func (c *carrier) sendWritten(x remote.Block, s *shown) error {
	switch {
	case s == nil || s.block != x:
		return c.sendBlock(x)
	case s.hidden():
		// It has not seen the region, and so has not written it: what is here is older than
		// what the far executor has.
		return nil
	case !s.exact:
		return c.sendBlock(x)
	}
	if err := x.Check(c.arena.Size()); err != nil {
		return err
	}
	b := x.Bytes(c.arena.Bytes())
	now := c.sumsOf(b)
	from := uint64(len(b)) // of the changed pages that are not sent
	for i := range uint64(len(s.sums)) {
		lo := i * sumPage
		hi := min(lo+sumPage, uint64(len(b)))
		same := now[i] == s.sums[i]
		if !same {
			from = min(from, lo)
		}
		if from < hi && (same || hi == uint64(len(b))) {
			to := hi
			if same {
				to = lo
			}
			if err := c.sendBlock(remote.Range(x.At+from, to-from)); err != nil {
				return err
			}
			from = uint64(len(b))
		}
	}
	return nil
}
