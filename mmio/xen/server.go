package xen

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/pciconf"
)

// Errors.
var (
	// ErrConfig means that there can be no such server.
	ErrConfig = errors.New("no such ioreq server can be")
	// ErrEarly means that the domain does not have all of its vCPUs yet: it is being made. Nothing
	// is left, and Create may be called again.
	ErrEarly = errors.New("the domain has not got its vCPUs yet")
	// ErrWaiting means that a vCPU has not taken its answer: the domain is paused. The
	// server is disabled, and destroyed when Destroy is called again later.
	ErrWaiting = errors.New("a vCPU waits for the server")
)

const maxVCPUs = 4096

// Config describes a server.
type Config struct {
	Domain uint16
	// VM is the number of the accesses.
	VM mmio.VM
	// Slot is the device on PCI bus 0 that the VM finds, from 1 to 31. 0: none, as in a
	// PVH domain, which has no PCI bus. Then Windows says where the BARs are.
	Slot    uint8
	Windows []pciconf.Window
	// Function is what the VM sees.
	Function mmio.Function
	// Memory is where the VM's memory ends, in bytes.
	Memory uint64
	// Created gets the server's id before the server is enabled, so that it can be
	// journalled. After an error the server is destroyed. nil: nobody wants it.
	Created func(id uint16) error
}

// Counts are the counters of a server.
type Counts struct {
	Requests   uint64 // accesses of the domain that Xen has passed on
	Refused    uint64 // those with a size, count, type, pointer or address that cannot be
	Spurious   uint64 // events without a request
	Hypercalls uint64 // operations that the server has asked of Xen
}

// Server is an ioreq server.
type Server struct {
	hv     Hypervisor
	config Config
	id     uint16
	space  *pciconf.Space // nil: no PCI
	vcpus  int
	page   Memory

	moving sync.Mutex // guards ranges, and is held while they change
	ranges []pciconf.Window

	line   sync.Mutex // held while Xen is told of the pin
	wanted bool       // the device asks for an interrupt
	raised bool       // the pin is up

	requests, refused, spurious, hypercalls atomic.Uint64
}

func (c Config) check() error {
	switch {
	case c.Slot > 31:
		return fmt.Errorf("%w: slot %d is not from 1 to 31", ErrConfig, c.Slot)
	case (c.Slot == 0) == (len(c.Windows) == 0):
		return fmt.Errorf("%w: it takes either a slot or windows", ErrConfig)
	}
	for _, w := range c.Windows {
		if w.BAR < 0 || w.BAR >= mmio.MaxBARs || w.Size == 0 || w.Start > 1<<48 || w.Size > 1<<48 {
			return fmt.Errorf("%w: window %+v", ErrConfig, w)
		}
	}
	return nil
}

// Create makes a server for a domain, enables it and returns it. Each step has an undo,
// so after an error nothing is left.
func Create(hv Hypervisor, c Config) (_ *Server, err error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	s := &Server{hv: hv, config: c}
	if c.Slot != 0 {
		if s.space, err = pciconf.New(c.Function); err != nil {
			return nil, err
		}
	}
	what := fmt.Sprintf("ioreq server for domain %d", c.Domain)
	if err := s.count(); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	create := op(opCreate, nil)
	if err := s.do(create); err != nil {
		return nil, fmt.Errorf("%s: create: %w; Xen has at most 8 for a domain", what, err)
	}
	s.id = binary.LittleEndian.Uint16(create[opBody+4:])
	defer func() {
		if err != nil { // nothing waits for a server of a domain that has not run
			err = errors.Join(fmt.Errorf("%s: %w", what, err), s.Close(), s.do(opServer(opDestroy, s.id, false)))
		}
	}()
	if c.Created != nil {
		if err := c.Created(s.id); err != nil {
			return nil, err
		}
	}
	if s.space != nil {
		if err := s.do(opRange(opMap, s.id, rangePCI, s.sbdf(), s.sbdf())); err != nil {
			return nil, fmt.Errorf("have slot %d: %w", c.Slot, err)
		}
	}
	if err := s.move(func() []pciconf.Window { return c.Windows }); err != nil {
		return nil, err
	}
	if err := s.open(); err != nil {
		return nil, err
	}
	for v := range s.vcpus {
		if s.number(v) == 0 {
			return nil, fmt.Errorf("vCPU %d: %w", v, ErrEarly)
		}
	}
	return s, nil
}

// Adopt takes over the server with an id whose process has ended. Which of its ranges
// exist is unknown, so it answers every access with ones, and never with a device's
// registers: Serve it with Gone.
func Adopt(hv Hypervisor, domain, id uint16) (*Server, error) {
	s := &Server{hv: hv, config: Config{Domain: domain}, id: id}
	err := s.count()
	if err == nil {
		err = s.open()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("take over ioreq server %d of domain %d: %w", id, domain, err), s.Close())
	}
	return s, nil
}

// count asks how many vCPUs there are.
func (s *Server) count() error {
	b := op(opVCPUs, nil)
	if err := s.do(b); err != nil {
		return fmt.Errorf("ask for its vCPUs: %w", err)
	}
	n := binary.LittleEndian.Uint32(b[opBody:])
	if n == 0 || n > maxVCPUs {
		return fmt.Errorf("%w: the domain has %d vCPUs", ErrConfig, n)
	}
	s.vcpus = int(n)
	return nil
}

// open maps the page and enables the server.
func (s *Server) open() (err error) {
	frames := (s.vcpus + slotsPerPage - 1) / slotsPerPage
	if s.page, err = s.hv.MapResource(s.config.Domain, resourceIOReq, uint32(s.id), firstIOReq, frames); err != nil {
		return fmt.Errorf("map its page: %w", err)
	}
	if err := s.do(opServer(opState, s.id, true)); err != nil {
		return fmt.Errorf("enable it: %w", err)
	}
	return nil
}

// ID returns Xen's number of the server in its domain.
func (s *Server) ID() uint16 { return s.id }

// Counts returns the counters.
func (s *Server) Counts() Counts {
	return Counts{s.requests.Load(), s.refused.Load(), s.spurious.Load(), s.hypercalls.Load()}
}

func (s *Server) sbdf() uint64 { return uint64(s.config.Slot) << 3 }

func (s *Server) do(b []byte) error {
	s.hypercalls.Add(1)
	return s.hv.DeviceOp(s.config.Domain, b, nil)
}

func (s *Server) slot(vcpu int) []byte {
	return s.page.Bytes()[vcpu*slotSize:][:slotSize:slotSize]
}

// number is that of a vCPU's event channel; 0: Xen has not made the vCPU.
func (s *Server) number(vcpu int) uint32 {
	return binary.LittleEndian.Uint32(s.slot(vcpu)[offPort:])
}

func (s *Server) port(vcpu int) (vchan.Port, error) {
	number := s.number(vcpu)
	p, err := s.hv.BindInterdomain(s.config.Domain, number)
	if err != nil {
		return nil, fmt.Errorf("vCPU %d of domain %d: %w", vcpu, s.config.Domain, err)
	}
	return p, nil
}

// Serve answers the domain's accesses, those of each vCPU in a goroutine of its own, until
// ctx ends. It then returns the context's error; accesses wait until it is called again,
// or another process adopts the server. An access that it has begun, it answers.
func (s *Server) Serve(ctx context.Context, d mmio.Device) error {
	ports := make([]vchan.Port, 0, s.vcpus)
	var errs []error
	closeAll := func() {
		for _, p := range ports {
			errs = append(errs, p.Close())
		}
	}
	for v := range s.vcpus {
		p, err := s.port(v)
		if err != nil {
			closeAll()
			return errors.Join(append(errs, fmt.Errorf("serve a device: %w", err))...)
		}
		ports = append(ports, p)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for v, p := range ports {
		wg.Go(func() {
			if err := s.vcpu(ctx, v, p, d); err != nil {
				cancel(fmt.Errorf("serve a device to vCPU %d of domain %d: %w", v, s.config.Domain, err))
			}
		})
	}
	<-ctx.Done()
	err := context.Cause(ctx)
	closeAll() // ends Wait
	wg.Wait()
	return errors.Join(append(errs, err)...)
}

// vcpu answers the accesses of one vCPU. What waits from before is not told by an event
// again, so it looks first.
func (s *Server) vcpu(ctx context.Context, v int, p vchan.Port, d mmio.Device) error {
	slot := s.slot(v)
	for i := 0; ; i++ {
		w := load(slot)
		switch {
		case w.state() == stateReady, i == 0 && w.state() == stateInWork:
			if err := s.answer(slot, w, p, d); err != nil {
				return err
			}
		case i > 1: // binding the channel is an event of its own
			s.spurious.Add(1)
		}
		if err := p.Wait(); err != nil {
			if ctx.Err() != nil {
				return nil //nolint:nilerr // the end of ctx closes the port
			}
			return err
		}
	}
}

// answer does what a request asks and says so.
func (s *Server) answer(slot []byte, w word, p vchan.Port, d mmio.Device) error {
	if !swap(slot, w, w.with(stateInWork)) {
		return nil // Xen has withdrawn it
	}
	s.requests.Add(1)
	r := read(slot, w)
	data, ok := s.handle(r, d)
	if !ok {
		s.refused.Add(1)
	}
	if w.read() && !w.pointer() {
		binary.LittleEndian.PutUint64(slot[offData:], data)
	}
	store(slot, w.with(stateAnswered))
	return p.Notify()
}

// move makes Xen pass on the accesses to windows, and no others to memory. It asks for these
// when nobody else moves them: of two vCPUs that move BARs, the later one counts.
func (s *Server) move(windows func() []pciconf.Window) error {
	s.moving.Lock()
	defer s.moving.Unlock()
	to := windows()
	var errs []error
	for _, w := range s.ranges {
		errs = append(errs, s.do(opRange(opUnmap, s.id, rangeMemory, w.Start, w.Start+w.Size-1)))
	}
	s.ranges = nil
	for _, w := range to {
		err := s.do(opRange(opMap, s.id, rangeMemory, w.Start, w.Start+w.Size-1))
		if err != nil {
			errs = append(errs, fmt.Errorf("have %d bytes at %#x: %w", w.Size, w.Start, err))
			continue
		}
		s.ranges = append(s.ranges, w)
	}
	return errors.Join(errs...)
}

// Config returns the function's configuration space for Restore; nil without PCI. While Serve
// runs, the VM may change it.
func (s *Server) Config() []byte {
	if s.space == nil {
		return nil
	}
	return s.space.Save()
}

// Restore sets the configuration space of a server that was just created.
func (s *Server) Restore(saved []byte) error {
	if s.space == nil {
		if len(saved) != 0 {
			return fmt.Errorf("%w: the saved one had a PCI function", ErrConfig)
		}
		return nil
	}
	if err := s.space.Restore(saved); err != nil {
		return err
	}
	s.pin(true) // a VM that was migrated has brought along how the pin was on its former host
	return s.move(s.space.Windows)
}

// Close ends this process's part and leaves the server to who adopts it. Serve must not
// run. While the page is mapped, a domain that has ended stays as a zombie.
func (s *Server) Close() error {
	if s.page == nil {
		return nil
	}
	p := s.page
	s.page = nil
	return p.Close()
}

// Destroy disables the server, answers what waits for it with ones, and destroys it. Serve
// must not run. If a vCPU does not take its answer before ctx ends, the error wraps
// ErrWaiting.
func (s *Server) Destroy(ctx context.Context) error {
	what := fmt.Sprintf("destroy ioreq server %d of domain %d", s.id, s.config.Domain)
	if err := s.do(opServer(opState, s.id, false)); err != nil {
		return fmt.Errorf("%s: disable it: %w", what, err)
	}
	for v := range s.vcpus {
		if err := s.drain(ctx, v); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	if err := s.do(opServer(opDestroy, s.id, false)); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return s.Close()
}

const drainEvery = time.Millisecond

// drain returns when a vCPU does not wait for the server.
func (s *Server) drain(ctx context.Context, v int) error {
	slot := s.slot(v)
	for {
		w := load(slot)
		switch w.state() {
		case stateNone:
			return nil
		case stateReady, stateInWork:
			p, err := s.port(v)
			if err != nil {
				return err
			}
			if err := errors.Join(s.answer(slot, w, p, Gone{}), p.Close()); err != nil {
				return err
			}
		}
		// Xen tells nobody that a vCPU has taken its answer.
		if err := wait.For(ctx, drainEvery); err != nil {
			return fmt.Errorf("%w: vCPU %d; unpause the domain: %w", ErrWaiting, v, err)
		}
	}
}

// Gone is a device that was pulled: it reads as ones, and ignores writes.
type Gone struct{}

// Read implements mmio.Device.
func (Gone) Read(a mmio.Access) uint64 { return mmio.Ones(a.Size) }

// Write implements mmio.Device.
func (Gone) Write(mmio.Access) {}
