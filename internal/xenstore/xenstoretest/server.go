package xenstoretest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/xenstore"
)

// Server is a xenstored. It is safe for concurrent use.
type Server struct {
	t   testing.TB
	dir string

	mu         sync.Mutex
	store      *view
	conns      map[*client]bool
	listeners  map[uint16]net.Listener
	introduced map[uint16]bool
	lastTx     uint32
	hung       chan struct{} // open while the server does not answer
	zeroIDs    bool
	long       bool
	requests   int
	wg         sync.WaitGroup
}

// New starts a server that listens on Path until the test ends.
func New(t testing.TB) *Server {
	t.Helper()
	dir, err := os.MkdirTemp("", "xs") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{
		t: t, dir: dir, conns: map[*client]bool{}, listeners: map[uint16]net.Listener{}, introduced: map[uint16]bool{0: true},
		store: &view{nodes: map[string]*node{"/": {perms: []xenstore.Permission{{Access: xenstore.AccessNone}}}}, next: new(uint64)},
	}
	for _, path := range []string{"/tool", "/local", "/local/domain"} {
		s.store.make(0, path)
	}
	t.Cleanup(func() {
		s.Hang(false)
		s.Stop()
		s.wg.Wait()
		os.RemoveAll(dir)
	})
	s.Start()
	return s
}

// Path returns the socket of the control domain.
func (s *Server) Path() string { return s.socket(0) }

func (s *Server) socket(domain uint16) string {
	return filepath.Join(s.dir, "socket"+strconv.Itoa(int(domain)))
}

// PathOf returns a socket for clients in a guest, which have only the rights that the
// nodes' permissions give them. It makes the node "/local/domain/N", which the guest
// owns.
func (s *Server) PathOf(domain uint16) string {
	s.t.Helper()
	s.Introduce(domain)
	s.listen(domain)
	return s.socket(domain)
}

// Introduce introduces a domain, as its creation does.
func (s *Server) Introduce(domain uint16) {
	s.mu.Lock()
	defer s.mu.Unlock()
	home := "/local/domain/" + strconv.Itoa(int(domain))
	if s.store.nodes[home] == nil {
		n := *s.store.make(0, home)
		n.perms = []xenstore.Permission{{Domain: domain, Access: xenstore.AccessNone}}
		s.store.put(home, n)
	}
	s.introduced[domain] = true
	s.fire("@introduceDomain")
	s.flush()
}

// Release releases a domain, as its end does. Its nodes stay; whoever has made them must
// remove them.
func (s *Server) Release(domain uint16) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.introduced, domain)
	s.fire("@releaseDomain")
}

// Start listens again after Stop.
func (s *Server) Start() { s.listen(0) }

func (s *Server) listen(domain uint16) {
	s.t.Helper()
	l, err := net.Listen("unix", s.socket(domain))
	if err != nil {
		s.t.Fatal(err)
	}
	s.mu.Lock()
	s.listeners[domain] = l
	s.mu.Unlock()
	s.wg.Go(func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			s.serve(nc, domain)
		}
	})
}

// Stop ends all connections and accepts no new ones. The nodes stay.
func (s *Server) Stop() {
	s.mu.Lock()
	for domain, l := range s.listeners {
		_ = l.Close()
		delete(s.listeners, domain)
	}
	s.mu.Unlock()
	s.Kick()
}

// Kick ends all connections, with their watches and transactions.
func (s *Server) Kick() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.close()
	}
}

// KickOf ends a domain's connections, as its clients see it after a migration.
func (s *Server) KickOf(domain uint16) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		if c.domain == domain {
			c.close()
		}
	}
}

// Hang makes the server read requests without answering them, until Hang(false).
func (s *Server) Hang(yes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case yes && s.hung == nil:
		s.hung = make(chan struct{})
	case !yes && s.hung != nil:
		close(s.hung)
		s.hung = nil
	}
}

// AnswerWatchesAsKernel makes answers to watch and unwatch requests have id zero, as
// Linux's device does. If such a request comes before all others are answered, the test
// fails, because it would hang the domain.
func (s *Server) AnswerWatchesAsKernel() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.zeroIDs = true
}

// AnswerAsOxenstored makes the server send answers that are longer than a message, as
// oxenstored does on its socket, instead of refusing them.
func (s *Server) AnswerAsOxenstored() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.long = true
}

// Set writes nodes as a control domain, in the order path, value, path, value.
func (s *Server) Set(pathsAndValues ...string) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := 0; i+1 < len(pathsAndValues); i += 2 {
		if !validName(pathsAndValues[i]) {
			s.t.Fatalf("xenstoretest: %q is no path", pathsAndValues[i])
		}
		if err := s.store.write(0, pathsAndValues[i], pathsAndValues[i+1]); err != nil {
			s.t.Fatalf("xenstoretest: write %s: %v", pathsAndValues[i], err)
		}
	}
	s.flush()
}

// Remove removes a node and all nodes below it.
func (s *Server) Remove(path string) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.store.remove(0, path); err != nil {
		s.t.Fatalf("xenstoretest: remove %s: %v", path, err)
	}
	s.flush()
}

// Get returns a node's value.
func (s *Server) Get(path string) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.store.nodes[path]
	if n == nil {
		return "", false
	}
	return n.value, true
}

// Watches returns how many watches are registered.
func (s *Server) Watches() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for c := range s.conns {
		n += len(c.watches)
	}
	return n
}

// Transactions returns how many transactions are open.
func (s *Server) Transactions() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for c := range s.conns {
		n += len(c.transactions)
	}
	return n
}

// Requests returns how many requests have arrived.
func (s *Server) Requests() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests
}

type client struct {
	conn         net.Conn
	domain       uint16
	watches      []watch
	transactions map[uint32]*view

	out   [][]byte // answers to be sent; guarded by the server's mutex
	owed  int      // number of answers in out
	wake  chan struct{}
	ended chan struct{}
	once  sync.Once
}

type watch struct{ path, given, token string }

func (c *client) close() {
	c.once.Do(func() {
		close(c.ended)
		_ = c.conn.Close()
	})
}

func (c *client) send(m xenstore.Message) {
	c.out = append(c.out, m.Encode())
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (s *Server) serve(nc net.Conn, domain uint16) {
	c := &client{conn: nc, domain: domain, transactions: map[uint32]*view{}, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	s.mu.Lock()
	s.conns[c] = true
	s.mu.Unlock()
	s.wg.Go(func() {
		defer c.close()
		for {
			select {
			case <-c.wake:
			case <-c.ended:
				return
			}
			s.mu.Lock()
			kernel := s.zeroIDs
			s.mu.Unlock()
			if kernel {
				time.Sleep(time.Millisecond) // for clients that do not wait for answers
			}
			s.mu.Lock()
			out := c.out
			c.out, c.owed = nil, 0
			s.mu.Unlock()
			for _, b := range out {
				if _, err := nc.Write(b); err != nil {
					return
				}
			}
		}
	})
	s.wg.Go(func() {
		defer func() {
			c.close()
			s.mu.Lock()
			delete(s.conns, c)
			s.mu.Unlock()
		}()
		for {
			m, err := xenstore.ReadMessage(nc, xenstore.MaxPayload)
			if err != nil {
				return
			}
			s.mu.Lock()
			hung := s.hung
			s.requests++
			s.mu.Unlock()
			if hung != nil {
				select {
				case <-hung:
				case <-c.ended:
					return
				}
			}
			s.mu.Lock()
			s.answer(c, m)
			s.mu.Unlock()
		}
	})
}

func (s *Server) answer(c *client, m xenstore.Message) {
	reply := xenstore.Message{Op: m.Op, Request: m.Request, TxID: m.TxID}
	if s.zeroIDs && (m.Op == xenstore.OpWatch || m.Op == xenstore.OpUnwatch) {
		reply.Request = 0
		if c.owed > 0 {
			s.t.Errorf("xenstoretest: %s while %d answers are outstanding", m.Op, c.owed)
		}
	}
	payload, after, err := s.request(c, m)
	if err == nil && len(payload) > xenstore.MaxPayload && !s.long {
		err = syscall.E2BIG
	}
	if err != nil {
		errno := syscall.EINVAL
		errors.As(err, &errno)
		reply.Op, payload = xenstore.OpError, []byte(xenstore.ErrnoName(errno)+"\x00")
	}
	reply.Payload = payload
	c.owed++
	c.send(reply)
	if after != nil && err == nil {
		after()
	}
	s.flush()
}

// home returns the path to which relative paths are relative.
func (c *client) home() string { return fmt.Sprintf("/local/domain/%d/", c.domain) }

func (c *client) resolve(path string) (string, error) {
	if !strings.HasPrefix(path, "/") {
		path = c.home() + path
	}
	if !validName(path) {
		return "", syscall.EINVAL
	}
	return path, nil
}

// request executes a request. It returns the answer, and a function to call after the
// answer was sent.
func (s *Server) request(c *client, m xenstore.Message) (reply []byte, after func(), err error) {
	v := s.store
	if m.TxID != 0 && m.Op != xenstore.OpTransactionEnd {
		if v = c.transactions[m.TxID]; v == nil {
			return nil, nil, syscall.ENOENT
		}
	}
	ok := []byte("OK\x00")
	args := xenstore.Strings(m.Payload)
	terminated := len(m.Payload) > 0 && m.Payload[len(m.Payload)-1] == 0
	if m.Op != xenstore.OpWrite && !terminated || len(args) == 0 {
		return nil, nil, syscall.EINVAL
	}
	switch m.Op {
	case xenstore.OpWatch, xenstore.OpUnwatch:
		if len(args) != 2 {
			return nil, nil, syscall.EINVAL
		}
		return s.watch(c, m.Op, args[0], args[1])
	case xenstore.OpTransactionStart:
		if m.TxID != 0 {
			return nil, nil, syscall.EBUSY
		}
		s.lastTx++
		c.transactions[s.lastTx] = s.store.begin()
		return []byte(strconv.FormatUint(uint64(s.lastTx), 10) + "\x00"), nil, nil
	case xenstore.OpTransactionEnd:
		tx := c.transactions[m.TxID]
		switch {
		case tx == nil:
			return nil, nil, syscall.ENOENT
		case args[0] != "T" && args[0] != "F":
			return nil, nil, syscall.EINVAL
		}
		delete(c.transactions, m.TxID)
		if args[0] == "T" && !s.store.commit(tx) {
			return nil, nil, syscall.EAGAIN
		}
		return ok, nil, nil
	case xenstore.OpGetDomainPath, xenstore.OpIsIntroduced:
		n, err := strconv.ParseUint(args[0], 10, 16)
		if err != nil {
			return nil, nil, syscall.EINVAL
		}
		if m.Op == xenstore.OpGetDomainPath {
			return fmt.Appendf(nil, "/local/domain/%d\x00", n), nil, nil
		}
		if c.domain != 0 {
			return nil, nil, syscall.EACCES
		}
		if s.introduced[uint16(n)] {
			return []byte("T\x00"), nil, nil
		}
		return []byte("F\x00"), nil, nil
	}
	path, err := c.resolve(args[0])
	if err != nil {
		return nil, nil, err
	}
	if reply, read, err := s.read(v, c, m.Op, path, args); read {
		return reply, nil, err
	}
	switch m.Op {
	case xenstore.OpWrite:
		name, value, found := strings.Cut(string(m.Payload), "\x00")
		if !found || name != args[0] {
			return nil, nil, syscall.EINVAL
		}
		err = v.write(c.domain, path, value)
	case xenstore.OpMkdir:
		err = v.mkdir(c.domain, path)
	case xenstore.OpRm:
		err = v.remove(c.domain, path)
	case xenstore.OpSetPerms:
		err = setPerms(v, c.domain, path, args[1:])
	default:
		err = syscall.ENOSYS
	}
	return ok, nil, err
}

func (s *Server) read(v *view, c *client, op xenstore.Op, path string, args []string) (reply []byte, read bool, err error) {
	switch op {
	case xenstore.OpRead, xenstore.OpDirectory, xenstore.OpDirectoryPart, xenstore.OpGetPerms:
	default:
		return nil, false, nil
	}
	if err := v.check(c.domain, path, xenstore.AccessRead); err != nil {
		return nil, true, err
	}
	n := v.get(path)
	var list []byte
	for _, child := range n.children {
		list = append(append(list, child...), 0)
	}
	switch op {
	case xenstore.OpRead:
		return []byte(n.value), true, nil
	case xenstore.OpGetPerms:
		for _, p := range n.perms {
			reply = append(append(reply, p.String()...), 0)
		}
		return reply, true, nil
	case xenstore.OpDirectory:
		return list, true, nil
	}
	if len(args) != 2 {
		return nil, true, syscall.EINVAL
	}
	offset, err := strconv.Atoi(args[1])
	if err != nil || offset < 0 {
		return nil, true, syscall.EINVAL
	}
	reply = append(strconv.AppendUint(nil, n.generation, 10), 0)
	list = list[min(offset, len(list)):]
	for len(list) > 0 {
		end := slices.Index(list, 0) + 1
		if len(reply)+end > xenstore.MaxPayload-1 {
			return reply, true, nil
		}
		reply = append(reply, list[:end]...)
		list = list[end:]
	}
	return append(reply, 0), true, nil
}

func setPerms(v *view, domain uint16, path string, perms []string) error {
	n := v.get(path)
	switch {
	case n == nil:
		return syscall.ENOENT
	case len(perms) == 0:
		return syscall.EINVAL
	case domain != 0 && n.perms[0].Domain != domain:
		return syscall.EACCES
	}
	with := *n
	with.perms = nil
	for _, text := range perms {
		p, err := xenstore.ParsePermission(text)
		if err != nil {
			return syscall.EINVAL
		}
		with.perms = append(with.perms, p)
	}
	if domain != 0 && with.perms[0].Domain != domain { // only a control domain may change the owner
		return syscall.EPERM
	}
	v.put(path, with)
	v.changed = append(v.changed, change{path: path})
	return nil
}

func (s *Server) watch(c *client, op xenstore.Op, given, token string) (reply []byte, after func(), err error) {
	path := given
	if !strings.HasPrefix(given, "@") {
		if path, err = c.resolve(given); err != nil {
			return nil, nil, err
		}
	}
	w := watch{path, given, token}
	at := slices.Index(c.watches, w)
	if op == xenstore.OpUnwatch {
		if at < 0 {
			return nil, nil, syscall.ENOENT
		}
		c.watches = slices.Delete(c.watches, at, at+1)
		return []byte("OK\x00"), nil, nil
	}
	if at >= 0 {
		return nil, nil, syscall.EEXIST
	}
	c.watches = append(c.watches, w)
	return []byte("OK\x00"), func() { c.tell(w, given) }, nil
}

func (c *client) tell(w watch, path string) {
	c.send(xenstore.Message{Op: xenstore.OpWatchEvent, Payload: []byte(path + "\x00" + w.token + "\x00")})
}

// flush sends the events of all changes to the watches.
func (s *Server) flush() {
	for _, ch := range s.store.changed {
		for c := range s.conns {
			if c.domain != 0 && !s.sees(c.domain, ch.path) {
				continue
			}
			for _, w := range c.watches {
				below := w.path == "/" || strings.HasPrefix(ch.path, w.path+"/")
				if ch.path == w.path || below && !ch.exact {
					told := ch.path
					if w.given != w.path {
						told = w.given + strings.TrimPrefix(ch.path, w.path)
					}
					c.tell(w, told)
				}
			}
		}
	}
	s.store.changed = nil
}

// sees reports whether a guest may read a node, or the nearest existing one above it.
func (s *Server) sees(domain uint16, path string) bool {
	for s.store.nodes[path] == nil {
		path = parent(path)
	}
	return allowed(s.store.nodes[path].perms, domain, xenstore.AccessRead)
}

func (s *Server) fire(special string) {
	for c := range s.conns {
		for _, w := range c.watches {
			if w.path == special && c.domain == 0 {
				c.tell(w, special)
			}
		}
	}
}
