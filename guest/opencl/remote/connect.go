package remote

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"strings"
	"sync/atomic"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/compress"
	"github.com/gpuctl/gpuctl/internal/link"
	"github.com/gpuctl/gpuctl/internal/relay"
)

// Errors of connections.
var (
	// ErrPreamble is returned for what does not begin as a carrier's connection does.
	ErrPreamble = errors.New("not a carrier's connection")
	// ErrRefused is returned when the other host does not take a connection. It is final.
	ErrRefused = errors.New("refused by the far host")
	// ErrSilent is returned when the other host takes a connection and does not answer in
	// time. A far executor answers when it has loaded its runtime.
	ErrSilent = errors.New("the far host takes the connection and does not answer")
)

var errNoRelay = errors.New("nobody makes connections in this way for this program")

// Role is what a connection is for.
type Role uint8

// Roles of connections.
const (
	Commands Role = 1 + iota // requests and answers
	Bulk                     // bulk transfers, and what must not wait behind requests
	Control                  // ExecutorService
	Import                   // contents for the far executor
	Export                   // contents of the far executor
	State                    // a state file, there or back
	Fetch                    // contents for the far executor of another host: see fetch.go
	Chunks                   // the first of ChunkStreams
)

// ChunkStreams is how many streams of chunks there are: what large transfers move, on several
// connections, as one processor does not copy or encrypt as much as a network takes. They are
// made when there is such a transfer. Until then, and with a far host that does not know them,
// chunks go on the stream of bulk transfers.
const (
	ChunkStreams = 4

	Part  = Chunks + ChunkStreams // of a bundle: see bundle.go
	roles = Part + 1
)

func roleNames() [roles]string {
	return [roles]string{"", "commands", "bulk", "control", "import", "export", "state", "fetch", "chunks", "chunks2", "chunks3", "chunks4", "part"}
}

// ChunkStream returns which stream of chunks the role is, from 0.
func (r Role) ChunkStream() (n int, ok bool) { return int(r) - int(Chunks), r >= Chunks && r < Part }

// StreamOf returns the stream that a chunk goes on: each of those for chunks that are
// connected in turn, or that of bulk transfers while there is none.
func StreamOf[S any](chunk uint32, chunks []S, bulk S) S {
	if len(chunks) == 0 {
		return bulk
	}
	return chunks[chunk%uint32(len(chunks))]
}

// String returns the role's name.
func (r Role) String() string {
	if r == 0 || r >= roles {
		return fmt.Sprintf("role(%d)", uint8(r))
	}
	return roleNames()[r]
}

// ParseRole is the reverse of String.
func ParseRole(name string) (Role, bool) {
	for r := Commands; r < roles; r++ {
		if roleNames()[r] == name {
			return r, true
		}
	}
	return 0, false
}

// HandedPrefix begins the names of connections that are handed over: what follows is the
// role.
const HandedPrefix = "carrier:"

// TokenSize is the length of a lease's token in bytes.
const TokenSize = 32

// Token names a lease. Who has no certificate needs it to be secret.
type Token [TokenSize]byte

// Preamble is the first thing that a carrier sends, in clear: it says who is to take the
// connection.
type Preamble struct {
	Role  Role
	Plain bool // no TLS follows
	Token Token
}

// PreambleSize is the length of a preamble in bytes: u32 magic, u16 version, u8 role, u8
// whether plain, the token.
const PreambleSize = 8 + TokenSize

const (
	preambleMagic = 0x52525847 // "GXRR"
	version       = 1
)

// Append appends the preamble to b.
func (p Preamble) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, preambleMagic)
	b = binary.LittleEndian.AppendUint16(b, version)
	b = append(b, byte(p.Role), 0)
	if p.Plain {
		b[len(b)-1] = 1
	}
	return append(b, p.Token[:]...)
}

// ParsePreamble decodes PreambleSize bytes.
func ParsePreamble(b []byte) (Preamble, error) {
	if len(b) != PreambleSize || binary.LittleEndian.Uint32(b) != preambleMagic {
		return Preamble{}, ErrPreamble
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != version {
		return Preamble{}, fmt.Errorf("version %d, not %d: %w", v, version, ErrPreamble)
	}
	p := Preamble{Role: Role(b[6]), Plain: b[7] == 1, Token: Token(b[8:])}
	if p.Role == 0 || p.Role >= roles || b[7] > 1 {
		return Preamble{}, fmt.Errorf("role %d: %w", b[6], ErrPreamble)
	}
	return p, nil
}

// Hello follows on each connection, within TLS. The far executor makes its memory like the
// session's when the first one comes, and compares all later ones.
type Hello struct {
	Carrier    link.ID // of this carrier's process, chosen at random
	ArenaSize  uint64  // bytes
	ArenaSplit uint64
	Part       uint32 // the part of the arena that the carrier has locked
	Generation uint32
	Now        int64 // CLOCK_MONOTONIC of the carrier's host, ns
}

// HelloSize is the length of a hello in bytes.
const HelloSize = 16 + 8 + 8 + 4 + 4 + 8

// Append appends the hello to b.
func (h Hello) Append(b []byte) []byte {
	b = append(b, h.Carrier[:]...)
	b = binary.LittleEndian.AppendUint64(b, h.ArenaSize)
	b = binary.LittleEndian.AppendUint64(b, h.ArenaSplit)
	b = binary.LittleEndian.AppendUint32(b, h.Part)
	b = binary.LittleEndian.AppendUint32(b, h.Generation)
	return binary.LittleEndian.AppendUint64(b, uint64(h.Now))
}

// Limits of an arena that a far executor makes: those of sessions.
const (
	maxArena  = 1 << 42
	arenaPage = 2 << 20
)

// ParseHello decodes and checks HelloSize bytes. parts is how many parts an arena has.
func ParseHello(b []byte, parts uint32) (Hello, error) {
	if len(b) != HelloSize {
		return Hello{}, fmt.Errorf("hello of %d bytes: %w", len(b), ErrPreamble)
	}
	le := binary.LittleEndian
	h := Hello{link.ID(b[:16]), le.Uint64(b[16:]), le.Uint64(b[24:]), le.Uint32(b[32:]), le.Uint32(b[36:]), int64(le.Uint64(b[40:]))}
	switch {
	case h.ArenaSize == 0 || h.ArenaSize > maxArena || h.ArenaSize%arenaPage != 0,
		h.ArenaSplit == 0 || h.ArenaSplit >= h.ArenaSize || h.ArenaSplit%arenaPage != 0:
		return Hello{}, fmt.Errorf("arena of %d bytes, split at %d: %w", h.ArenaSize, h.ArenaSplit, ErrPreamble)
	case h.Part >= parts || h.Generation == 0 || h.Now < 0:
		return Hello{}, fmt.Errorf("part %d, generation %d: %w", h.Part, h.Generation, ErrPreamble)
	}
	return h, nil
}

// Stream returns the id of a stream, which both ends know it by.
func (h Hello) Stream(r Role) link.ID {
	id := h.Carrier
	id[0] ^= byte(r - Commands)
	return id
}

// Same reports whether two hellos are of the same carrier and session.
func (h Hello) Same(o Hello) bool {
	o.Now = h.Now
	return h == o
}

// The answer to a hello: u32 0 or 1 for refused, u32 length, and a text of that length.
const maxAnswer = 1 << 10

// Answer accepts a connection if err is nil, and otherwise says why not.
func Answer(conn net.Conn, err error) error {
	var b []byte
	if err == nil {
		b = make([]byte, 8)
	} else {
		text := err.Error()
		text = text[:min(len(text), maxAnswer)]
		b = binary.LittleEndian.AppendUint32(b, 1)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(text)))
		b = append(b, text...)
	}
	_, werr := conn.Write(b)
	return werr
}

func readAnswer(r io.Reader) error {
	var b [8]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return err
	}
	status, n := binary.LittleEndian.Uint32(b[:]), binary.LittleEndian.Uint32(b[4:])
	if status == 0 && n == 0 {
		return nil
	}
	if n > maxAnswer || status != 1 {
		return fmt.Errorf("answer of %d bytes with status %d: %w", n, status, ErrPreamble)
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(r, text); err != nil {
		return err
	}
	return fmt.Errorf("%w: %q", ErrRefused, text)
}

// Identity is one end's certificate. The other end knows its hash.
type Identity struct {
	Certificate []byte // DER
	Key         []byte // PKCS #8, DER
}

// NewIdentity makes a key pair for one session.
func NewIdentity(name string) (Identity, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Identity{}, fmt.Errorf("identity of %s: %w", name, err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Unix(0, 0), NotAfter: time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC), // the hash decides, and hosts' clocks may differ
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return Identity{}, fmt.Errorf("identity of %s: %w", name, err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return Identity{}, fmt.Errorf("identity of %s: %w", name, err)
	}
	return Identity{der, raw}, nil
}

// Hash returns the SHA-256 of the certificate.
func (i Identity) Hash() []byte {
	h := sha256.Sum256(i.Certificate)
	return h[:]
}

// errPeer is returned when the other end has another certificate than it should.
var errPeer = errors.New("the other end has another certificate than was agreed on")

// compressProtocol is offered in the hello of TLS (ALPN) by an end that can expand what is
// compressed. An end that does not know it leaves it out of its answer.
const compressProtocol = "gpuctl-carrier-zstd"

// config returns TLS for one end. peer is the hash of the other end's certificate.
func (i Identity) config(peer []byte, role Role) (*tls.Config, error) {
	key, err := x509.ParsePKCS8PrivateKey(i.Key)
	if err != nil {
		return nil, fmt.Errorf("key: %w", err)
	}
	if len(peer) != sha256.Size {
		return nil, fmt.Errorf("hash of the other end's certificate has %d bytes, not %d", len(peer), sha256.Size)
	}
	var protocols []string
	if role != Control { // HTTP's, and short
		protocols = []string{compressProtocol}
	}
	return &tls.Config{
		NextProtos:   protocols,
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{i.Certificate}, PrivateKey: key}},
		ClientAuth:   tls.RequireAnyClientCert,
		// The certificates are pinned: no authority has signed them.
		InsecureSkipVerify:     true, //nolint:gosec // VerifyConnection compares the certificate itself
		SessionTicketsDisabled: true,
		// Small records at first would be for web pages.
		DynamicRecordSizingDisabled: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			if len(cs.PeerCertificates) == 0 {
				return errPeer
			}
			if h := sha256.Sum256(cs.PeerCertificates[0].Raw); string(h[:]) != string(peer) {
				return errPeer
			}
			return nil
		},
	}, nil
}

// Dialer makes a carrier's connections.
type Dialer struct {
	Addresses []string // the one that was reached last is tried first, the others in order, a moment later
	Relay     string   // socket at which connections through this VM's host are made, for addresses with relay.Prefix
	RDMA      string   // socket at which connections over RDMA are made, for addresses with RDMAPrefix
	Token     Token
	Plain     bool
	Own       Identity
	Peer      []byte // hash of the far executor's certificate
	Hello     Hello
	Timeout   time.Duration // to reach an address, and the same to the answer of one; 0: 10 s
	Compress  Compress

	reached atomic.Uint32 // index of the address that was reached last
}

// Compress says how an end compresses what it sends, if the other one can expand it.
type Compress struct {
	Always bool             // not only where the connection is slow: for tests
	Counts *compress.Counts // of what is sent
}

// Traffic returns what was sent, or nil if nobody counts.
func (x Compress) Traffic() *gpuctlv1.Traffic {
	if x.Counts == nil {
		return nil
	}
	return &gpuctlv1.Traffic{Plain: x.Counts.Plain.Load(), Compressed: x.Counts.Long.Load(), CompressedTo: x.Counts.Short.Load()}
}

// over returns the connection that both ends have agreed on in TLS's hello. meter is the
// connection below TLS.
func (x Compress) over(conn *sealed, meter net.Conn) net.Conn {
	if conn.ConnectionState().NegotiatedProtocol != compressProtocol {
		return conn
	}
	m, _ := meter.(compress.Meter)
	return compress.New(conn, compress.Options{Meter: m, Always: x.Always, Counts: x.Counts})
}

func (d *Dialer) timeout() time.Duration {
	if d.Timeout > 0 {
		return d.Timeout
	}
	return dialTimeout
}

// Limits of connecting.
const (
	dialTimeout  = 10 * time.Second // to reach an address, and the same to its answer
	GreetTimeout = 10 * time.Second // from a connection's begin to the end of its hello
	// TargetTimeout is for the target of a swap to begin to take contents: a carrier first makes
	// connections, two after one another, and waits for the far executor's hello.
	TargetTimeout = 2*(dialTimeout+GreetTimeout) + GreetTimeout
	bundleTimeout = dialTimeout + GreetTimeout // for the other parts of a bundle, after the first
)

// Dial makes a connection. An error that is ErrRefused is final.
func (d *Dialer) Dial(ctx context.Context, role Role) (net.Conn, error) {
	if len(d.Addresses) == 0 {
		return nil, errors.New("no address of the far host")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var silent []error
	for r := d.newRace(role); ; {
		a, err := r.reach(ctx)
		if err != nil || a.conn == nil {
			return nil, errors.Join(append(silent, err)...)
		}
		c, err := d.greeted(ctx, a.conn, role)
		if err == nil {
			d.reached.Store(uint32(a.n))
			return c, nil
		}
		switch named := fmt.Errorf("%s: %w", d.Addresses[a.n], err); {
		case errors.Is(err, ErrRefused) || ctx.Err() != nil:
			return nil, errors.Join(append(silent, named)...)
		case errors.Is(err, ErrSilent):
			silent = append(silent, named)
			r.drop(a.n)
		default:
			r.failed[a.n] = err
		}
	}
}

// greeted agrees with the far executor on what a connection is for. It closes the connection if
// it fails.
func (d *Dialer) greeted(ctx context.Context, conn net.Conn, role Role) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.timeout())
	defer cancel()
	conn = prepare(conn, role, d.Plain)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	greeted, err := d.greet(ctx, conn, role)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = fmt.Errorf("%w within %v: %w", ErrSilent, d.timeout(), err)
		}
		return nil, err
	}
	return greeted, nil
}

// connect makes a connection, and sends the preamble.
func (d *Dialer) connect(ctx context.Context, addr string, role Role) (net.Conn, error) {
	preamble := Preamble{role, d.Plain, d.Token}.Append(nil)
	for prefix, socket := range map[string]string{relay.Prefix: d.Relay, RDMAPrefix: d.RDMA} {
		if port, ok := strings.CutPrefix(addr, prefix); ok {
			if socket == "" {
				return nil, errNoRelay
			}
			return relay.Dial(ctx, socket, port, role != Commands && role != Control, preamble)
		}
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	_, err = conn.Write(preamble)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

func (d *Dialer) greet(ctx context.Context, conn net.Conn, role Role) (net.Conn, error) {
	if d.Plain {
		if _, err := conn.Write(d.Hello.Append(nil)); err != nil {
			return nil, err
		}
		return conn, readAnswer(conn)
	}
	cfg, err := d.Own.config(d.Peer, role)
	if err != nil {
		return nil, err
	}
	s, err := seal(ctx, conn, cfg, tls.Client)
	if err != nil {
		return nil, fmt.Errorf("TLS: %w", err)
	}
	if _, err := s.Write(d.Hello.Append(nil)); err != nil {
		return nil, err
	}
	conn = d.Compress.over(s, conn)
	return conn, readAnswer(conn)
}

// prepare makes a connection fit for what it is for.
func prepare(conn net.Conn, role Role, plain bool) net.Conn {
	if role == Control { // HTTP's
		return conn
	}
	return newSocket(conn, role == Commands, plain) // TLS reads what there is
}

// ReadPreamble reads a connection's preamble within GreetTimeout.
func ReadPreamble(conn net.Conn) (Preamble, error) {
	_ = conn.SetReadDeadline(time.Now().Add(GreetTimeout))
	var b [PreambleSize]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return Preamble{}, fmt.Errorf("%w: %w", ErrPreamble, err)
	}
	_ = conn.SetReadDeadline(time.Time{})
	return ParsePreamble(b[:])
}

// Acceptor takes connections whose preamble was read.
type Acceptor struct {
	Plain bool
	Own   Identity
	Peer  []byte // hash of the carrier's certificate
	Parts uint32 // of an arena

	Compress Compress
}

// Accept does the far end's part of TLS and reads the hello, within GreetTimeout. The caller
// answers. It closes the connection if it returns an error.
func (a *Acceptor) Accept(conn net.Conn, role Role) (net.Conn, Hello, error) {
	conn = prepare(conn, role, a.Plain)
	c, h, err := a.accept(conn, role)
	if err != nil {
		conn.Close()
	}
	return c, h, err
}

func (a *Acceptor) accept(under net.Conn, role Role) (net.Conn, Hello, error) {
	_ = under.SetDeadline(time.Now().Add(GreetTimeout))
	conn := under
	var s *sealed
	if !a.Plain {
		cfg, err := a.Own.config(a.Peer, role)
		if err != nil {
			return nil, Hello{}, err
		}
		if s, err = seal(context.Background(), under, cfg, tls.Server); err != nil {
			return nil, Hello{}, fmt.Errorf("TLS: %w", err)
		}
		conn = s
	}
	var b [HelloSize]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return nil, Hello{}, fmt.Errorf("hello: %w", err)
	}
	h, err := ParseHello(b[:], a.Parts)
	if err != nil {
		return nil, Hello{}, err
	}
	_ = conn.SetDeadline(time.Time{})
	if s != nil {
		conn = a.Compress.over(s, under)
	}
	return conn, h, nil
}
