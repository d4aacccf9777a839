package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/vm/profile"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

const (
	defaultAwait = time.Minute
	mostAwait    = 10 * time.Minute
	maxRequest   = 1 << 20 // bytes
	maxNot       = 256
	maxServes    = 1024
	// leastToLoad is how much memory must be free, in bytes, before a runtime is loaded
	// in addition to the running one. A compiler needs about 100 MB, and a VM without
	// memory reads its programs from disk again and again.
	leastToLoad = 256 << 20
)

// service serves AgentService.
type service struct{ a *Agent }

var _ gpuctlv1connect.AgentServiceHandler = service{}

// Handler returns the path and the handler of AgentService.
func (a *Agent) Handler() (string, http.Handler) {
	return gpuctlv1connect.NewAgentServiceHandler(service{a}, connect.WithReadMaxBytes(maxRequest))
}

func (v service) Hello(ctx context.Context, _ *connect.Request[gpuctlv1.HelloRequest]) (*connect.Response[gpuctlv1.HelloResponse], error) {
	a := v.a
	total, free := a.kernel.memory()
	r := &gpuctlv1.HelloResponse{
		Version: a.cfg.Version, Protocol: Protocol, BootId: a.kernel.bootID(), Instance: a.instance,
		Kernel: a.kernel.text("proc/sys/kernel/osrelease"), FreeMemory: free, TotalMemory: total,
		UnixNs: time.Now().UnixNano(), Devices: a.report(), Remote: a.lent(),
	}
	if r.Hotplug = len(a.kernel.slots()) > 0; !r.Hotplug {
		r.HotplugReason = noSlots
	}
	if a.cfg.Lender != nil {
		r.LendAddresses = a.cfg.Lender.Addresses()
		a.markLends(ctx, r.Devices)
	}
	return connect.NewResponse(r), nil
}

const noSlots = "the VM's kernel has no hot-plug slot: it needs acpiphp or pciehp, and its firmware slots that can be emptied"

func (a *Agent) hotplugReason(at pci.Address) string {
	if len(a.kernel.slots()) == 0 {
		return noSlots
	}
	return "it is in none of the hot-plug slots of the VM (" + at.Slot().String() + " is not in " + slotsDir + ")"
}

func (v service) WatchDevices(ctx context.Context, _ *connect.Request[gpuctlv1.WatchDevicesRequest], st *connect.ServerStream[gpuctlv1.WatchDevicesResponse]) error {
	for {
		changed := v.a.next()
		if err := st.Send(&gpuctlv1.WatchDevicesResponse{Devices: v.a.report()}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

func (v service) Release(ctx context.Context, req *connect.Request[gpuctlv1.ReleaseRequest]) (*connect.Response[gpuctlv1.ReleaseResponse], error) {
	at, err := pci.ParseAddress(req.Msg.Address)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if err := v.a.release(ctx, at); err != nil {
		return nil, coded(err)
	}
	return connect.NewResponse(&gpuctlv1.ReleaseResponse{Device: v.a.reportOne(at)}), nil
}

func (v service) TakeUp(ctx context.Context, req *connect.Request[gpuctlv1.TakeUpRequest]) (*connect.Response[gpuctlv1.TakeUpResponse], error) {
	at, err := pci.ParseAddress(req.Msg.Address)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if err := v.a.takeUp(ctx, at); err != nil {
		return nil, coded(err)
	}
	return connect.NewResponse(&gpuctlv1.TakeUpResponse{Device: v.a.reportOne(at)}), nil
}

func (v service) AwaitDevice(ctx context.Context, req *connect.Request[gpuctlv1.AwaitDeviceRequest]) (*connect.Response[gpuctlv1.AwaitDeviceResponse], error) {
	m := req.Msg
	if len(m.Not) > maxNot || m.VendorId > 0xffff || m.DeviceId > 0xffff {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("ids have 16 bits, and no more than %d addresses can be left out", maxNot))
	}
	not := map[pci.Address]bool{}
	for _, s := range m.Not {
		at, err := pci.ParseAddress(s)
		if err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
		not[at] = true
	}
	wait := min(time.Duration(m.TimeoutMs)*time.Millisecond, mostAwait)
	if wait == 0 {
		wait = defaultAwait
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for {
		changed := v.a.next()
		var seen []string
		for _, d := range v.a.list() {
			if not[d.address] || !wanted(&d, m) {
				continue
			}
			if d.ready() || d.released {
				return connect.NewResponse(&gpuctlv1.AwaitDeviceResponse{Device: v.a.describe(&d)}), nil
			}
			seen = append(seen, fmt.Sprintf("%s: %s", d.address, d.message))
		}
		select {
		case <-changed:
		case <-ctx.Done():
			what := "no device"
			if m.VendorId|m.DeviceId != 0 {
				what = fmt.Sprintf("no device %04x:%04x", m.VendorId, m.DeviceId)
			}
			err := fmt.Errorf("%s has come", what)
			if len(seen) > 0 {
				err = fmt.Errorf("%s is ready: %s", what, strings.Join(seen, "; "))
			}
			return nil, connect.NewError(connect.CodeDeadlineExceeded, err)
		}
	}
}

func (v service) Serves(_ context.Context, req *connect.Request[gpuctlv1.ServesRequest]) (*connect.Response[gpuctlv1.ServesResponse], error) {
	if len(req.Msg.Functions) > maxServes {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("no more than %d functions can be asked for at once", maxServes))
	}
	out := &gpuctlv1.ServesResponse{}
	for _, f := range req.Msg.Functions {
		out.Missing = append(out.Missing, v.a.missing(identity(f)))
	}
	return connect.NewResponse(out), nil
}

func identity(f *gpuctlv1.PCIIdentity) profile.ID {
	return profile.ID{
		Vendor: uint16(f.GetVendorId()), Device: uint16(f.GetDeviceId()), SubVendor: uint16(f.GetSubVendorId()), SubDevice: uint16(f.GetSubDeviceId()),
		Class: f.GetClass() & 0xffffff,
	}
}

func (v service) Expect(ctx context.Context, req *connect.Request[gpuctlv1.ExpectRequest]) (*connect.Response[gpuctlv1.ExpectResponse], error) {
	id := identity(req.Msg.GetFunction())
	if no := v.a.missing(id); no != "" {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New(no))
	}
	if _, free := v.a.kernel.memory(); free < leastToLoad {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("%d MiB are free in the VM, and a runtime is loaded ahead only where there are %d", free>>20, leastToLoad>>20))
	}
	p, _ := v.a.cfg.Profiles.Lookup(id)
	for _, rt := range p.Runtimes() { // use the first runtime that is installed
		if v.a.kernel.hasLibrary(rt.Library) {
			if err := v.a.sessions.Warm(ctx, rt); err != nil {
				return nil, coded(fmt.Errorf("profile %s: %w", p.Name, err))
			}
			break
		}
	}
	return connect.NewResponse(&gpuctlv1.ExpectResponse{}), nil
}

func (v service) OpenBulk(ctx context.Context, _ *connect.Request[gpuctlv1.OpenBulkRequest]) (*connect.Response[gpuctlv1.OpenBulkResponse], error) {
	if v.a.cfg.Bulk == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("this VM has no way to its host beside the channel"))
	}
	res, err := v.a.cfg.Bulk(ctx)
	if err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return connect.NewResponse(res), nil
}

// missing returns what is not installed in the VM to use a function; empty: nothing.
func (a *Agent) missing(id profile.ID) string {
	p, ok := a.cfg.Profiles.Lookup(id)
	switch {
	case !ok:
		return noProfile(id)
	case len(p.Drivers) > 0 && !slices.ContainsFunc(p.Drivers, a.kernel.hasDriver):
		return fmt.Sprintf("profile %s needs %s of the kernel: install it in the VM", p.Name, list(p.Drivers))
	case p.CUDA && a.cfg.Driver != nil && a.kernel.hasLibrary(cudaLibrary):
	case !slices.ContainsFunc(p.Libraries, a.kernel.hasLibrary):
		return fmt.Sprintf("profile %s needs %s: install it in the VM", p.Name, list(p.Libraries))
	}
	return ""
}

func noProfile(id profile.ID) string {
	return fmt.Sprintf("no profile fits %04x:%04x; add one to the profiles' folder", id.Vendor, id.Device)
}

func wanted(d *device, m *gpuctlv1.AwaitDeviceRequest) bool {
	if m.VendorId|m.DeviceId == 0 {
		return true
	}
	return uint32(d.id.Vendor) == m.VendorId && uint32(d.id.Device) == m.DeviceId
}

// next returns a channel that is closed at the next change.
func (a *Agent) next() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changed
}

func (a *Agent) report() []*gpuctlv1.GuestDevice {
	var out []*gpuctlv1.GuestDevice
	for _, d := range a.list() {
		out = append(out, a.describe(&d))
	}
	return out
}

// reportOne returns a device, after reading it from the kernel.
func (a *Agent) reportOne(at pci.Address) *gpuctlv1.GuestDevice {
	if f, ok := a.kernel.function(at); ok {
		a.turn.Lock()
		a.see(nil, &f) //nolint:staticcheck // nothing is begun
		a.turn.Unlock()
		for _, d := range a.list() {
			if d.address == at {
				return a.describe(&d)
			}
		}
		// Its class is not managed, and it is not released any more.
		return &gpuctlv1.GuestDevice{
			Address: at.String(), VendorId: uint32(f.id.Vendor), DeviceId: uint32(f.id.Device), SubVendorId: uint32(f.id.SubVendor),
			SubDeviceId: uint32(f.id.SubDevice), Class: f.id.Class, Driver: f.driver,
		}
	}
	return &gpuctlv1.GuestDevice{Address: at.String(), Message: "it is not plugged in"}
}

func (a *Agent) describe(d *device) *gpuctlv1.GuestDevice {
	g := &gpuctlv1.GuestDevice{
		Address: d.address.String(), VendorId: uint32(d.id.Vendor), DeviceId: uint32(d.id.Device), SubVendorId: uint32(d.id.SubVendor),
		SubDeviceId: uint32(d.id.SubDevice), Class: d.id.Class, Serial: d.serial, Driver: d.driver,
		Ready: d.ready(), Message: d.message, Released: d.released,
	}
	if d.profile != nil {
		g.Profile = d.profile.Name
	}
	if g.Ready {
		g.Target, g.Message = proto.CloneOf(d.target), ""
	}
	return g
}

// coded adds the Connect code for an error.
func coded(err error) error {
	code := connect.CodeInternal
	switch {
	case errors.Is(err, ErrNoDevice):
		code = connect.CodeNotFound
	case errors.Is(err, ErrNotOurs):
		code = connect.CodeInvalidArgument
	case errors.Is(err, ErrNoHotPlug), errors.Is(err, ErrInUse):
		code = connect.CodeFailedPrecondition
	case errors.Is(err, sysfs.ErrStuck), errors.Is(err, context.DeadlineExceeded):
		code = connect.CodeDeadlineExceeded
	case errors.Is(err, context.Canceled):
		code = connect.CodeCanceled
	}
	return connect.NewError(code, err)
}
