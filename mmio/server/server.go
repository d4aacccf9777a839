package server

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/xen"
)

// Server has one mediated GPU.
type Server struct {
	Dir   string // folder of the socket, the journal and the lock
	Name  string // of the GPU
	Model Model
	GPU   *mediate.GPU
	Xen   xen.Hypervisor
	Log   *slog.Logger

	router mmio.Router

	mu    sync.Mutex // held while parts change
	parts map[string]*part
	last  mmio.VM
}

// part is a part that a domain has.
type part struct {
	Part
	vm     mmio.VM
	server *xen.Server
	stats  *mmio.Stats
	lost   string
	state  State
	seal   string             // while it is Sealed or Given
	busy   bool               // an operation on it goes on while nobody holds the server's lock
	stop   context.CancelFunc // nil: it is not served
	ended  chan struct{}      // closed when it is not served any more
}

// entry is what the journal has of a part.
type entry struct {
	Part
	Server uint16 `json:"server"` // Xen's number
}

// Socket is where the process that has a GPU answers.
func Socket(dir, gpu string) string { return filepath.Join(dir, gpu+".sock") }

func (s *Server) journal() string { return filepath.Join(s.Dir, s.Name+".json") }

// patience limits one change of a part.
const patience = 20 * time.Second

// ErrBusy means that another process has the GPU.
var ErrBusy = errors.New("another process has the GPU")

// Run has the GPU until ctx ends. Then parts are left as they are: their VMs wait for the
// next process, and are told by it that their GPU is gone. ready is called when the
// process answers. If another process has the GPU, the error wraps ErrBusy.
func (s *Server) Run(ctx context.Context, ready func()) error {
	lock, err := os.OpenFile(filepath.Join(s.Dir, s.Name+".lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("mediated gpu %s: %w", s.Name, err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("mediated gpu %s: %w", s.Name, ErrBusy)
	}
	s.parts = map[string]*part{}
	if err := s.adopt(); err != nil {
		return fmt.Errorf("mediated gpu %s: %w", s.Name, err)
	}
	l, err := rundir.Listen(Socket(s.Dir, s.Name))
	if err != nil {
		return fmt.Errorf("mediated gpu %s: %w", s.Name, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { s.run(ctx) })
	wg.Go(func() {
		<-ctx.Done()
		l.Close()
	})
	ready()
	s.accept(ctx, l, &wg)
	s.release()
	wg.Wait()
	return ctx.Err()
}

// acceptPause is how long it is waited after a connection could not be accepted.
const acceptPause = 100 * time.Millisecond

// accept answers connections until ctx ends. An error, as that no descriptors are left, passes:
// the process does not end for it, and with it the GPU's contents.
func (s *Server) accept(ctx context.Context, l net.Listener, wg *sync.WaitGroup) {
	for {
		c, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = c.Close()
			}
			return
		case err != nil:
			s.Log.Warn("a connection of hostd was not accepted", "gpu", s.Name, "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(acceptPause):
			}
			continue
		}
		wg.Go(func() { s.answer(ctx, c) })
	}
}

// release ends this process's work on all parts.
func (s *Server) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.parts {
		p.halt()
		_ = p.server.Close()
	}
}

// halt stops serving.
func (p *part) halt() {
	if p.stop != nil {
		p.stop()
		<-p.ended
		p.stop = nil
	}
}

// serve answers the accesses of a part until it is halted.
func (s *Server) serve(p *part, d mmio.Device) {
	ctx, cancel := context.WithCancel(context.Background())
	p.stop, p.ended = cancel, make(chan struct{})
	go func() {
		defer close(p.ended)
		if err := p.server.Serve(ctx, d); err != nil && ctx.Err() == nil {
			s.Log.Error("a VM's accesses are not answered any more", "gpu", s.Name, "vm", p.Name, "err", err)
		}
	}()
}

// adopt takes over the ioreq servers of a process that has died.
func (s *Server) adopt() error {
	info, err := os.Stat(s.journal())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var data []byte
	if err == nil && info.Size() > maxMessage {
		err = fmt.Errorf("it has %d bytes", info.Size())
	}
	if err == nil {
		data, err = os.ReadFile(s.journal())
	}
	var entries []entry
	if err == nil {
		entries, err = decodeJournal(data)
	}
	if err != nil {
		return fmt.Errorf("journal %s: %w; it says which VMs wait for a server: end these VMs and remove it", s.journal(), err)
	}
	for _, e := range entries {
		x, err := xen.Adopt(s.Xen, e.Domain, e.Server)
		if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			s.Log.Info("the domain of a part has ended, or its server was never enabled", "gpu", s.Name, "vm", e.Name, "err", err)
			continue
		}
		if err != nil {
			return err
		}
		p := &part{Part: e.Part, server: x, stats: &mmio.Stats{}, state: Served, lost: "the process that had it has ended, and its contents with it"}
		s.serve(p, xen.Gone{})
		s.parts[p.ID] = p
		s.Log.Warn("a VM's part of a GPU is lost and reads as ones", "gpu", s.Name, "vm", e.Name, "domain", e.Domain)
	}
	return s.save()
}

func decodeJournal(data []byte) ([]entry, error) {
	var out []entry
	if err := json.Unmarshal(data, &out); err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, e := range out {
		if e.ID == "" || seen[e.ID] || e.Domain == 0 || len(out) > 2*MaxParts {
			return nil, fmt.Errorf("part %.64q of domain %d makes no sense", e.ID, e.Domain)
		}
		seen[e.ID] = true
	}
	return out, nil
}

// save writes the journal. also is a part that is being made. The caller holds s.mu, or
// nobody else has s yet.
func (s *Server) save(also ...entry) error {
	out := also
	for _, p := range s.parts {
		out = append(out, entry{p.Part, p.server.ID()})
	}
	slices.SortFunc(out, func(a, b entry) int { return strings.Compare(a.ID, b.ID) })
	data, err := json.MarshalIndent(out, "", "\t")
	if err != nil {
		return err
	}
	return durable.Replace(s.journal(), append(data, '\n'), 0o600)
}

// answer serves one connection of the daemon.
func (s *Server) answer(ctx context.Context, c net.Conn) {
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	in := bufio.NewReaderSize(c, 64<<10)
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return
		}
		r, err := parse(line)
		var a answer
		switch {
		case err != nil:
			a = failed(err)
		case r.Op == opSave: // what follows its answer is no line
			s.sendState(c, r.Part.ID)
			return
		case r.Op == opRestore: // nor is what follows its request
			a = s.receiveState(in, c, r.Part.ID)
		default:
			a = s.do(ctx, r)
		}
		if reply(c, a) != nil || r.Op == opRestore {
			return
		}
	}
}

// reply sends an answer.
func reply(c net.Conn, a answer) error {
	out, err := json.Marshal(a)
	if err != nil {
		return err
	}
	_, err = c.Write(append(out, '\n'))
	return err
}

func (s *Server) do(ctx context.Context, r request) (a answer) {
	var err error
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	switch r.Op {
	case "attach":
		err = s.attach(ctx, r.Part)
	case "detach":
		err = s.detach(ctx, r.Part.ID)
	case opPark:
		err = s.park(ctx, r.Part.ID)
	case opGive:
		err = s.give(r.Part.ID, r.Seal)
	case opResume:
		err = s.resume(ctx, r.Part.ID)
	}
	if err != nil {
		return failed(err)
	}
	return answer{Parts: s.list()}
}

// attach gives a domain a part. Each step has an undo; after an error nothing is left.
func (s *Server) attach(ctx context.Context, p Part) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.parts[p.ID] != nil {
		return fmt.Errorf("%w: part %s of domain %d", ErrExists, p.ID, s.parts[p.ID].Domain)
	}
	if len(s.parts) >= 2*MaxParts {
		return fmt.Errorf("%w: %d parts, lost ones included, are all that there may be", ErrRefused, len(s.parts))
	}
	s.last++
	n := &part{Part: p, vm: s.last, stats: &mmio.Stats{}, state: Served}
	n.server, err = xen.Create(s.Xen, xen.Config{
		Domain: p.Domain, VM: n.vm, Slot: p.Slot, Function: s.GPU.Function(), Memory: p.Guest,
		Created: func(id uint16) error { return s.save(entry{p, id}) },
	})
	defer func() {
		if err != nil {
			err = errors.Join(err, s.save())
		}
	}()
	if err != nil {
		return err
	}
	destroy := func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		err := n.server.Destroy(ctx)
		switch {
		case err == nil:
		case gone(err):
			_ = n.server.Close() // or its domain would never end quite
		default: // a vCPU waits for it, and is answered for as long as it exists
			n.lost = "it could not be given"
			s.serve(n, xen.Gone{})
			s.parts[p.ID] = n
		}
		return err
	}
	if p.Await {
		if err := n.server.Restore(p.Config); err != nil {
			return errors.Join(fmt.Errorf("%w: %w", ErrRefused, err), destroy())
		}
	}
	if err := s.create(n); err != nil {
		return errors.Join(err, destroy())
	}
	if err := s.router.Attach(n.vm, s.GPU, s.GPU.Function(), n.stats); err != nil {
		return errors.Join(err, s.GPU.Destroy(n.vm), destroy())
	}
	if p.Await {
		n.state = Awaiting
	} else {
		s.serve(n, &s.router)
	}
	s.parts[p.ID] = n
	s.Log.Info("a VM has a part", "gpu", s.Name, "vm", p.Name, "domain", p.Domain, "slot", p.Slot, "memory", p.Memory)
	return nil
}

// detach takes a part back and scrubs it.
func (s *Server) detach(ctx context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.parts[id]
	if p == nil {
		return fmt.Errorf("%w: %s", ErrNotFound, id)
	}
	if p.busy {
		return fmt.Errorf("part %s: %w: another operation on it has not ended", id, ErrAgain)
	}
	p.halt()
	err := p.server.Destroy(ctx)
	switch {
	case errors.Is(err, xen.ErrWaiting):
		s.serve(p, xen.Gone{}) // the VM may go on later, and is answered then
		p.lost = cmp.Or(p.lost, "it was taken back")
		return err
	case err != nil && !gone(err):
		s.serve(p, xen.Gone{})
		p.lost = cmp.Or(p.lost, "it was taken back")
		return fmt.Errorf("part %s: %w", id, err)
	}
	_ = p.server.Close()
	if p.vm != 0 {
		s.router.Detach(p.vm)
		if err := s.GPU.Destroy(p.vm); err != nil && !errors.Is(err, mediate.ErrNoVGPU) {
			return fmt.Errorf("part %s: %w", id, err)
		}
	}
	delete(s.parts, id)
	s.Log.Info("a part was taken back", "gpu", s.Name, "vm", p.Name)
	return s.save()
}

// gone reports whether an error says that the domain has ended.
func gone(err error) bool {
	return errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL)
}

// list returns the parts, sorted by id.
func (s *Server) list() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Status
	for _, p := range s.parts {
		c := p.server.Counts()
		st := Status{Part: p.Part, State: p.state, Seal: p.seal, Lost: p.lost, Phases: map[string]Counts{}, Requests: c.Requests, Malformed: c.Refused}
		for i := range mmio.Phase(mmio.Phases) {
			n := p.stats.Counters(i)
			st.Phases[i.String()] = Counts{n.Exits(), n.Scans, n.Hypercalls, n.Refusals(), n.Doorbells}
		}
		if st.Config = nil; p.state == Parked || p.state == Sealed || p.state == Given {
			st.Config = p.server.Config()
		}
		if u, err := s.GPU.Usage(p.vm); err == nil {
			st.Busy = u.Busy
		}
		out = append(out, st)
	}
	slices.SortFunc(out, func(a, b Status) int { return strings.Compare(a.ID, b.ID) })
	return out
}
