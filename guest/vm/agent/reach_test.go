package agent

import (
	"net"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// The VM says which addresses it reaches, and sends nothing there.
func TestReach(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	sent := make(chan int, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			sent <- -1
			return
		}
		defer c.Close()
		n, _ := c.Read(make([]byte, 1))
		sent <- n
	}()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone := closed.Addr().String()
	closed.Close()
	res, err := service{}.Reach(t.Context(), connect.NewRequest(&gpuctlv1.ReachRequest{Addresses: []string{l.Addr().String(), gone}}))
	if err != nil {
		t.Fatal(err)
	}
	if r := res.Msg.GetReached(); len(r) != 2 || r[0].GetError() != "" || r[0].GetRttNs() <= 0 || r[1].GetError() == "" {
		t.Errorf("%v", r)
	}
	if n := <-sent; n != 0 {
		t.Errorf("%d bytes were sent", n)
	}
	for what, addresses := range map[string][]string{"no port": {"h1"}, "a long one": {string(make([]byte, 400)) + ":1"}, "many": make([]string, 257)} {
		if _, err := (service{}).Reach(t.Context(), connect.NewRequest(&gpuctlv1.ReachRequest{Addresses: addresses})); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: %v", what, err)
		}
	}
}
