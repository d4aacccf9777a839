package vchan_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/vchan/vchantest"
	"github.com/gpuctl/gpuctl/internal/xenstore"
)

// The shared page, as libxenvchan.h has it.
const (
	leftCons, leftProd, rightCons, rightProd = 0, 4, 8, 12
	orders, state, grants                    = 16, 20, 24
)

// raw is a side of the ring that writes into it what it likes.
type raw struct {
	page, left, right vchan.Memory
	port              vchan.Port
}

func (r *raw) word(at int) *uint32 { return (*uint32)(unsafe.Pointer(&r.page.Bytes()[at])) }

func (r *raw) set(at int, v uint32) { atomic.StoreUint32(r.word(at), v) }

func (r *raw) close(t *testing.T) {
	for _, c := range []io.Closer{r.left, r.right, r.page, r.port} {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// rawServer makes a ring of two pages in domain 7 and publishes it, after edit.
func rawServer(t *testing.T, h *vchantest.Hypervisor, edit func(r *raw, nodes map[string]string)) *raw {
	t.Helper()
	guest := h.Domain(7)
	r := &raw{}
	var err error
	if r.port, err = guest.BindUnbound(0); err != nil {
		t.Fatal(err)
	}
	for _, m := range []*vchan.Memory{&r.page, &r.left, &r.right} {
		if *m, err = guest.Grant(0, 1); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { r.close(t) })
	r.set(orders, 12|12<<16)
	r.set(state, 2|1<<8|1<<16)
	r.set(grants, r.left.Refs()[0])
	r.set(grants+4, r.right.Refs()[0])
	nodes := map[string]string{"ring-ref": strconv.Itoa(int(r.page.Refs()[0])), "event-channel": strconv.Itoa(int(r.port.Number()))}
	if edit != nil {
		edit(r, nodes)
	}
	store := guest.Xenstore()
	for name, value := range nodes {
		node := path + "/" + name
		if err := store.Write(t.Context(), node, value); err != nil {
			t.Fatal(err)
		}
		if err := store.SetPermissions(t.Context(), node, xenstore.Permission{Domain: 7, Access: xenstore.AccessNone}, xenstore.Permission{Access: xenstore.AccessRead}); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func dialRaw(t *testing.T, h *vchantest.Hypervisor) (*vchan.Conn, error) {
	dom0 := h.Domain(0)
	return vchan.Dial(t.Context(), dom0.Xenstore(), 7, path, vchan.Options{Devices: dom0})
}

func TestHostileServer(t *testing.T) {
	page := func(edit func(r *raw)) func(*raw, map[string]string) {
		return func(r *raw, _ map[string]string) { edit(r) }
	}
	word := func(at int, v uint32) func(*raw, map[string]string) {
		return page(func(r *raw) { r.set(at, v) })
	}
	node := func(name, value string) func(*raw, map[string]string) {
		return func(_ *raw, nodes map[string]string) { nodes[name] = value }
	}
	for name, c := range map[string]struct {
		edit func(r *raw, nodes map[string]string)
		want error
	}{
		"order 9":                  {word(orders, 9|12<<16), vchan.ErrProtocol},
		"order 21":                 {word(orders, 12|21<<16), vchan.ErrProtocol},
		"no orders":                {word(orders, 0), vchan.ErrProtocol},
		"orders that shift":        {word(orders, 12|44<<16), vchan.ErrProtocol},
		"largest orders":           {word(orders, 0xffffffff), vchan.ErrProtocol},
		"rings on each other":      {word(orders, 11|11<<16), vchan.ErrProtocol},
		"grants in a ring":         {word(orders, 10|20<<16), vchan.ErrProtocol},
		"more grants than it has":  {word(orders, 13|12<<16), vchan.ErrNoServer},
		"most grants":              {word(orders, 20|20<<16), vchan.ErrNoServer},
		"a grant that is not":      {word(grants, 4711), vchan.ErrNoServer},
		"a right grant":            {word(grants+4, 0xffffffff), vchan.ErrNoServer},
		"its cons is ahead":        {word(leftCons, 1), vchan.ErrProtocol},
		"its cons is far behind":   {word(leftCons, 1<<31), vchan.ErrProtocol},
		"its prod is ahead":        {word(rightProd, 4097), vchan.ErrProtocol},
		"its prod is behind":       {word(rightProd, 0xffffffff), vchan.ErrProtocol},
		"the server is gone":       {word(state, 2), vchan.ErrNoServer},
		"the server is odd":        {word(state, 2|7<<8), vchan.ErrNoServer},
		"it has a client":          {word(state, 1|1<<8), vchan.ErrNoServer},
		"it had a client":          {word(state, 0|1<<8), vchan.ErrNoServer},
		"no ring-ref":              {node("ring-ref", ""), vchan.ErrProtocol},
		"ring-ref 0":               {node("ring-ref", "0"), vchan.ErrProtocol},
		"negative ring-ref":        {node("ring-ref", "-1"), vchan.ErrProtocol},
		"large ring-ref":           {node("ring-ref", "4294967295"), vchan.ErrProtocol},
		"huge ring-ref":            {node("ring-ref", "99999999999999999999"), vchan.ErrProtocol},
		"ring-ref and more":        {node("ring-ref", "8 "), vchan.ErrProtocol},
		"another ring-ref":         {node("ring-ref", "4711"), vchan.ErrNoServer},
		"event-channel of letters": {node("event-channel", "x"), vchan.ErrProtocol},
		"another event-channel":    {node("event-channel", "4711"), vchan.ErrNoServer},
		"a grant twice":            {page(func(r *raw) { r.set(grants+4, r.left.Refs()[0]) }), nil},
		"the page as its ring":     {page(func(r *raw) { r.set(grants, r.page.Refs()[0]) }), nil},
		"grants in the page":       {word(orders, 10|11<<16), nil},
		"full rings": {page(func(r *raw) {
			r.set(rightProd, 4096)
			r.set(leftProd, 100)
			r.set(leftCons, ^uint32(0)-3995)
		}), nil},
	} {
		t.Run(name, func(t *testing.T) {
			h := vchantest.New(t, nil)
			rawServer(t, h, c.edit)
			conn, err := dialRaw(t, h)
			check(t, "dial", err, c.want)
			if err == nil {
				_ = conn.SetDeadline(time.Now().Add(20 * time.Millisecond))
				_, _ = conn.Write(make([]byte, 10000))
				_, _ = conn.Read(make([]byte, 10000))
				_ = conn.Close()
			}
			if n := h.MappedOf(7); n != 0 {
				t.Errorf("%d pages are still mapped", n)
			}
		})
	}
}

// A server that changes its mind while a connection is up.
func TestHostileInTheMiddle(t *testing.T) {
	big := make([]byte, 100)
	read := func(c net.Conn) error { _, err := c.Read(big); return err }
	write := func(c net.Conn) error { _, err := c.Write(big); return err }
	for name, c := range map[string]struct {
		edit func(r *raw)
		do   func(net.Conn) error
		want error
	}{
		"more written than fits":        {func(r *raw) { r.set(rightProd, 4097) }, read, vchan.ErrProtocol},
		"less written than was read":    {func(r *raw) { r.set(rightProd, 0xffffffff) }, read, vchan.ErrProtocol},
		"more read than was written":    {func(r *raw) { r.set(leftCons, 1) }, write, vchan.ErrProtocol},
		"far less read":                 {func(r *raw) { r.set(leftCons, 1<<31) }, write, vchan.ErrProtocol},
		"our index of what we wrote":    {func(r *raw) { r.set(leftProd, 3000) }, write, nil},
		"our index of what we read":     {func(r *raw) { r.set(rightCons, 3000); r.set(rightProd, 1) }, read, nil},
		"orders":                        {func(r *raw) { r.set(orders, 20|20<<16) }, write, nil},
		"grants":                        {func(r *raw) { r.set(grants, 0) }, write, nil},
		"gone":                          {func(r *raw) { r.set(state, 1) }, write, vchan.ErrDied},
		"gone, and it reads":            {func(r *raw) { r.set(state, 1) }, read, vchan.ErrDied},
		"gone politely":                 {func(r *raw) { r.set(state, 1|1<<23) }, write, syscall.EPIPE},
		"gone politely, and it reads":   {func(r *raw) { r.set(state, 1|1<<23) }, read, io.EOF},
		"gone, and more than fits":      {func(r *raw) { r.set(state, 1); r.set(rightProd, 1<<20) }, read, vchan.ErrProtocol},
		"gone, with something left":     {func(r *raw) { r.set(state, 1); r.set(rightProd, 5) }, read, nil},
		"we are gone, says the server":  {func(r *raw) { r.set(state, 0|1<<8) }, write, nil},
		"every wish at once":            {func(r *raw) { r.set(state, 0xffffffff) }, write, nil},
		"what it says is no life at it": {func(r *raw) { r.set(state, 1|255<<8) }, write, nil},
	} {
		t.Run(name, func(t *testing.T) {
			h := vchantest.New(t, nil)
			r := rawServer(t, h, nil)
			conn, err := dialRaw(t, h)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			c.edit(r)
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			err = c.do(conn)
			check(t, "it", err, c.want)
			if errors.Is(err, vchan.ErrProtocol) {
				check(t, "it again", c.do(conn), vchan.ErrProtocol)
				if n := h.MappedOf(7); n != 0 {
					t.Errorf("%d pages are still mapped", n)
				}
			}
		})
	}
}

// A client is as little believed.
func TestHostileClient(t *testing.T) {
	for name, c := range map[string]struct {
		at   int
		v    uint32
		read bool
		want error
	}{
		"more written than fits":     {leftProd, 1 << 20, true, vchan.ErrProtocol},
		"more read than was written": {rightCons, 7, false, vchan.ErrProtocol},
		"gone":                       {state, 0 | 1<<8, true, vchan.ErrDied},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, vchan.Options{})
			dom0 := h.dom0
			number := func(node string) uint32 {
				v, _ := h.Store().Get("/local/domain/7/" + path + "/" + node)
				n, err := strconv.Atoi(v)
				if err != nil {
					t.Fatal(err)
				}
				return uint32(n)
			}
			port, err := dom0.BindInterdomain(7, number("event-channel"))
			if err != nil {
				t.Fatal(err)
			}
			page, err := dom0.Map(7, []uint32{number("ring-ref")}, true)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = page.Close()
				_ = port.Close()
			}()
			r := raw{page: page}
			r.set(state, 1|1<<8)
			_ = port.Notify()
			conn, err := h.l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			r.set(c.at, c.v)
			_ = port.Notify()
			if c.read {
				_, err = conn.Read(make([]byte, 10))
			} else {
				_, err = conn.Write(make([]byte, 10))
			}
			check(t, "it", err, c.want)
		})
	}
}

// Everything that a guest can change changes all the time.
func TestStorm(t *testing.T) {
	for seed := range uint64(8) {
		h := vchantest.New(t, nil)
		r := rawServer(t, h, nil)
		conn, err := dialRaw(t, h)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, 0))
			for ctx.Err() == nil {
				switch rnd.IntN(4) {
				case 0:
					r.set(4*rnd.IntN(1024), rnd.Uint32())
				case 1:
					r.set(state, 1|1<<8|rnd.Uint32()<<16)
				default:
					at := []int{leftCons, rightProd}[rnd.IntN(2)]
					r.set(at, atomic.LoadUint32(r.word(at))+rnd.Uint32N(64))
				}
				_ = r.port.Notify()
			}
		})
		_ = conn.SetDeadline(time.Now().Add(100 * time.Millisecond))
		use := func(do func([]byte) (int, error)) {
			p := make([]byte, 5000)
			for i := 0; ; i++ {
				n, err := do(p[:1+i%len(p)])
				if n > len(p) {
					t.Errorf("%d bytes", n)
				}
				if err == nil {
					continue
				}
				for _, known := range []error{vchan.ErrProtocol, vchan.ErrDied, io.EOF, syscall.EPIPE, os.ErrDeadlineExceeded} {
					if errors.Is(err, known) {
						return
					}
				}
				t.Error(err)
				return
			}
		}
		wg.Go(func() { use(conn.Read) })
		wg.Go(func() { use(conn.Write) })
		time.Sleep(60 * time.Millisecond) // as long as it is hostile
		cancel()
		wg.Wait()
		_ = conn.Close()
		if n := h.MappedOf(7); n != 0 {
			t.Errorf("%d pages are still mapped", n)
		}
	}
}

// counted counts the events that are let in.
type counted struct {
	vchan.Devices
	n atomic.Int64
}

func (c *counted) BindInterdomain(domain uint16, port uint32) (vchan.Port, error) {
	p, err := c.Devices.BindInterdomain(domain, port)
	return &countedPort{p, c}, err
}

type countedPort struct {
	vchan.Port
	c *counted
}

func (p *countedPort) Wait() error {
	p.c.n.Add(1)
	return p.Port.Wait()
}

// Events that bring nothing do not keep dom0 busy.
func TestEventsAreSlowedDown(t *testing.T) {
	h := vchantest.New(t, nil)
	r := rawServer(t, h, nil)
	dom0 := &counted{Devices: h.Domain(0)}
	conn, err := vchan.Dial(t.Context(), h.Domain(0).Xenstore(), 7, path, vchan.Options{Devices: dom0})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	sent := 0
	began := time.Now()
	for time.Since(began) < 100*time.Millisecond {
		_ = r.port.Notify()
		sent++
	}
	if n := dom0.n.Load(); n > 64+120 || sent < 1000 {
		t.Errorf("%d of %d events were let in within %v", n, sent, time.Since(began))
	}
	// Those that bring something still come.
	copy(r.right.Bytes(), "news")
	r.set(rightProd, 4)
	b := make([]byte, 4)
	if _, err := io.ReadFull(conn, b); err != nil || string(b) != "news" {
		t.Errorf("%q, %v", b, err)
	}
}

// A client whose indexes begin shortly before they run over.
func TestRunOver(t *testing.T) {
	h := vchantest.New(t, nil)
	const start = ^uint32(0) - 9
	r := rawServer(t, h, func(r *raw, _ map[string]string) {
		for _, at := range []int{leftCons, leftProd, rightCons, rightProd} {
			r.set(at, start)
		}
	})
	conn, err := dialRaw(t, h)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	p := make([]byte, 4096)
	for i := range p {
		p[i] = byte(i * 7)
	}
	if n, err := conn.Write(p); n != len(p) || err != nil {
		t.Fatal(n, err)
	}
	if got := atomic.LoadUint32(r.word(leftProd)); got != 4086 {
		t.Errorf("index %#x", got)
	}
	at := int(start & 4095)
	for i, b := range p {
		if r.left.Bytes()[(at+i)&4095] != b {
			t.Fatalf("byte %d", i)
		}
	}
	for i := range 100 {
		r.right.Bytes()[(at+i)&4095] = byte(i)
	}
	last := start
	last += 100
	r.set(rightProd, last)
	got := make([]byte, 100)
	if _, err := io.ReadFull(conn, got); err != nil || binary.LittleEndian.Uint32(got[8:]) != 0x0b0a0908 || got[99] != 99 {
		t.Error(err, got)
	}
}
