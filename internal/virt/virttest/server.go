package virttest

import (
	"encoding/hex"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"libvirt.org/go/libvirtxml"
)

// Fault is what happens to a call.
type Fault struct {
	// Code and Message are an error of libvirt. From is the part of libvirt that it is from
	// (virErrorDomain); 0: the driver.
	Code, From uint32
	Message    string
	// Do executes the call before anything else happens. Otherwise the call is not
	// executed, whatever its answer is.
	Do bool
	// Delay is how long the answer takes.
	Delay time.Duration
	// Silent sends no answer. Cut closes the connection instead.
	Silent, Cut bool
	// Raw is sent instead of the answer.
	Raw []byte
	// Answer is sent as the body of the answer.
	Answer []byte
	// Twice sends the answer twice.
	Twice bool
}

// Server is a libvirtd.
type Server struct {
	t      testing.TB
	xen    bool
	socket string

	mu       sync.Mutex
	listener net.Listener
	conns    map[net.Conn]*peer
	events   map[net.Conn]bool
	faults   map[string][]Fault // faults of the next calls
	always   map[string]Fault
	calls    []string
	domains  map[[16]byte]*domain
	peers    map[string]*Server
	loses    bool // the next outgoing migration loses its last answer
	jammed   bool // nothing of a domain's memory gets to peers
	nextID   int
	frozen   chan struct{} // closed by Thaw; nil: not frozen
	work     sync.WaitGroup
}

// peer is a client's connection.
type peer struct {
	mu     sync.Mutex  // held while writing
	events chan []byte // events to be sent, in order
}

type domain struct {
	name    string
	uuid    [16]byte
	id      int
	config  string // persistent definition, or empty
	xml     string // XML of the running domain
	state   uint32
	reason  uint32   // of paused
	devices []string // sources of the running domain's host devices
	job     *job     // nil: none
	arrives bool     // its source has failed
	boots   bool     // autostart
}

// job is a migration that leaves. An abort ends it at once, except while the connection to the
// peer is opened: libvirt can't interrupt that, and looks afterwards.
type job struct {
	over    chan struct{} // closed when it is aborted, or libvirtd dies
	aborted bool
	opening bool
	sent    uint64
}

// abort aborts a domain's job. The caller holds mu.
func (d *domain) abort() {
	if !d.job.aborted {
		d.job.aborted = true
		close(d.job.over)
	}
	if !d.job.opening {
		d.job = nil
	}
}

// copying is how long a migration takes.
const copying = time.Second

const (
	running = 1
	paused  = 3
	shutOff = 5

	pausedMigration = 2 // virDomainPausedReason
)

// Start starts a libvirtd for xen or qemu. It ends with the test.
func Start(t testing.TB, driver string) *Server {
	s := &Server{
		t: t, xen: driver == "xen", socket: filepath.Join(t.TempDir(), "libvirt-sock"),
		conns: map[net.Conn]*peer{}, events: map[net.Conn]bool{}, faults: map[string][]Fault{}, always: map[string]Fault{},
		domains: map[[16]byte]*domain{}, peers: map[string]*Server{},
	}
	s.Up()
	t.Cleanup(func() {
		s.Thaw()
		s.Down()
		s.work.Wait()
	})
	return s
}

// Socket returns the path of its socket.
func (s *Server) Socket() string { return s.socket }

// Up listens again after Down.
func (s *Server) Up() {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := net.Listen("unix", s.socket)
	if err != nil {
		s.t.Fatal(err)
	}
	s.listener = l
	s.work.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p := &peer{events: make(chan []byte, 1<<16)}
			s.mu.Lock()
			s.conns[conn] = p
			s.mu.Unlock()
			s.work.Go(func() {
				for e := range p.events {
					s.send(conn, e)
				}
			})
			s.work.Go(func() { s.serve(conn) })
		}
	})
}

// Down has the effect of kill -9: the socket and all connections are closed, domains go
// on.
func (s *Server) Down() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener != nil {
		s.listener.Close()
		s.listener = nil
	}
	for conn := range s.conns {
		conn.Close()
	}
	for _, d := range s.domains {
		if d.job != nil {
			d.job.opening = false
			d.abort()
		}
	}
}

// Freeze has the effect of SIGSTOP: the kernel accepts connections, but nothing is read.
func (s *Server) Freeze() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.frozen == nil {
		s.frozen = make(chan struct{})
	}
}

// Thaw has the effect of SIGCONT.
func (s *Server) Thaw() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.frozen != nil {
		close(s.frozen)
		s.frozen = nil
	}
}

// Next sets faults for the next calls with this name, one for each.
func (s *Server) Next(call string, faults ...Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known(call)
	s.faults[call] = append(s.faults[call], faults...)
}

// Always sets a fault for all calls with this name; nil removes it.
func (s *Server) Always(call string, f *Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known(call)
	delete(s.always, call)
	if f != nil {
		s.always[call] = *f
	}
}

func (s *Server) known(call string) {
	for _, name := range procedures() {
		if name == call {
			return
		}
	}
	panic("virttest: no call is named " + call)
}

// Calls returns the names of the calls that have arrived, in order.
func (s *Server) Calls() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// Conns returns how many connections are open.
func (s *Server) Conns() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// Peer sets the server for migrations to this URI.
func (s *Server) Peer(uri string, to *Server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.peers[uri] = to
}

// Arrive puts a domain into the state in which libxl's driver keeps a domain whose source
// has failed during its migration to this host.
func (s *Server) Arrive(name string) { s.arrive(name, paused) }

// Prepare puts a domain into the state in which libxl's driver keeps a domain whose source
// was to migrate it to this host, and has never connected.
func (s *Server) Prepare(name string) { s.arrive(name, shutOff) }

func (s *Server) arrive(name string, state uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.domains {
		if d.name == name {
			d.state, d.config, d.arrives = state, "", true
		}
	}
}

// Leave puts a domain into the state in which libxl's driver leaves it on the source of a
// migration that has failed, if Xen refuses to resume it.
func (s *Server) Leave(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.domains {
		if d.name == name {
			d.state, d.reason = paused, pausedMigration
		}
	}
}

// LoseAnswer makes the next migration from this server lose the destination's last
// answer, after which the domain runs there. libvirt's drivers then let the domain go on
// here, too.
func (s *Server) LoseAnswer() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loses = true
}

// Jam keeps the memory of domains that migrate from getting to peers. libvirtds still reach each
// other.
func (s *Server) Jam() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.jammed = true
}

// Devices returns the sources of a running domain's host devices.
func (s *Server) Devices(name string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.domains {
		if d.name == name {
			return slices.Clone(d.devices)
		}
	}
	return nil
}

// serve answers the calls of one client, several at a time as libvirtd does.
func (s *Server) serve(conn net.Conn) {
	defer func() {
		conn.Close()
		s.mu.Lock()
		close(s.conns[conn].events)
		delete(s.conns, conn)
		delete(s.events, conn)
		s.mu.Unlock()
	}()
	for {
		s.thawed()
		req, err := readRequest(conn)
		if err != nil {
			return
		}
		s.thawed()
		s.work.Go(func() { s.answer(conn, req) })
	}
}

func (s *Server) thawed() {
	s.mu.Lock()
	frozen := s.frozen
	s.mu.Unlock()
	if frozen != nil {
		<-frozen
	}
}

func (s *Server) answer(conn net.Conn, req request) {
	name, ok := procedures()[req.procedure]
	if !ok {
		s.send(conn, frame(req.procedure, kindReply, req.serial, statusError, failure(39, 0, fmt.Sprintf("unknown procedure: %d", req.procedure))))
		return
	}
	s.mu.Lock()
	s.calls = append(s.calls, name)
	f, faulty := s.always[name]
	if q := s.faults[name]; len(q) > 0 {
		f, faulty = q[0], true
		s.faults[name] = q[1:]
	}
	s.mu.Unlock()

	var body []byte
	var err *refusal
	if !faulty || f.Do {
		body, err = s.call(conn, req)
	}
	if f.Delay > 0 {
		time.Sleep(f.Delay)
	}
	switch {
	case f.Silent:
		return
	case f.Cut:
		conn.Close()
		return
	case f.Raw != nil:
		s.send(conn, f.Raw)
		return
	case f.Answer != nil:
		body, err = f.Answer, nil
	case f.Code != 0:
		err = &refusal{f.Code, f.From, f.Message}
	}
	out := frame(req.procedure, kindReply, req.serial, statusOK, body)
	if err != nil {
		out = frame(req.procedure, kindReply, req.serial, statusError, failure(err.code, err.from, err.message))
	}
	s.send(conn, out)
	if f.Twice {
		s.send(conn, out)
	}
}

func (s *Server) send(conn net.Conn, b []byte) {
	s.mu.Lock()
	p := s.conns[conn]
	s.mu.Unlock()
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	// A client that does not read, or has left, must not affect others.
	if conn.SetWriteDeadline(time.Now().Add(5*time.Second)) == nil {
		_, _ = conn.Write(b)
	}
}

// emit sends a lifecycle event to all who have registered. The caller holds mu.
func (s *Server) emit(d *domain, event, detail uint32) {
	var w writer
	w.u32(1)
	w.domain(d)
	w.u32(event)
	w.u32(detail)
	for conn := range s.events {
		s.conns[conn].events <- frame(procEvent, kindMessage, 0, statusOK, w)
	}
}

// refusal is an error of libvirt.
type refusal struct {
	code, from uint32
	message    string
}

func refuse(code uint32, format string, args ...any) *refusal {
	return &refusal{code, 0, fmt.Sprintf(format, args...)}
}

// call executes a call.
func (s *Server) call(conn net.Conn, req request) ([]byte, *refusal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var w writer
	r := &req.body
	switch name := procedures()[req.procedure]; name {
	case "open":
		want := "qemu:///system"
		if s.xen {
			want = "xen:///system"
		}
		if uri := r.opt(); uri != want {
			return nil, refuse(5, "no connection driver available for %s", uri)
		}
	case "close":
	case "auth list":
		w.u32(1)
		w.u32(0)
	case "version", "hypervisor version":
		w.u64(9_000_000)
	case "type":
		w.str(map[bool]string{true: "Xen", false: "QEMU"}[s.xen])
	case "capabilities":
		w.str("<capabilities/>")
	case "hostname":
		w.str("virttest")
	case "free memory":
		w.u64(64 << 30)
	case "register":
		if s.conns[conn] != nil { // the connection may have ended meanwhile
			s.events[conn] = true
		}
		w.u32(r.u32())
	case "list":
		w.u32(uint32(len(s.domains)))
		for _, d := range s.domains {
			w.domain(d)
		}
		w.u32(uint32(len(s.domains)))
	case "define":
		d, err := s.define(r.str())
		if err != nil {
			return nil, err
		}
		w.domain(d)
	case "finish":
		name := ""
		for range min(r.u32(), 8) {
			if field, kind := r.str(), r.u32(); field == "destination_name" && kind == 7 {
				name = r.str()
			}
		}
		r.str() // cookie
		r.u32() // flags
		cancelled := r.u32() != 0
		for _, d := range s.domains {
			if d.name == name && d.arrives && cancelled && !r.bad {
				delete(s.domains, d.uuid)
				return nil, refuse(0, "An error occurred, but the cause is unknown")
			}
		}
		return nil, refuse(55, "Requested operation is not valid: no migration to finish")
	case "lookup name":
		n := r.str()
		for _, d := range s.domains {
			if d.name == n {
				w.domain(d)
				return w, nil
			}
		}
		return nil, refuse(42, "Domain not found: no domain with matching name '%s'", n)
	case "lookup uuid":
		var u [16]byte
		copy(u[:], r.take(16))
		d := s.domains[u]
		if d == nil {
			return nil, refuse(42, "Domain not found: no domain with matching uuid '%s'", hex.EncodeToString(u[:]))
		}
		w.domain(d)
	default:
		n, u := r.domain()
		d := s.domains[u]
		if d == nil {
			return nil, refuse(42, "Domain not found: no domain with matching uuid '%s' (%s)", hex.EncodeToString(u[:]), n)
		}
		if err := s.onDomain(name, d, r, &w); err != nil {
			return nil, err
		}
	}
	if r.bad {
		return nil, refuse(39, "Unable to decode message payload")
	}
	return w, nil
}

// onDomain executes a call about a domain.
func (s *Server) onDomain(call string, d *domain, r *reader, w *writer) *refusal {
	if d.arrives && !slices.Contains([]string{"dumpxml", "domstate", "domjobinfo", "is persistent"}, call) {
		return refuse(68, "Timed out during operation: cannot acquire state change lock (held by monitor=remoteDispatchDomainMigratePrepare3Params)")
	}
	active := d.state != shutOff
	if !active && slices.Contains([]string{"destroy", "shutdown", "suspend", "resume", "migrate", "domjobabort"}, call) {
		return refuse(55, "Requested operation is not valid: domain is not running")
	}
	switch call {
	case "dumpxml":
		if inactive := r.u32()&2 != 0; active && !inactive {
			w.str(d.xml)
		} else if d.config == "" {
			w.str(d.xml)
		} else {
			w.str(d.config)
		}
	case "domstate":
		w.u32(d.state)
		if d.state == paused {
			w.u32(d.reason)
		} else {
			w.u32(0)
		}
	case "start":
		if active {
			return refuse(55, "Requested operation is not valid: domain is already running")
		}
		devices, err := hostDevices(d.config)
		if err != nil {
			return refuse(27, "%v", err)
		}
		for _, dev := range devices {
			if err := s.free(dev); err != nil {
				return err
			}
		}
		s.nextID++
		d.id, d.state, d.xml, d.devices = s.nextID, running, d.config, devices
		s.emit(d, 2, 0)
		w.domain(d)
	case "destroy", "shutdown":
		s.stop(d, 1)
	case "suspend":
		d.state = paused
		s.emit(d, 3, 0)
	case "resume":
		if d.state == paused && d.reason == pausedMigration {
			return refuse(9, "operation failed: Failed to resume domain '3' with libxenlight") // it is not paused
		}
		d.state = running
		s.emit(d, 4, 0)
	case "attach-device", "detach-device":
		return s.device(call == "attach-device", d, r.str(), r.u32())
	case "snapshots", "checkpoints":
		w.saved(call, d)
	case "domjobinfo":
		s.jobInfo(d, w)
	case "domjobabort":
		if s.xen {
			return refuse(3, "this function is not supported by the connection driver: virDomainAbortJob")
		}
		if d.job == nil {
			return refuse(55, "Requested operation is not valid: no job is active on the domain")
		}
		d.abort()
	case "migrate":
		w.u32(0) // no cookie
		return s.migrate(d, r.opt())
	default:
		return s.onDefinition(call, d, r, w)
	}
	return nil
}

func (s *Server) jobInfo(d *domain, w *writer) {
	if d.job == nil {
		w.u32(0)
		w.u32(0)
		return
	}
	total := uint64(1 << 20)
	switch {
	case d.job.opening, s.xen:
		total = 0 // nothing is known of the memory yet, or ever
	case !s.jammed:
		d.job.sent++
	}
	w.u32(2)
	w.u32(4)
	for _, p := range []struct {
		name  string
		value uint64
	}{{"time_elapsed", 100}, {"data_total", total}, {"data_processed", d.job.sent}, {"data_remaining", total - d.job.sent}} {
		w.str(p.name)
		w.u32(4)
		w.u64(p.value)
	}
}

func (s *Server) stop(d *domain, detail uint32) {
	d.state, d.id, d.devices = shutOff, -1, nil
	s.emit(d, 5, detail)
	if d.config == "" {
		delete(s.domains, d.uuid)
	}
}

func (s *Server) define(xml string) (*domain, *refusal) {
	var x libvirtxml.Domain
	if err := x.Unmarshal(xml); err != nil || x.Name == "" {
		return nil, refuse(27, "XML error: (domain_definition): %v", err)
	}
	var u [16]byte
	if b, err := hex.DecodeString(strings.ReplaceAll(x.UUID, "-", "")); err != nil || copy(u[:], b) != 16 {
		return nil, refuse(27, "XML error: malformed uuid element")
	}
	for _, d := range s.domains {
		if (d.name == x.Name) != (d.uuid == u) {
			return nil, refuse(9, "operation failed: domain '%s' already exists with uuid %s", d.name, hex.EncodeToString(d.uuid[:]))
		}
	}
	d := s.domains[u]
	if d == nil {
		d = &domain{name: x.Name, uuid: u, id: -1, state: shutOff}
		s.domains[u] = d
	}
	d.config = xml
	s.emit(d, 0, 0)
	return d, nil
}

// device attaches or detaches a host device, following the rules of the driver.
func (s *Server) device(attach bool, d *domain, xml string, flags uint32) *refusal {
	source, err := source(xml)
	if err != nil {
		return refuse(27, "XML error: %v", err)
	}
	if flags&1 == 0 {
		return nil
	}
	if d.state == shutOff {
		return refuse(55, "Requested operation is not valid: domain is not running")
	}
	i := slices.Index(d.devices, source)
	if !attach {
		if i < 0 {
			return refuse(99, "device not found: host pci device %s not found", source)
		}
		d.devices = slices.Delete(d.devices, i, i+1)
		return nil
	}
	if err := s.free(source); err != nil {
		return err
	}
	if s.xen && !strings.Contains(d.xml, "<passthrough state='on'/>") && !strings.Contains(d.xml, `<passthrough state="on"/>`) {
		return refuse(1, "internal error: libxenlight failed to attach pci device %s", source)
	}
	d.devices = append(d.devices, source)
	return nil
}

func (s *Server) free(source string) *refusal {
	for _, other := range s.domains {
		if slices.Contains(other.devices, source) {
			return refuse(55, "Requested operation is not valid: PCI device %s is in use by driver %s, domain %s",
				source, map[bool]string{true: "xenlight", false: "QEMU"}[s.xen], other.name)
		}
	}
	return nil
}

// migrate moves a domain to the peer. The caller holds mu, which is unlocked while memory
// would be copied.
func (s *Server) migrate(d *domain, uri string) *refusal {
	to := s.peers[uri]
	switch {
	case to == nil:
		return refuse(38, "unable to connect to server at '%s': Connection refused", uri)
	case len(d.devices) > 0:
		return refuse(55, "Requested operation is not valid: domain has assigned host devices")
	case d.job != nil:
		return refuse(68, "Timed out during operation: cannot acquire state change lock")
	}
	j := &job{over: make(chan struct{}), opening: true}
	d.job = j
	jammed := s.jammed
	s.mu.Unlock()
	to.thawed()
	s.mu.Lock()
	j.opening = false
	s.mu.Unlock()
	var copied <-chan time.Time // never, if nothing gets through
	if !jammed {
		copied = time.After(copying)
	}
	select {
	case <-j.over:
	case <-copied:
	}
	to.mu.Lock()
	defer to.mu.Unlock()
	s.mu.Lock()
	if j.aborted {
		if d.job == j {
			d.job = nil
		}
		return refuse(78, "operation aborted: migration out job: canceled by client")
	}
	d.job = nil
	if to.domains[d.uuid] != nil && to.domains[d.uuid].state != shutOff {
		return refuse(55, "Requested operation is not valid: domain '%s' is already active", d.name)
	}
	to.nextID++
	moved := &domain{name: d.name, uuid: d.uuid, id: to.nextID, xml: d.xml, state: d.state}
	to.domains[d.uuid] = moved
	to.emit(moved, 2, 1)
	if s.loses { // libvirt takes that for a failure, and lets the domain go on here
		s.loses = false
		s.emit(d, 4, 1)
		return refuse(38, "Cannot recv data: Connection reset by peer")
	}
	s.stop(d, 3)
	return nil
}

// hostDevices returns the sources of a domain's host devices.
func hostDevices(xml string) ([]string, error) {
	var x libvirtxml.Domain
	if err := x.Unmarshal(xml); err != nil {
		return nil, err
	}
	var out []string
	if x.Devices != nil {
		for i := range x.Devices.Hostdevs {
			s, err := sourceOf(&x.Devices.Hostdevs[i])
			if err != nil {
				return nil, err
			}
			out = append(out, s)
		}
	}
	return out, nil
}

func source(xml string) (string, error) {
	var h libvirtxml.DomainHostdev
	if err := h.Unmarshal(xml); err != nil {
		return "", err
	}
	return sourceOf(&h)
}

func sourceOf(h *libvirtxml.DomainHostdev) (string, error) {
	switch {
	case h.SubsysPCI != nil && h.SubsysPCI.Source != nil && h.SubsysPCI.Source.Address != nil:
		a := h.SubsysPCI.Source.Address
		if a.Domain == nil || a.Bus == nil || a.Slot == nil || a.Function == nil {
			return "", fmt.Errorf("incomplete PCI address")
		}
		return fmt.Sprintf("%04x:%02x:%02x.%x", *a.Domain, *a.Bus, *a.Slot, *a.Function), nil
	case h.SubsysMDev != nil && h.SubsysMDev.Source != nil && h.SubsysMDev.Source.Address != nil:
		return h.SubsysMDev.Source.Address.UUID, nil
	}
	return "", fmt.Errorf("unsupported device")
}
