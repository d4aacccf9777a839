package pki

import (
	"context"
	"net"
	"testing"
	"time"
)

// size is how many connections the pool holds.
func (p *pool) size() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

func TestWhoHasManyMakesRoom(t *testing.T) {
	p := newPool(4, time.Hour)
	conn := func(from string) *tracked {
		near, far := net.Pipe()
		t.Cleanup(func() { near.Close(); far.Close() })
		return &tracked{Conn: near, from: from, since: time.Now()}
	}
	first, b := conn("a"), conn("b")
	for _, c := range []*tracked{b, first, conn("a"), conn("c")} {
		if p.add(t.Context(), c) != nil {
			t.Fatal("evicted while there is room")
		}
	}
	if got := p.add(t.Context(), conn("d")); got != first || !first.closed {
		t.Errorf("evicted %+v", got)
	}
	// Everybody has one, and nobody had its time: who comes waits.
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if late := conn("e"); p.add(ctx, late) != late || p.size() != 4 {
		t.Error("one that had no room was let in")
	}
	time.AfterFunc(20*time.Millisecond, func() { p.remove(b) })
	if got := p.add(t.Context(), conn("e")); got != nil {
		t.Errorf("evicted %+v", got)
	}
}
