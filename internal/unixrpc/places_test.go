package unixrpc

import "testing"

func TestPlacesThatWereGivenBackLeaveNothing(t *testing.T) {
	p := Places{Self: 7, Each: 4, All: 16}
	for range 3 {
		if err := p.Take(1000, 1000); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		p.Give(1000)
	}
	if len(p.by) != 0 || p.total != 0 {
		t.Errorf("%v, %d of all", p.by, p.total)
	}
}
