package pki

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// port is a Mux on loopback whose HTTP side says who called, and whose raft
// side echoes.
type port struct {
	*Mux

	address string
	removed sync.Map
	trust   Trust
}

func open(t *testing.T, ca *CA, id string, change func(*MuxConfig)) *port {
	t.Helper()
	p := &port{}
	p.trust = Trust{Provider: issue(ca, HostIdentity(id, "name-of-"+id, "127.0.0.1:1", "")), Revoked: func(who Peer) bool { _, ok := p.removed.Load(who.ID); return ok }}
	config := MuxConfig{Listener: must(net.Listen("tcp", "127.0.0.1:0")), Trust: p.trust, Log: quietLog(), Recheck: 20 * time.Millisecond}
	if change != nil {
		change(&config)
	}
	p.Mux, p.address = NewMux(config), config.Listener.Addr().String()
	server := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		peer, err := p.trust.Verify(r.TLS.PeerCertificates)
		fmt.Fprintf(w, "%s %s %v", r.Proto, peer, err)
	})}
	var wait sync.WaitGroup
	wait.Go(func() { server.Serve(p.HTTP()) })
	wait.Go(func() {
		for {
			c, err := p.Raft().Accept()
			if err != nil {
				return
			}
			wait.Go(func() { defer c.Close(); io.Copy(c, c) })
		}
	})
	t.Cleanup(func() { server.Close(); p.Close(); wait.Wait() })
	return p
}

func get(config *tls.Config, address string, protocols ...string) (string, error) {
	config.NextProtos = protocols
	tr := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: len(protocols) > 0 && protocols[0] == "h2"}
	defer tr.CloseIdleConnections()
	res, err := (&http.Client{Transport: tr, Timeout: 5 * time.Second}).Get("https://" + address + "/")
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return string(body), err
}

func TestOnePortServesHTTPAndRaft(t *testing.T) {
	ca := newCAFor("c1")
	a, b := open(t, ca, "h-a", nil), open(t, ca, "h-b", nil)
	user := Trust{Provider: issue(ca, Identity{ID: "ann", Role: admin})}
	for _, c := range []struct {
		config    *tls.Config
		protocols []string
		want      string
	}{
		{user.ClientConfig("h-a"), []string{"h2"}, "HTTP/2.0 user ann <nil>"},
		{user.ClientConfig("name-of-h-a"), []string{"http/1.1"}, "HTTP/1.1 user ann <nil>"},
		{user.ClientConfig(""), nil, "HTTP/1.1 user ann <nil>"},
		{b.trust.ClientConfig("h-a"), []string{"h2"}, "HTTP/2.0 host h-b <nil>"},
		{PinnedClientConfig(Fingerprint(ca.Certificate()), nil), []string{"h2"}, "HTTP/2.0 nobody  no certificate"},
	} {
		if got, err := get(c.config, a.address, c.protocols...); err != nil || got != c.want {
			t.Errorf("got %q %v, want %q", got, err, c.want)
		}
	}
	conn, err := b.Raft().Dial(a.address, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "hello")
	buf := make([]byte, 5)
	if _, err := io.ReadFull(conn, buf); err != nil || string(buf) != "hello" {
		t.Errorf("%q %v", buf, err)
	}
}

func TestClientsRefuseServers(t *testing.T) {
	ca, other, twin := newCAFor("c1"), newCAFor("c2"), newCAFor("c1")
	a := open(t, ca, "h-a", nil)
	// A user's certificate, at a server's place.
	user := issue(ca, Identity{ID: "ann", Role: admin})
	l := must(tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{*user.Certificate}}))
	impostor := &http.Server{ReadHeaderTimeout: time.Second}
	done := make(chan struct{})
	go func() { defer close(done); impostor.Serve(l) }()
	t.Cleanup(func() { impostor.Close(); <-done })

	mine, theirs := Trust{Provider: user}, Trust{Provider: issue(other, Identity{ID: "bob", Role: admin})}
	later := func() time.Time { return time.Now().Add(Lifetime + time.Hour) }
	for name, c := range map[string]struct {
		config  *tls.Config
		address string
		want    error
	}{
		"another host":        {mine.ClientConfig("h-b"), a.address, ErrWrongHost},
		"another cluster":     {theirs.ClientConfig(""), a.address, ErrWrongCluster},
		"not a host":          {mine.ClientConfig(""), l.Addr().String(), ErrNotHost},
		"pinned: other":       {PinnedClientConfig(Fingerprint(other.Certificate()), nil), a.address, ErrUntrusted},
		"pinned: same name":   {PinnedClientConfig(Fingerprint(twin.Certificate()), nil), a.address, ErrUntrusted},
		"pinned: not a host":  {PinnedClientConfig(Fingerprint(ca.Certificate()), nil), l.Addr().String(), ErrNotHost},
		"pinned: expired":     {PinnedClientConfig(Fingerprint(ca.Certificate()), later), a.address, ErrExpired},
		"pinned: the real CA": {PinnedClientConfig(Fingerprint(ca.Certificate()), nil), a.address, nil},
	} {
		if _, err := get(c.config, c.address); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	// A chain with the right authority in it that has not signed the leaf.
	forged := []*x509.Certificate{issue(other, HostIdentity("h-a", "", "", "")).Certificate.Leaf, ca.Certificate()}
	if _, err := VerifyPinned(forged, Fingerprint(ca.Certificate()), time.Now()); !errors.Is(err, ErrWrongCluster) {
		t.Errorf("forged chain: %v", err)
	}
}

func TestRaftIsForHostsOfThisCluster(t *testing.T) {
	ca, other, twin := newCAFor("c1"), newCAFor("c2"), newCAFor("c1")
	a := open(t, ca, "h-a", nil)
	a.removed.Store("h-gone", true)
	old := HostIdentity("h-old", "", "", "")
	old.Lifetime = time.Minute
	roots := x509.NewCertPool()
	roots.AddCert(ca.Certificate())
	try := func(m *Material) error {
		config := &tls.Config{RootCAs: roots, ServerName: "h-a", NextProtos: []string{ProtoRaft}}
		if m != nil {
			config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return m.Certificate, nil }
		}
		raw, err := net.Dial("tcp", a.address)
		if err != nil {
			return err
		}
		c := tls.Client(raw, config)
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		return greet(ctx, c)
	}
	if err := try(issue(ca, HostIdentity("h-b", "", "", ""))); err != nil {
		t.Errorf("a host: %v", err)
	}
	for name, m := range map[string]*Material{
		"nobody":           nil,
		"a user":           issue(ca, Identity{ID: "ann", Role: admin}),
		"another cluster":  issue(other, HostIdentity("h-b", "", "", "")),
		"another CA":       issue(twin, HostIdentity("h-b", "", "", "")),
		"expired":          issueAt(ca, old, time.Now().Add(-time.Hour)),
		"a host that left": issue(ca, HostIdentity("h-gone", "", "", "")),
	} {
		if err := try(m); err == nil || !strings.Contains(err.Error(), "does not accept this host's certificate") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDialKnowsWhomItWants(t *testing.T) {
	ca := newCAFor("c1")
	a := open(t, ca, "h-a", nil)
	b := open(t, ca, "h-b", func(c *MuxConfig) { c.Expect = func(string) string { return "h-c" } })
	if _, err := b.Raft().Dial(a.address, time.Second); !errors.Is(err, ErrWrongHost) {
		t.Error(err)
	}
	// Somebody listens and says nothing.
	mute := must(net.Listen("tcp", "127.0.0.1:0"))
	defer mute.Close()
	began := time.Now()
	if _, err := a.Raft().Dial(mute.Addr().String(), 100*time.Millisecond); err == nil || time.Since(began) > 2*time.Second {
		t.Errorf("%v after %s", err, time.Since(began))
	}
	a.Close()
	if _, err := a.Raft().Dial(b.address, time.Second); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

func TestRemovalCutsRaftConnections(t *testing.T) {
	ca := newCAFor("c1")
	a, b := open(t, ca, "h-a", nil), open(t, ca, "h-b", nil)
	conn, err := b.Raft().Dial(a.address, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "x")
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	a.removed.Store("h-b", true)
	conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	var timeout net.Error
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.As(err, &timeout) && timeout.Timeout() {
		t.Errorf("still open: %v", err)
	}
	if _, err := b.Raft().Dial(a.address, time.Second); err == nil {
		t.Error("it comes back")
	}
}

// What an address without a certificate sends is read at a pace: each read costs
// the host a processor for some time. Who has a certificate is not held up by
// those of its address.
func TestStrangersThatSendWithoutEndAreReadAtAPace(t *testing.T) {
	ca := newCAFor("c1")
	const rate = 50
	a := open(t, ca, "h-a", func(c *MuxConfig) { c.ReadsPerAddress = rate })
	send := func(config *tls.Config, kib int) (took time.Duration) {
		config.NextProtos = []string{ProtoHTTP1}
		tr := &http.Transport{TLSClientConfig: config}
		defer tr.CloseIdleConnections()
		began := time.Now()
		res, err := (&http.Client{Transport: tr}).Post("https://"+a.address+"/", "text/plain", strings.NewReader(strings.Repeat("x", kib<<10)))
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		return time.Since(began)
	}
	const atOnce = 4 * rate
	if took := send(&tls.Config{InsecureSkipVerify: true}, atOnce+rate); took < time.Second {
		t.Errorf("%d KiB of a stranger are read in %v", atOnce+rate, took)
	}
	const much = 16 << 10
	user := Trust{Provider: issue(ca, Identity{ID: "ann", Role: admin})}
	if took := send(user.ClientConfig("h-a"), much); took > much/rate*time.Second/4 {
		t.Errorf("%d KiB of a user are read in %v", much, took)
	}
}

// Clients that never finish a handshake, many more than there may be, do not
// keep others out, and are gone after the deadline.
func TestSlowClientsDoNotHoldThePort(t *testing.T) {
	ca := newCAFor("c1")
	const deadline = 400 * time.Millisecond
	a := open(t, ca, "h-a", func(c *MuxConfig) { c.MaxHandshakes, c.HandshakeTimeout = 8, deadline })
	user := Trust{Provider: issue(ca, Identity{ID: "ann", Role: admin})}
	var slow []net.Conn
	for range 50 {
		c := must(net.Dial("tcp", a.address))
		defer c.Close()
		c.Write([]byte{22, 3, 1, 2, 0, 1}) // a ClientHello begins
		slow = append(slow, c)
	}
	began := time.Now()
	for range 10 {
		if _, err := get(user.ClientConfig("h-a"), a.address, "h2"); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("10 requests among 50 slow clients: %s", time.Since(began))
	if n := a.handshakes.size(); n > 8 {
		t.Errorf("%d handshakes at a time", n)
	}
	for _, c := range slow {
		c.SetReadDeadline(time.Now().Add(10 * deadline))
		var timeout net.Error
		if _, err := io.Copy(io.Discard, c); errors.As(err, &timeout) && timeout.Timeout() {
			t.Fatal("a slow client is still there")
		}
	}
	if time.Since(began) > 8*deadline {
		t.Errorf("after %s", time.Since(began))
	}
}

// Many honest clients at once wait for each other; slow ones of as many
// addresses hold the port no longer than their grace.
func TestABurstFromManyAddresses(t *testing.T) {
	ca := newCAFor("c1")
	a := open(t, ca, "h-a", func(c *MuxConfig) { c.MaxHandshakes, c.HandshakeTimeout = 4, 10*time.Second })
	user := issue(ca, Identity{ID: "ann", Role: admin})
	from := func(n int) *net.Dialer {
		return &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(n))}, Timeout: 30 * time.Second}
	}
	burst := func(n int) {
		t.Helper()
		var wait sync.WaitGroup
		for i := range n {
			wait.Go(func() {
				c, err := tls.DialWithDialer(from(i), "tcp", a.address, Trust{Provider: user}.ClientConfig("h-a"))
				if err != nil {
					t.Errorf("client %d: %v", i, err)
					return
				}
				defer c.Close()
				fmt.Fprint(c, "GET / HTTP/1.0\r\n\r\n")
				if body, err := io.ReadAll(c); !strings.Contains(string(body), "user ann") {
					t.Errorf("client %d: %q %v", i, body, err)
				}
			})
		}
		wait.Wait()
	}
	burst(60)
	for i := range 8 {
		c := must(from(100+i).Dial("tcp", a.address))
		defer c.Close()
	}
	began := time.Now()
	burst(3)
	if d := time.Since(began); d > 8*time.Second { // grace is 1 s; a deadline would be 10 s
		t.Errorf("held for %s", d)
	}
}

func TestAnonymousConnectionsAreFewAndShort(t *testing.T) {
	ca := newCAFor("c1")
	a := open(t, ca, "h-a", func(c *MuxConfig) { c.MaxAnonymous, c.AnonymousFor = 3, 300*time.Millisecond })
	config := PinnedClientConfig(Fingerprint(ca.Certificate()), nil)
	config.NextProtos = []string{"h2"}
	var open atomic.Int32
	var wait sync.WaitGroup
	for range 12 {
		c, err := tls.Dial("tcp", a.address, config)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		open.Add(1)
		wait.Go(func() { io.Copy(io.Discard, c); open.Add(-1) })
	}
	testkit.Until(t, "connections over the limit are closed", func() error { return testkit.Want(open.Load() <= 3, open.Load()) })
	if n := a.anonymous.size(); n > 3 {
		t.Errorf("%d in the pool", n)
	}
	testkit.Until(t, "all connections are closed", func() error { return testkit.Want(open.Load() == 0, open.Load()) })
	wait.Wait()
	testkit.Until(t, "the pool is empty", func() error { return testkit.Want(a.anonymous.size() == 0, a.anonymous.size()) })
}

// A user has a certificate and may look at things: that must not be enough to
// take all descriptors.
func TestOneUserCannotHoldAllConnections(t *testing.T) {
	ca := newCAFor("c1")
	a := open(t, ca, "h-a", func(c *MuxConfig) { c.MaxPerUser = 3 })
	// connect keeps its connection until it is closed.
	connect := func(user string) (hangUp func(), err error) {
		config := PinnedClientConfig(Fingerprint(ca.Certificate()), nil)
		config.NextProtos = []string{"h2"}
		config.Certificates = []tls.Certificate{*issue(ca, Identity{ID: user, Role: clusterv1.Role_ROLE_VIEWER}).Certificate}
		tr := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
		t.Cleanup(tr.CloseIdleConnections)
		res, err := (&http.Client{Transport: tr}).Get("https://" + a.address)
		if err == nil {
			_, _ = io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}
		return tr.CloseIdleConnections, err
	}
	var hangUp func()
	for range 3 {
		var err error
		if hangUp, err = connect("vic"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := connect("vic"); err == nil {
		t.Error("one more")
	}
	if _, err := connect("ann"); err != nil {
		t.Errorf("another user: %v", err)
	}
	hangUp()
	testkit.Until(t, "another connection, as one has ended", func() error { _, err := connect("vic"); return err })
	if _, err := connect("vic"); err == nil {
		t.Error("one more, after one has ended")
	}
}
