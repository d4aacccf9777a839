package executor

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

// unread fails the test if it is read.
type unread struct{ t *testing.T }

func (u unread) Read([]byte) (int, error) {
	u.t.Error("content of a state that is refused is read")
	return 0, io.ErrUnexpectedEOF
}

// A carrier brings a state that is no larger than the session can have, and than this host has
// room for.
func TestStateOfAHostileCarrierIsBounded(t *testing.T) {
	x := &farState{}
	if err := x.receive(unread{t}, 2<<30+1, 2<<30, "the session has 1 GiB"); !errors.Is(err, errHostile) || !strings.Contains(err.Error(), "and the session has 1 GiB: 2 GiB at most") {
		t.Errorf("more than the session can have: %v", err)
	}
	if err := x.receive(unread{t}, 1<<41, 1<<42, "the session has much"); err == nil || !strings.Contains(err.Error(), "a state of 2 TiB comes from the carrier, and this host has") {
		t.Errorf("more than this host has: %v", err)
	}
	if x.f != nil {
		t.Error("a file was made for what was refused")
	}
	content := bytes.Repeat([]byte("x"), 1<<20)
	if err := x.receive(bytes.NewReader(content), 1<<20, 1<<20, ""); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(io.NewSectionReader(x.f, 0, 1<<20))
	if err != nil || !bytes.Equal(got, content) {
		t.Errorf("another state came: %v", err)
	}
	x.f.Close()
}
