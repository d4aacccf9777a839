package vchantest

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/xenstore"
	"github.com/gpuctl/gpuctl/internal/xenstore/xenstoretest"
)

const (
	pageSize   = 4096
	grantLimit = 1024 // limit of gntalloc
	firstRef   = 8    // as Linux has it
)

// Hypervisor is a host with its domains and its xenstore.
type Hypervisor struct {
	tb    testing.TB
	dir   string
	store *xenstoretest.Server

	mu       sync.Mutex // guards everything in all domains
	domains  map[uint16]*Domain
	sockets  map[uint16]string
	memories map[*memory]bool // memories that are not closed
}

// New makes a host with domain 0. store is its xenstore; nil: a new one.
func New(tb testing.TB, store *xenstoretest.Server) *Hypervisor {
	tb.Helper()
	if store == nil {
		store = xenstoretest.New(tb)
	}
	dir, err := os.MkdirTemp("", "vchan") // short, because a socket's path is limited
	if err != nil {
		tb.Fatal(err)
	}
	h := &Hypervisor{tb: tb, dir: dir, store: store, domains: map[uint16]*Domain{}, sockets: map[uint16]string{0: store.Path()}, memories: map[*memory]bool{}}
	tb.Cleanup(func() {
		h.checkLeaks()
		_ = os.RemoveAll(dir)
	})
	h.Domain(0)
	return h
}

// Store returns the host's xenstore.
func (h *Hypervisor) Store() *xenstoretest.Server { return h.store }

// checkLeaks fails the test if a running process has anything open.
func (h *Hypervisor) checkLeaks() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for m := range h.memories {
		if !m.dead && !m.abandoned {
			h.tb.Errorf("vchantest: domain %d still has %d pages", m.domain.id, len(m.pages))
		}
	}
	for _, d := range h.domains {
		for _, p := range d.ports {
			if p.ended { // abandoned
				continue
			}
			h.tb.Errorf("vchantest: domain %d still has port %d", d.id, p.number)
		}
	}
}

// MappedOf returns how many pages of a domain others have mapped. While there are any, a
// domain that has ended is a zombie.
func (h *Hypervisor) MappedOf(domain uint16) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for m := range h.memories {
		if m.refs == nil && m.of == domain && !m.dead {
			n += len(m.pages)
		}
	}
	return n
}

// Domain returns a domain, and makes it if it does not exist.
func (h *Hypervisor) Domain(id uint16) *Domain {
	h.mu.Lock()
	defer h.mu.Unlock()
	if d := h.domains[id]; d != nil {
		return d
	}
	d := &Domain{h: h, id: id, bus: filepath.Join(h.dir, fmt.Sprintf("xenbus%d", id))}
	d.reset()
	h.domains[id] = d
	d.point()
	return d
}

// Domain is a program's access to Xen in a domain: it implements vchan.Devices.
type Domain struct {
	h   *Hypervisor
	id  uint16
	bus string // symbolic link to its xenstore's socket

	grants  map[uint32]*grant
	ports   map[uint32]*port
	nextRef uint32
	granted int // pages, including those that were released and are still mapped by others
}

type grant struct {
	page *page
	peer uint16
}

// page is a page of a file in memory.
type page struct {
	file   *os.File
	index  int
	owner  *Domain // domain whose limit it counts for; nil after a migration
	mapped int     // mappings by others
	kept   bool    // in use by the owner
}

func (p *page) drop() {
	if p.owner != nil && !p.kept && p.mapped == 0 {
		p.owner.granted--
		p.owner = nil
	}
}

func (d *Domain) reset() {
	d.grants, d.ports, d.nextRef, d.granted = map[uint32]*grant{}, map[uint32]*port{}, firstRef, 0
}

func (d *Domain) point() {
	d.h.tb.Helper()
	path := d.h.sockets[d.id]
	if path == "" {
		path = d.h.store.PathOf(d.id)
		d.h.sockets[d.id] = path
	}
	d.h.store.Introduce(d.id)
	_ = os.Remove(d.bus)
	if err := os.Symlink(path, d.bus); err != nil {
		d.h.tb.Fatal(err)
	}
}

// ID returns the domain's present number.
func (d *Domain) ID() uint16 {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	return d.id
}

// Bus returns the path to which the domain's xenstore clients connect. It stays the same
// after a migration.
func (d *Domain) Bus() string { return d.bus }

// Xenstore returns a xenstore client of the domain. It ends with the test.
func (d *Domain) Xenstore() *xenstore.Client {
	d.h.tb.Helper()
	c, err := xenstore.Dial(d.h.tb.Context(), d.bus)
	if err != nil {
		d.h.tb.Fatal(err)
	}
	d.h.tb.Cleanup(func() { _ = c.Close() })
	return c
}

// Grant implements vchan.Devices.
func (d *Domain) Grant(peer uint16, pages int) (vchan.Memory, error) {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	if d.granted+pages > grantLimit {
		return nil, fmt.Errorf("grant %d pages: %w", pages, unix.ENOSPC)
	}
	f, err := file(pages)
	if err != nil {
		return nil, err
	}
	m := &memory{domain: d, of: d.id}
	for i := range pages {
		p := &page{file: f, index: i, owner: d, kept: true}
		m.pages = append(m.pages, p)
		m.refs = append(m.refs, d.nextRef)
		d.grants[d.nextRef] = &grant{p, peer}
		d.nextRef++
	}
	d.granted += pages
	return m, m.mmap(unix.PROT_READ | unix.PROT_WRITE)
}

func file(pages int) (*os.File, error) {
	fd, err := unix.MemfdCreate("vchantest", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "vchantest")
	return f, f.Truncate(int64(pages) * pageSize)
}

// Map implements vchan.Devices.
func (d *Domain) Map(domain uint16, refs []uint32, writable bool) (vchan.Memory, error) {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	m := &memory{domain: d, of: domain}
	for _, ref := range refs {
		var g *grant
		if owner := d.h.domains[domain]; owner != nil {
			g = owner.grants[ref]
		}
		if g == nil || g.peer != d.id {
			return nil, fmt.Errorf("map grant %d of domain %d: %w", ref, domain, unix.EINVAL)
		}
		m.pages = append(m.pages, g.page)
	}
	for _, p := range m.pages {
		p.mapped++
	}
	protection := unix.PROT_READ
	if writable {
		protection |= unix.PROT_WRITE
	}
	return m, m.mmap(protection)
}

// BindUnbound implements vchan.Devices.
func (d *Domain) BindUnbound(peer uint16) (vchan.Port, error) {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	return d.bind(peer, nil), nil
}

// BindInterdomain implements vchan.Devices. As with Xen, the new end gets an event at
// once, because one may have been lost before.
func (d *Domain) BindInterdomain(domain uint16, number uint32) (vchan.Port, error) {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	var remote *port
	if r := d.h.domains[domain]; r != nil {
		remote = r.ports[number]
	}
	if remote == nil || remote.peer != d.id || remote.remote != nil {
		return nil, fmt.Errorf("bind to port %d of domain %d: %w", number, domain, unix.EINVAL)
	}
	p := d.bind(domain, remote)
	remote.remote = p
	p.raise()
	return p, nil
}

func (d *Domain) bind(peer uint16, remote *port) *port {
	number := uint32(1) // the lowest free one, as in Xen
	for d.ports[number] != nil {
		number++
	}
	p := &port{domain: d, number: number, peer: peer, remote: remote, pending: make(chan struct{}, 1), closed: make(chan struct{})}
	d.ports[number] = p
	return p
}

// Kill ends the domain's process that uses the devices: the kernel closes all its files.
// What the test still has of it is disconnected.
func (d *Domain) Kill() {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	for m := range d.h.memories {
		if m.domain == d && !m.dead {
			m.unmapped()
			m.cutOff()
		}
	}
	for _, p := range d.ports {
		p.unbind()
	}
}

// Migrate gives the domain another number and an empty home in xenstore, and removes its
// grants and event channels without a notification, as a live migration does. What others
// have mapped of the old domain stays mapped; see MappedOf. The program should not be
// closing anything at that moment.
func (d *Domain) Migrate(to uint16) {
	d.h.tb.Helper()
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	if d.h.domains[to] != nil {
		d.h.tb.Fatalf("vchantest: there is a domain %d", to)
	}
	d.leave()
	d.id = to
	d.reset()
	d.h.domains[to] = d
	d.point()
}

// Destroy ends the domain at once, as if its kernel had stopped.
func (d *Domain) Destroy() {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	d.leave()
	d.ports = nil
}

// leave removes the domain, first from itself and then from the others.
func (d *Domain) leave() {
	_ = os.Remove(d.bus)
	d.h.store.KickOf(d.id)
	d.lose()
	delete(d.h.domains, d.id)
	d.h.store.Release(d.id)
	d.h.store.Remove(fmt.Sprintf("/local/domain/%d", d.id))
}

// lose disconnects memory and ports from the other domains.
func (d *Domain) lose() {
	for m := range d.h.memories {
		if m.domain != d || m.dead {
			continue
		}
		m.cutOff()
		m.dead, m.moved = false, true
	}
	for _, p := range d.ports {
		p.moved = true
		if p.remote != nil {
			p.remote.remote = nil
			p.remote = nil
		}
	}
}

// memory implements vchan.Memory.
type memory struct {
	domain *Domain
	of     uint16
	pages  []*page
	refs   []uint32 // grants of pages that the domain has granted
	bytes  []byte

	notified               *port // notified when it is unmapped
	offset                 int
	dead, moved, abandoned bool
}

// mmap maps page by page, because the pages may be in several files.
func (m *memory) mmap(protection int) error {
	all, err := unix.Mmap(-1, 0, len(m.pages)*pageSize, protection, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	m.bytes = all
	for i, p := range m.pages {
		if err := m.replace(i, 1, protection, p.file, p.index); err != nil {
			return err
		}
	}
	m.domain.h.memories[m] = true
	return nil
}

// replace maps n pages of a file over the present ones.
func (m *memory) replace(at, n, protection int, f *os.File, index int) error {
	where := unsafe.Pointer(&m.bytes[at*pageSize])
	_, err := unix.MmapPtr(int(f.Fd()), int64(index)*pageSize, where, uintptr(n)*pageSize, protection, unix.MAP_SHARED|unix.MAP_FIXED)
	return err
}

// cutOff replaces the pages by private copies.
func (m *memory) cutOff() {
	m.dead = true
	f, err := file(len(m.pages))
	if err == nil {
		defer f.Close()
		if _, err = f.WriteAt(m.bytes, 0); err == nil {
			err = m.replace(0, len(m.pages), unix.PROT_READ|unix.PROT_WRITE, f, 0)
		}
	}
	if err != nil {
		m.domain.h.tb.Errorf("vchantest: %v", err)
	}
}

// unmapped does what the kernel does when memory is unmapped.
func (m *memory) unmapped() {
	if m.notified != nil {
		m.bytes[m.offset] = 0
		m.notified.send()
	}
	for i, p := range m.pages {
		if m.refs != nil {
			delete(m.domain.grants, m.refs[i])
			p.kept = false
		} else {
			p.mapped--
		}
		p.drop()
	}
}

// Bytes implements vchan.Memory.
func (m *memory) Bytes() []byte { return m.bytes }

// Refs implements vchan.Memory.
func (m *memory) Refs() []uint32 { return m.refs }

// NotifyOnUnmap implements vchan.Memory.
func (m *memory) NotifyOnUnmap(offset int, number uint32) error {
	m.domain.h.mu.Lock()
	defer m.domain.h.mu.Unlock()
	p := m.domain.ports[number]
	if p == nil || offset < 0 || offset >= len(m.bytes) {
		return unix.EINVAL
	}
	m.notified, m.offset = p, offset
	return nil
}

// Close implements vchan.Memory.
func (m *memory) Close() error {
	m.domain.h.mu.Lock()
	defer m.domain.h.mu.Unlock()
	if !m.domain.h.memories[m] || m.abandoned {
		m.domain.h.tb.Error("vchantest: memory was closed twice")
		return unix.EBADF
	}
	switch {
	case m.moved && m.notified != nil:
		m.domain.h.tb.Error("vchantest: memory was closed whose event channel is from before a migration: the kernel closes another device's")
	case !m.dead && !m.moved:
		m.unmapped()
	}
	delete(m.domain.h.memories, m)
	return unix.Munmap(m.bytes)
}

// Abandon implements vchan.Memory.
func (m *memory) Abandon() {
	m.domain.h.mu.Lock()
	defer m.domain.h.mu.Unlock()
	m.abandoned = true
}

// port implements vchan.Port.
type port struct {
	domain *Domain
	number uint32
	peer   uint16 // domain that may bind

	remote  *port // nil: unbound
	moved   bool
	ended   bool
	pending chan struct{} // contains a token while an event is pending
	closed  chan struct{}
}

// Number implements vchan.Port.
func (p *port) Number() uint32 { return p.number }

// Wait implements vchan.Port.
func (p *port) Wait() error {
	select {
	case <-p.closed:
		return os.ErrClosed
	default:
	}
	select {
	case <-p.pending:
		return nil
	case <-p.closed:
		return os.ErrClosed
	}
}

func (p *port) raise() {
	select {
	case p.pending <- struct{}{}:
	default:
	}
}

func (p *port) send() {
	if p.remote != nil {
		p.remote.raise()
	}
}

// Notify implements vchan.Port.
func (p *port) Notify() error {
	p.domain.h.mu.Lock()
	defer p.domain.h.mu.Unlock()
	if p.ended {
		return os.ErrClosed
	}
	p.send()
	return nil
}

// unbind removes the port. The other end is unbound then and gets no events.
func (p *port) unbind() {
	if p.remote != nil {
		p.remote.remote = nil
		p.remote = nil
	}
	delete(p.domain.ports, p.number)
}

// Close implements vchan.Port.
func (p *port) Close() error {
	p.domain.h.mu.Lock()
	defer p.domain.h.mu.Unlock()
	if p.ended {
		return os.ErrClosed
	}
	if p.moved {
		p.domain.h.tb.Error("vchantest: kernel BUG: an event channel from before a migration was closed")
	} else if p.domain.ports[p.number] == p {
		p.unbind()
	}
	p.ended = true
	close(p.closed)
	return nil
}

// Abandon implements vchan.Port.
func (p *port) Abandon() {
	p.domain.h.mu.Lock()
	defer p.domain.h.mu.Unlock()
	if !p.ended {
		p.ended = true
		close(p.closed)
	}
}

// Pair returns both ends of a connection between domain 7 and domain 0 of a new host.
// They end with the test.
func Pair(tb testing.TB, opts vchan.Options) (server, client net.Conn) {
	tb.Helper()
	h := New(tb, nil)
	return h.Connect(h.Domain(7), "data/pair", opts)
}

// Connect makes a domain listen at a path, and domain 0 dial. Both ends end with the
// test.
func (h *Hypervisor) Connect(d *Domain, path string, opts vchan.Options) (server, client net.Conn) {
	h.tb.Helper()
	ctx := h.tb.Context()
	opts.Devices = d
	l, err := vchan.Listen(ctx, d.Xenstore(), path, 0, opts)
	if err != nil {
		h.tb.Fatal(err)
	}
	dom0 := h.Domain(0)
	opts.Devices = dom0
	if client, err = vchan.Dial(ctx, dom0.Xenstore(), d.ID(), path, opts); err == nil {
		h.tb.Cleanup(func() { _ = client.Close() })
		server, err = l.Accept()
	}
	if err != nil {
		_ = l.Close()
		h.tb.Fatal(err)
	}
	h.tb.Cleanup(func() {
		_ = server.Close()
		_ = l.Close()
	})
	return server, client
}
