package executor

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math"
	"net/http"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/budget"
	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// Descriptors that an executor inherits.
const (
	fdRing = 3 + iota
	fdArena
	fdState
)

// Config has the settings of one executor.
type Config struct {
	Dir          string // the session's folder
	Generation   uint32 // grows with each executor of a session
	Socket       string // control: ExecutorService over HTTP on this unix socket
	ImportSocket string // contents from the executor that served the session before
	FileSocket   string // files that gpuguest sends
	TurnSocket   string // turns on GPUs that other sessions use, too; empty: none are taken
	Runtime      *gpuctlv1.Runtime
	Device       *gpuctlv1.VirtualDevice
	CacheKey     []byte        // signs built programs in Dir; empty: they are not kept
	Far          *Far          // set: the application is on another host, behind a carrier
	Budget       *budget.Share // what all sessions of its claim may have; nil: only Device limits it
	Logger       *slog.Logger
}

// ErrNoDevice is returned when the runtime does not have the requested devices.
var ErrNoDevice = errors.New("no such device")

// Main runs an executor until it retires or ctx ends.
func Main(ctx context.Context, cfg Config) error {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	// The vendor's threads and ours share the processors. With one Go processor more than
	// the host has, a thread that returns from a wait need not wait for one.
	runtime.GOMAXPROCS(max(4, runtime.NumCPU()+1))
	if cfg.Far != nil {
		return mainFar(ctx, cfg)
	}
	s, err := open(cfg, fdRing, fdArena, fdState)
	if err != nil {
		return err
	}
	if s.out, err = captureOutput(s.ring); err != nil {
		return err
	}
	defer s.out.close()
	imports, err := handover.Listen(cfg.ImportSocket)
	if err != nil {
		return err
	}
	defer imports.Close()
	files, err := handover.Listen(cfg.FileSocket)
	if err != nil {
		return err
	}
	defer files.Close()
	control, err := handover.Listen(cfg.Socket)
	if err != nil {
		return err
	}
	noTurns, err := s.takeTurns()
	if err != nil {
		return err
	}
	defer noTurns()
	mux := http.NewServeMux()
	mux.Handle(gpuctlv1connect.NewExecutorServiceHandler(&controller{s: s}))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go s.serveImports(imports)
	go func() { _ = handover.Serve(files, s.handed.put) }()
	go s.watchEvents()
	go s.pushCallbacks()
	go s.takeOver()
	go s.guard()
	done := make(chan error, 1)
	go func() { done <- srv.Serve(control) }()
	select {
	case err = <-done:
	case <-ctx.Done():
		err = nil
	case <-s.stop:
		sctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = srv.Shutdown(sctx) // the reply to Retire is still sent
		err = nil
	}
	s.closed.Store(true)
	return err
}

// open loads the runtime, selects the devices and maps the session's memory.
func open(cfg Config, ringFD, arenaFD, stateFD int) (*session, error) {
	platform, devs, quirk, err := openRuntime(cfg.Runtime)
	if err != nil {
		return nil, err
	}
	return openOn(cfg, ringFD, arenaFD, stateFD, platform, devs, quirk)
}

// openOn makes a session on the devices.
func openOn(cfg Config, ringFD, arenaFD, stateFD int, platform cl.Platform, devs []cl.Device, quirk quirk) (*session, error) {
	ringR, err := shm.Open(ringFD, wire.RingMem)
	if err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	ring, err := shm.NewRing(ringR)
	if err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	if err := ring.Check(); err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	size, split, err := ring.Arena()
	if err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	arena, err := shm.Open(arenaFD, int64(size))
	if err != nil {
		return nil, fmt.Errorf("arena: %w", err)
	}
	part := -1
	if cfg.Far != nil {
		part = int(cfg.Far.hello.Part)
	}
	host, err := takeHostMemory(arena, ringFD, split, part)
	if err != nil {
		return nil, err
	}
	s := &session{
		cfg: cfg, log: cfg.Logger, ring: ring, arena: arena, split: split, state: os.NewFile(uintptr(stateFD), "state"),
		patience: newPatience(), naps: newNaps(runtime.NumCPU() <= 2), host: host,
		ghosts: map[uint32]any{}, replies: map[uint32][]byte{}, platf: platform, quirk: quirk,
		watchWake: make(chan struct{}, 1), cbWake: make(chan struct{}, 1), stop: make(chan struct{}),
		cache: newProgramCache(cfg.Dir, cfg.CacheKey),
		xfer:  transfers{queues: map[*clContext]cl.Queue{}},
		pins:  pins{arena: arena},
		seed:  maphash.MakeSeed(),
	}
	s.host.unpin = s.pins.drop
	if cfg.Far != nil {
		s.ahead = cfg.Far.hello.Now - monotonic()
	}
	s.grow(wire.FirstID)
	for i, d := range devs {
		x := &device{id: uint32(i + 1), vendor: d}
		s.devices = append(s.devices, x)
		s.objs[x.id] = x
		s.turns = append(s.turns, newTurns(s))
	}
	s.limits = deviceLimits(devs[0])
	if m := cfg.Device.GetGlobalMemory(); m > 0 {
		s.limits.MaxAlloc = min(s.limits.MaxAlloc, m)
	}
	s.probeMemory()
	s.calibrate()
	s.info = s.sessionInfo()
	return s, nil
}

func openRuntime(rt *gpuctlv1.Runtime) (cl.Platform, []cl.Device, quirk, error) {
	lib, err := cl.Open(rt.GetLibrary())
	if err != nil {
		return 0, nil, quirk{}, err
	}
	ps := lib.Platforms()
	if len(ps) == 0 {
		return 0, nil, quirk{}, fmt.Errorf("%s has no platform: %w", rt.GetLibrary(), ErrNoDevice)
	}
	all, st := cl.GetDeviceIDs(ps[0], cl.DeviceTypeAll)
	if st != cl.Success {
		return 0, nil, quirk{}, fmt.Errorf("devices of %s: %w", rt.GetLibrary(), st)
	}
	var q quirk
	if b, st := cl.GetPlatformInfo(ps[0], cl.PlatformName); st == cl.Success {
		q = quirkOf(cl.CString(b), infoString(all[0], cl.DeviceName))
	}
	if err := q.check(rt.GetLibrary()); err != nil {
		return 0, nil, quirk{}, err
	}
	if q.serial {
		lib.Serialize()
	}
	if len(rt.GetDevices()) == 0 {
		return ps[0], all[:1], q, nil
	}
	var devs []cl.Device
	for _, i := range rt.GetDevices() {
		if int64(i) >= int64(len(all)) {
			return 0, nil, quirk{}, fmt.Errorf("device %d of %s, which has %d: %w", i, rt.GetLibrary(), len(all), ErrNoDevice)
		}
		devs = append(devs, all[i])
	}
	return ps[0], devs, q, nil
}

// probeMemory finds out whether the device computes in the memory that a buffer was created
// with. Then contents are in shared memory. Otherwise it finds out whether pinning such
// memory makes transfers faster.
func (s *session) probeMemory() {
	v := s.devices[0].vendor
	s.pins.wanted = number(v, cl.DeviceHostUnifiedMemory) == 0 && number(v, cl.DeviceType)&cl.DeviceTypeGpu != 0
	if number(v, cl.DeviceHostUnifiedMemory) == 0 {
		return
	}
	var vs []cl.Device
	for _, d := range s.devices {
		vs = append(vs, d.vendor)
	}
	c, st := cl.CreateContext(vs)
	if st != cl.Success {
		return
	}
	defer cl.ReleaseContext(c)
	q, st := cl.CreateCommandQueue(c, v, 0)
	if st != cl.Success {
		return
	}
	defer cl.ReleaseCommandQueue(q)
	const n = 8192
	// Not in the arena: an earlier executor of the session may have left contents there.
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANONYMOUS|unix.MAP_SHARED)
	if err != nil {
		return
	}
	defer unix.Munmap(b)
	p := unsafe.Pointer(&b[0])
	m, st := cl.CreateBuffer(c, cl.MemReadWrite|cl.MemUseHostPtr, n, p)
	if st != cl.Success {
		return
	}
	defer cl.ReleaseMemObject(m)
	// Test both directions, without a map in between.
	pattern, got := [4]byte{0xa5, 0x5a, 0xc3, 0x3c}, [4]byte{}
	if cl.EnqueueFillBuffer(q, m, unsafe.Pointer(&pattern), 4, 0, n, nil, nil) != cl.Success || cl.Finish(q) != cl.Success {
		return
	}
	if b[0] != 0xa5 || b[n-1] != 0x3c {
		return
	}
	b[4096] = 0x77
	if cl.EnqueueReadBuffer(q, m, true, 4096, 4, unsafe.Pointer(&got), nil, nil) != cl.Success || got[0] != 0x77 {
		return
	}
	mp, st := cl.EnqueueMapBuffer(q, m, true, cl.MapRead, 0, n, nil, nil)
	if st != cl.Success || mp != p {
		return
	}
	cl.EnqueueUnmapMemObject(q, m, mp, nil, nil)
	cl.Finish(q)
	s.unified = true
}

// monotonic returns CLOCK_MONOTONIC in nanoseconds, which is the same in every process.
func monotonic() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return t.Nano()
}

// calibrate measures the difference between the device's clock and the host's, to half of what the
// shortest of some markers takes: one alone may wait for a processor for milliseconds.
func (s *session) calibrate() {
	v := s.devices[0].vendor
	c, st := cl.CreateContext([]cl.Device{v})
	if st != cl.Success {
		return
	}
	defer cl.ReleaseContext(c)
	q, st := cl.CreateCommandQueue(c, v, cl.QueueProfilingEnable)
	if st != cl.Success {
		return
	}
	defer cl.ReleaseCommandQueue(q)
	const tries, exact = 8, int64(20 * time.Microsecond)
	for best, i := int64(math.MaxInt64), 0; i < tries && best > exact; i++ {
		var e cl.Event
		before := int64(s.now())
		if cl.EnqueueMarkerWithWaitList(q, nil, &e) != cl.Success {
			return
		}
		cl.WaitForEvents([]cl.Event{e})
		took := int64(s.now()) - before
		if t, st := cl.EventTime(e, cl.ProfilingCommandEnd); st == cl.Success && took < best {
			best, s.clock.offset = took, before+took/2-int64(t)
		}
		cl.ReleaseEvent(e)
	}
}

// resumeClock makes the session's clock continue after the last time that the application
// has read.
func (s *session) resumeClock() {
	if now := s.now(); s.clock.last > now {
		s.clock.offset += int64(s.clock.last - now)
	}
}

// takeOver takes the executor's lock when this executor serves the session and its predecessor has ended. It waits for nothing else,
// not for a call of the runtime that has s.mu either: the application gives up a session whose lock is free for five seconds.
func (s *session) takeOver() {
	shm.Take(s.host.locks, wire.LockExecutor, func() bool { return s.active.Load() && s.ring.Owner() == s.cfg.Generation }, s.closed.Load)
}

// guard decides what becomes of an executor if gpuguest ends in the middle of a swap: the
// executor that the ring's owner word names serves the session; any other one ends.
func (s *session) guard() {
	orphan := 0
	for !s.closed.Load() {
		time.Sleep(100 * time.Millisecond)
		mine := s.ring.Owner() == s.cfg.Generation
		s.mu.Lock()
		if len(s.parked) > 0 && s.active.Load() && !s.gate.Load() {
			s.advance() // a client may have freed a lane that was given up
		}
		idle := s.frozen || !s.active.Load()
		ready := s.prepared
		s.mu.Unlock()
		managed, err := shm.Locked(s.host.locks, wire.LockManager)
		if err != nil || managed || !idle {
			orphan = 0
			continue
		}
		if orphan++; orphan < 50 { // five seconds, in which a new gpuguest may take over
			continue
		}
		switch {
		case mine && s.active.Load():
			s.log.Warn("gpuguest is gone: the session goes on here")
			s.thaw()
		case mine && ready && s.ring.State() == wire.StateRunning:
			s.log.Warn("gpuguest is gone: the session goes on here")
			s.activate()
		default:
			s.log.Warn("gpuguest is gone: another executor has the session")
			s.retire()
		}
		orphan = 0
	}
}

// Probe lists the devices of a runtime. It is called in a process of its own, because a
// vendor's library may do anything.
func Probe(rt *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error) {
	lib, err := cl.Open(rt.GetLibrary())
	if err != nil {
		return nil, err
	}
	r := &gpuctlv1.ProbeResponse{}
	for _, p := range lib.Platforms()[:min(1, len(lib.Platforms()))] {
		text := func(param uint32) string {
			b, _ := cl.GetPlatformInfo(p, param)
			return cl.CString(b)
		}
		r.Platform, r.Vendor = text(cl.PlatformName), text(cl.PlatformVendor)
		if err := quirkOf(r.Platform, "").check(rt.GetLibrary()); err != nil {
			return nil, err
		}
		devs, st := cl.GetDeviceIDs(p, cl.DeviceTypeAll)
		if st != cl.Success {
			return nil, fmt.Errorf("devices of %s: %w", rt.GetLibrary(), st)
		}
		for i, d := range devs {
			r.Driver = infoString(d, cl.DriverVersion)
			r.Devices = append(r.Devices, &gpuctlv1.ProbedDevice{
				Index: uint32(i), Name: infoString(d, cl.DeviceName), Vendor: infoString(d, cl.DeviceVendor),
				Type: typeName(number(d, cl.DeviceType)), Uuid: uuid(d), PciAddress: pciAddress(d), Limits: deviceLimits(d),
			})
		}
	}
	return r, nil
}

func typeName(t uint64) string {
	switch {
	case t&cl.DeviceTypeGpu != 0:
		return "gpu"
	case t&cl.DeviceTypeAccelerator != 0:
		return "accelerator"
	}
	return "cpu"
}

func uuid(d cl.Device) string {
	b := info(d, cl.DeviceUuidKhr)
	if len(b) != 16 {
		return ""
	}
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// pciAddress returns the device's PCI address from cl_khr_pci_bus_info.
func pciAddress(d cl.Device) string {
	b := info(d, cl.DevicePciBusInfoKhr)
	if len(b) != 16 {
		return ""
	}
	return fmt.Sprintf("%04x:%02x:%02x.%x", cl.Uint32(b), cl.Uint32(b[4:]), cl.Uint32(b[8:]), cl.Uint32(b[12:]))
}
