package remote

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// fetchEnds are two far executors, and what each is told of the other.
func fetchEnds(t *testing.T) (asked, fetching *Acceptor, from, to Handed) {
	t.Helper()
	a, err := NewIdentity("asked")
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewIdentity("fetching")
	if err != nil {
		t.Fatal(err)
	}
	return &Acceptor{Own: a, Parts: parts}, &Acceptor{Own: b, Parts: parts},
		Handed{Role: Fetch, Peer: b.Hash(), Name: FetchName(Token{1})}, Handed{Role: Fetch, Fetching: true, Peer: a.Hash()}
}

// joined does TLS at both ends of a connection, and sends a byte from the asked end to the
// other and back.
func joined(ctx context.Context, t *testing.T, asked, fetching *Acceptor, from, to Handed) error {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	out := make(chan error, 1)
	go func() {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			out <- err
			return
		}
		c, err := fetching.Fetch(ctx, conn, to)
		if err == nil {
			defer c.Close()
			var b [1]byte
			if _, err = io.ReadFull(c, b[:]); err == nil {
				_, err = c.Write(b[:])
			}
		}
		out <- err
	}()
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c, err := asked.Fetch(ctx, conn, from)
	if err == nil {
		defer c.Close()
		if _, err = c.Write([]byte{7}); err == nil {
			_, err = io.ReadFull(c, make([]byte, 1))
		}
	}
	other := <-out
	if (err == nil) != (other == nil) {
		t.Errorf("one end says %v, the other %v", err, other)
	}
	return errors.Join(err, other)
}

func TestFarExecutorsMeetOnlyWithBothCertificates(t *testing.T) {
	ctx := testkit.Context(t)
	asked, fetching, from, to := fetchEnds(t)
	if err := joined(ctx, t, asked, fetching, from, to); err != nil {
		t.Fatal(err)
	}
	other, err := NewIdentity("other")
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(asked, fetching *Acceptor, from, to *Handed){
		"another one fetches":                 func(_, f *Acceptor, _, _ *Handed) { f.Own = other },
		"another one is asked":                func(a, _ *Acceptor, _, _ *Handed) { a.Own = other },
		"a certificate without its key":       func(_, f *Acceptor, _, _ *Handed) { f.Own.Key = other.Key },
		"both fetch":                          func(_, _ *Acceptor, from, _ *Handed) { from.Fetching = true },
		"both are asked":                      func(_, _ *Acceptor, _, to *Handed) { to.Fetching = false },
		"a carrier's role":                    func(_, _ *Acceptor, from, to *Handed) { from.Role, to.Role = Import, Import },
		"a lease without TLS":                 func(a, f *Acceptor, _, _ *Handed) { a.Plain, f.Plain = true, true },
		"no certificate of the one that asks": func(_, _ *Acceptor, from, _ *Handed) { from.Peer = nil },
	} {
		short, cancel := context.WithCancel(ctx)
		a, f, h, g := *asked, *fetching, from, to
		change(&a, &f, &h, &g)
		if strings.HasPrefix(name, "both") { // each waits for the other to begin, or to answer
			cancel()
		}
		if err := joined(short, t, &a, &f, h, g); err == nil {
			t.Errorf("%s: they met", name)
		}
		cancel()
	}
}

func TestNamesOfHandedConnections(t *testing.T) {
	peer := bytes.Repeat([]byte{9}, 32)
	name := FetchName(Token{3})
	for text, want := range map[string]Handed{
		"carrier:import":        {Role: Import},
		HandFetched(peer, name): {Role: Fetch, Peer: peer, Name: name},
		HandFetching(peer):      {Role: Fetch, Fetching: true, Peer: peer},
	} {
		got, err := ParseHanded(text)
		if err != nil || got.Role != want.Role || got.Fetching != want.Fetching || !bytes.Equal(got.Peer, want.Peer) || got.Name != want.Name {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{
		"", "import", "carrier:", "carrier:fetch", "carrier:fetch:", "carrier:role(0)", HandFetched(peer[:31], name), HandFetched(peer, ""), HandFetched(peer, name[1:]),
		HandFetched(peer, strings.ToUpper(name[:31])+"A"), HandFetching(nil), HandFetching(peer) + ":" + name, HandFetched(peer, name+":"),
	} {
		if got, err := ParseHanded(text); !errors.Is(err, ErrPreamble) {
			t.Errorf("%q is %+v", text, got)
		}
	}
	if FetchName(Token{3}) == FetchName(Token{4}) {
		t.Error("two fetches have one name")
	}
}

// FuzzHanded reads names of connections: a name that is taken is what the functions above
// make.
func FuzzHanded(f *testing.F) {
	peer := make([]byte, 32)
	f.Add("carrier:export")
	f.Add(HandFetched(peer, FetchName(Token{})))
	f.Add(HandFetching(peer))
	f.Fuzz(func(t *testing.T, name string) {
		h, err := ParseHanded(name)
		if err != nil {
			return
		}
		again := HandedPrefix + h.Role.String()
		switch {
		case h.Fetching:
			again = HandFetching(h.Peer)
		case h.Role == Fetch:
			again = HandFetched(h.Peer, h.Name)
		}
		if !strings.EqualFold(again, name) || h.Role == Fetch && len(h.Peer) != 32 {
			t.Fatalf("%q is %+v", name, h)
		}
	})
}
