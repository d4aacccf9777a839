package hostd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/guest/lease"
	"github.com/gpuctl/gpuctl/hostd/borrow"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/hostd/cards/cardapi"
	"github.com/gpuctl/gpuctl/hostd/cards/platform"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/hostd/inventory/hostinfo"
	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/hostd/lend"
	"github.com/gpuctl/gpuctl/hostd/mediated"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/hostd/migration"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/hostd/migration/stash"
	"github.com/gpuctl/gpuctl/hostd/network"
	"github.com/gpuctl/gpuctl/hostd/servicevm"
	"github.com/gpuctl/gpuctl/hostd/sessions"
	"github.com/gpuctl/gpuctl/hostd/telemetry/metrics"
	"github.com/gpuctl/gpuctl/hostd/telemetry/trace"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/subid"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// wiring has the parts of a host, in the order in which they are made. Each part gets what it
// needs when it is made, so what is above knows nothing of what is below. Only the node and
// what it serves need each other: it gets that from Start, the last step.
type wiring struct {
	audit    *access.AuditLog // nil: no audit trail
	nvml     *nvml.Client
	counters *metrics.Counters
	tracer   *trace.Tracer // nil: no traces
	users    *subid.Owners
	port     net.Listener // for carriers of other hosts; nil: no GPU is lent
	node     *member.Node
	records  migration.Records

	platform *platform.Platform
	network  *network.Host
	at       endpoint.Whereabouts
	guests   *endpoint.Guests
	servers  *servicevm.Registry

	// What is set when the keepers of cards and of mediated GPUs know who has which. The
	// sessions, which the keepers need, wait for it.
	cardsSettled, partsSettled atomic.Bool

	host     *sessions.Host
	lend     *lend.Port // nil: no GPU is lent
	serving  *servicevm.Keeper
	cards    *cards.Keeper
	mediated *mediated.Keeper
	runner   *platform.Runner

	site       *endpoint.Local
	borrow     *borrow.Keeper // of VMs
	devices    *cardapi.API
	migrations *migration.Manager
	metrics    *metrics.Metrics
}

// listen opens the API's socket. In a cluster, access is decided for each caller, so
// anybody may connect. hostd --dev accepts only its own user. made means that hostd has
// just made the socket's folder; it changes the permissions of no other folder.
func listen(o Options, made bool) (net.Listener, error) {
	l, err := rundir.Listen(o.Socket)
	if err != nil || o.Data == "" {
		return l, err
	}
	folder := filepath.Dir(o.Socket)
	err = os.Chmod(o.Socket, 0o666)
	if err == nil && made {
		err = os.Chmod(folder, 0o711)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("socket %s: %w", o.Socket, err)
	}
	if info, err := os.Stat(folder); err == nil && info.Mode().Perm()&0o001 == 0 {
		o.Log.Warn("other users do not reach the API's socket: its folder was there before and is closed to them; to open it: chmod o+x", "folder", folder)
	}
	return l, nil
}

// makeData makes the data folder. It refuses one that other users can change, as its
// content decides who has which card.
func makeData(dir string) error {
	if dir == "" {
		return nil
	}
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = rundir.Own(dir)
	}
	if err != nil {
		return fmt.Errorf("data folder: %w", err)
	}
	return nil
}

// join makes the parts of the host in order. At the end it starts the node, which serves all
// of them and takes up its former membership. Operations on sessions end with work.
func (o Options) join(ctx, work context.Context, guest *Guest) (m *wiring, err error) {
	m = &wiring{nvml: nvml.New(nvml.Config{Log: o.Log}), counters: metrics.NewCounters(), users: subid.New(subid.File)}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	name, err := hostName(o.Config.Cluster)
	if err != nil {
		return m, err
	}
	policy, err := localPolicy(o.Config.Access)
	if err != nil {
		return m, err
	}
	if o.Data != "" {
		if m.audit, err = access.OpenAudit(access.AuditConfig{Path: filepath.Join(o.Data, "audit.log"), Log: o.Log}); err != nil {
			return m, fmt.Errorf("audit trail: %w", err)
		}
	}
	t := o.Config.Tracing
	m.tracer, err = trace.New(ctx, trace.Config{
		Endpoint: t.Endpoint, Insecure: t.Insecure, SampleRatio: t.Sample, Version: o.Version, Host: name, Log: o.Log,
	})
	if err != nil {
		return m, fmt.Errorf("tracing: %w", err)
	}
	if m.port, err = o.openPort(ctx); err != nil {
		return m, err
	}
	c := o.Config.Cluster
	m.node = member.New(ctx, member.Config{
		Dir: o.Data, Name: name, Listen: cmp.Or(c.Listen, config.DefaultListen), Advertise: c.Advertise, Version: o.Version,
		Local: func() access.LocalPolicy { return policy }, Audit: m.audit,
		Timing: replica.Fast().Stretched(cmp.Or(c.RaftMultiplier, 1)), Members: replica.Members{MaxVoters: c.Voters, Lost: c.Lost(), Zone: c.Zone},
		Interceptors: []connect.Interceptor{m.counters.Interceptor()}, Refused: m.counters.Refused, Logger: o.Log,
	})
	m.records = migration.NewRecords(m.node)
	scanner := pci.NewScanner(o.Root)
	if err := m.detect(ctx, o, scanner, name); err != nil {
		return m, err
	}
	if err := m.makeSessions(work, o, guest, scanner); err != nil {
		return m, err
	}
	if err := m.makeKeepers(o); err != nil {
		return m, err
	}
	if err := m.makeMigrations(o); err != nil {
		return m, err
	}
	m.metrics = metrics.New(m.counters, metrics.Sources{
		View: m.node.View, Status: m.node.Status, Health: m.node.Health, Skipped: m.node.Skipped, Facts: m.node.Facts,
		Audit: m.audit.Counts, Mediated: m.mediated.Statuses, Version: o.Version, Log: o.Log,
	})
	served := member.Served{Host: sessions.NewReport(m.host, m.cards, m.mediated), Services: m.handle}
	if m.port != nil {
		served.Lender, served.LendAddress = m.host, m.lendAddress
	}
	return m, m.node.Start(ctx, served)
}

// handle adds the host's services to the node's.
func (m *wiring) handle(mux *http.ServeMux, options ...connect.HandlerOption) {
	m.devices.Handle(mux, options...)
	m.site.Handle(mux, options...)
	m.migrations.Handle(mux, options...)
	m.host.Handle(mux, options...)
}

// detect finds out which hypervisor runs, and what there is of VMs. It changes nothing but
// the limits that a former migration has left.
func (m *wiring) detect(ctx context.Context, o Options, scanner *pci.Scanner, name string) (err error) {
	m.platform, err = platform.Open(ctx, platform.Options{
		Config: o.Config.Devices, Dev: o.Data == "", Root: sysfs.Dir("/"), PCI: scanner, Dir: o.records(), LetGo: m.letGo, Log: o.Log,
	})
	if err != nil {
		return err
	}
	if o.Config.Devices.MigrationTLS && m.platform.Client != nil && m.platform.Client.Driver() == virt.Xen {
		return errors.New("devices.migrationTLS: libxl sends the memory of VMs unencrypted; leave it out, and use a network of your own for the cluster's addresses")
	}
	if m.network, err = network.Open(sysfs.Dir("/")); err != nil {
		return err
	}
	if o.Data != "" { // hostd --dev sends no VMs, and does not remove other daemons' limits
		lifted, err := m.network.Reconcile(ctx, nil)
		if err != nil {
			o.Log.Warn("limits of a former migration are left", "err", err)
		} else if len(lifted) > 0 {
			o.Log.Info("limits of a former migration lifted", "limits", len(lifted))
		}
	}
	m.at = endpoint.Whereabouts{Name: name, Client: m.platform.Client, Peer: m.node.Site, Member: neighbours{m.node}.knows, Log: o.Log}
	m.guests = endpoint.NewGuests(endpoint.GuestsConfig{
		Channels: m.at, Cards: scanner.Cards, Vchan: m.platform.Vchan, Vsock: m.platform.Vsock, Console: m.platform.Scheme() == "xen", Locks: o.Dir, Log: o.Log,
	})
	file := ""
	if o.Data != "" {
		file = filepath.Join(o.Data, "service-vms.json")
	}
	m.servers, err = servicevm.NewRegistry(file, name, agents{m.at, m.guests})
	return err
}

// records is the folder for what outlives hostd.
func (o Options) records() string { return cmp.Or(o.Data, o.Dir) }

// makeSessions makes what has the sessions of this host, and the port at which it lends GPUs.
func (m *wiring) makeSessions(work context.Context, o Options, guest *Guest, scanner *pci.Scanner) (err error) {
	c := sessions.HostConfig{
		Guest:     gpuctlv1connect.NewGuestServiceClient(unixrpc.Client(guest.Socket()), "http://guest"),
		AppSocket: guest.AppSocket(), StateFile: filepath.Join(o.Dir, "state.json"),
		Config: o.Config, Root: o.Root, PCI: scanner, Cluster: m.node, Pending: m.records.Pending, VMs: lentVMs{m.at, m.records}, Servers: m.servers,
		NVML: m.nvml, Catalog: m.platform.Catalog.Lookup, Settled: []*atomic.Bool{&m.cardsSettled, &m.partsSettled},
		Metrics: m.counters, Tracer: m.tracer, Whose: m.users.Of, Log: o.Log,
	}
	if m.port != nil {
		c.LendAddress = func() string {
			address, err := m.node.Address(m.node.HostName())
			if err != nil {
				return ""
			}
			return m.carriersAt(address)
		}
	}
	if m.host, err = sessions.NewHost(work, c); err != nil {
		return err
	}
	if m.port != nil {
		m.lend = lend.New(lend.Config{Listener: m.port, Expects: m.host.Expects, Socket: filepath.Join(o.Dir, "guest", lease.SocketName), Log: o.Log})
	}
	return nil
}

// makeKeepers makes the keepers of what VMs have of this host.
func (m *wiring) makeKeepers(o Options) (err error) {
	m.serving = servicevm.NewKeeper(servicevm.Config{Registry: m.servers, Claims: m.host, Loopback: neighbours{m.node}.loopback, Log: o.Log})
	m.cards, err = cards.New(cards.Config{
		Platform: m.platform.Cards, File: filepath.Join(o.records(), "cards.json"), Guests: m.guests, Serving: m.serving, Cluster: m.node,
		GPUs: m.host.DetectedGPUs, Settled: &m.cardsSettled, Pending: m.records.Pending, Moving: m.records.Moving, Event: m.node.NoteGPU, Log: o.Log, Park: o.Config.Devices.Park,
	})
	if err != nil {
		return err
	}
	if m.mediated, err = m.mediate(o); err != nil {
		return err
	}
	m.runner = &platform.Runner{Platform: m.platform, Dir: o.Dir, Keeper: m.cards, Parts: m.mediated, Event: m.node.NoteGPU}
	return nil
}

// makeMigrations makes what moves VMs, and what operators change them with.
func (m *wiring) makeMigrations(o Options) (err error) {
	if m.site, err = m.endpoint(o); err != nil {
		return err
	}
	m.borrow = borrow.New(borrow.Config{Node: m.node, Site: m.site, VMs: m.platform.Cards.VMs, Log: o.Log})
	nics := &cardapi.NICs{Network: m.network, Peers: neighbours{m.node}.peers, Log: o.Log}
	m.devices = cardapi.New(cardapi.Config{
		Keeper: mediated.Both{CardKeeper: m.cards, Mediated: m.mediated}, Remote: m.borrow,
		Service: servicevm.NewService(servicevm.ServiceConfig{Keeper: m.serving, VMs: m.platform.Cards.VMs, Cards: m.cards, Leaving: m.leaving}),
		NICs:    nics, Cluster: m.node, Log: o.Log,
	})
	m.migrations = migration.New(migration.Config{
		Node: m.node, VMs: m.devices.Everywhere, Ready: m.host.Ready, Most: o.Config.Devices.Migrations, Log: o.Log,
		Rehearse: m.site.Rehearse,
	})
	return nil
}

// leaving asks the migrations, which are made after who asks.
func (m *wiring) leaving(ctx context.Context, uuid string) (migration string, err error) {
	return m.migrations.Leaving(ctx, uuid)
}

// endpoint makes this host's part in migrations.
func (m *wiring) endpoint(o Options) (*endpoint.Local, error) {
	rate, err := o.Config.Devices.Rate()
	if err != nil {
		return nil, err
	}
	fence, states, err := m.memory(o)
	if err != nil {
		return nil, err
	}
	uri := o.Config.Devices.MigrateURI
	if uri == "" {
		uri = m.platform.Scheme() + "+tls://{address}/system"
	}
	hosts := neighbours{m.node}
	l := &endpoint.Local{
		Whereabouts: m.at, Guests: m.guests, Keeper: m.cards, VMs: m.platform.Cards.VMs, Parts: m.mediated, Domains: m.platform, Serves: m.servers.Serves,
		Fence: fence, Stash: states,
		Party: m.records.Party, Borrows: m.records.Borrows, MovedTo: m.records.MovedTo,
		Files: statFile, Unsafe: o.Config.Devices.UnsafeDisks, TLS: o.Config.Devices.MigrationTLS,
		URI: func(to string) (string, string, error) {
			address, err := m.node.Address(to)
			if strings.Contains(address, ":") {
				address = "[" + address + "]"
			}
			return strings.NewReplacer("{host}", to, "{address}", address).Replace(uri), "tcp://" + address, err
		},
		Link: func(_ context.Context, from string) uint64 {
			link := slowest(m.node.View(), from, m.node.HostName())
			if rate > 0 && (link == 0 || rate < link) {
				return rate
			}
			return link
		},
		Locks:  func() virt.Locks { return virt.LocksOf(sysfs.Dir("/"), virt.Driver(m.platform.Scheme())) },
		Others: hosts.others, Rate: rate,
		Follow: func(ctx context.Context, to string) (endpoint.Flow, error) {
			address, err := hosts.address(ctx, to)
			if err != nil {
				return nil, err
			}
			return m.network.Follow(ctx, address, 8*rate)
		},
	}
	if m.port != nil {
		l.Lender, l.Grants = m.host, m.host
	}
	return l, nil
}

// memory opens what a host keeps of migrations: which drivers were replaced, and the GPU
// states that VMs have no room for.
func (m *wiring) memory(o Options) (fence *endpoint.Fence, states *stash.Stash, err error) {
	if o.Data == "" { // hostd --dev migrates no VMs
		return nil, nil, nil
	}
	if fence, err = endpoint.OpenFence(filepath.Join(o.Data, "migration-tokens.json"), func() string { return m.node.Status().GetClusterId() }); err != nil {
		return nil, nil, err
	}
	states, err = stash.Open(stash.Config{Dir: filepath.Join(o.Dir, "stash"), Log: o.Log, Limit: func(used uint64) (uint64, error) {
		return o.Config.Devices.StashLimit(used, func() (uint64, error) {
			_, free, err := hostinfo.Load(o.Root)
			return free, err
		})
	}})
	return fence, states, err
}

// agents are the VMs of this host, and the gpuguests in them.
type agents struct {
	endpoint.Whereabouts
	*endpoint.Guests
}

// lentVMs tells where the VMs are that have GPUs of this host, and which of them move.
type lentVMs struct {
	endpoint.Whereabouts
	migration.Records
}

// sweep removes what interrupted migrations have left on this host: GPU states, and
// copies and definitions of VMs.
func (m *wiring) sweep(ctx context.Context, log *slog.Logger) {
	if m.site.Stash == nil {
		return
	}
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		if err := m.site.Stash.Sweep(m.records.Ended); err != nil {
			log.Warn("GPU states of former migrations are left", "err", err)
		}
		away, defined := m.records.Left(ctx)
		for uuid, home := range away {
			look, cancel := context.WithTimeout(ctx, sweepEvery)
			cleared, err := m.site.Clear(look, uuid, home)
			switch {
			case errors.Is(err, endpoint.ErrTwice):
				log.Error("a VM runs on two hosts", "machine", uuid, "home", home, "err", err)
				m.node.NoteHost("MachineOnTwoHosts", err.Error())
			case err != nil && cleared:
				log.Warn("a copy of a VM is left", "machine", uuid, "home", home, "err", err)
			}
			cancel()
		}
		for _, r := range defined {
			look, cancel := context.WithTimeout(ctx, sweepEvery)
			if _, err := m.site.Withdraw(look, r.UUID, r.Home, r.Token); err != nil {
				log.Warn("a definition of a VM may be left", "machine", r.UUID, "home", r.Home, "err", err)
			}
			cancel()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

const sweepEvery = 30 * time.Second

// statFile returns an error unless the file of a VM's disk exists.
func statFile(path string) error {
	_, err := os.Stat(path)
	return err
}

// slowest returns the highest possible rate between two hosts in bytes per second: that
// of the slower one's fastest interface. 0: unknown.
func slowest(v *state.View, from, to string) uint64 {
	if v == nil {
		return 0
	}
	var out uint64
	for _, host := range []string{from, to} {
		var best uint64
		for _, n := range v.Host(host).GetNics() {
			best = max(best, n.GetSpeed()/8)
		}
		if best == 0 {
			return 0
		}
		if out == 0 || best < out {
			out = best
		}
	}
	return out
}

// letGo makes NVML close all cards while drivers change; resume ends that.
func (m *wiring) letGo(ctx context.Context, _ []pci.Address) (resume func(), err error) {
	if err := m.nvml.Release(ctx); err != nil {
		return nil, err
	}
	return m.nvml.Resume, nil
}

// openPort opens the port for carriers of other hosts; nil: this host lends nothing. So it is
// if the port that is used by default is taken.
func (o Options) openPort(ctx context.Context) (net.Listener, error) {
	at := o.Config.Cluster.LendAt()
	if o.Data == "" || at == "" { // hostd --dev has no other hosts
		return nil, nil //nolint:nilnil // it lends nothing
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", at)
	switch {
	case err != nil && o.Config.Cluster.LendListen != "":
		return nil, fmt.Errorf("cluster.lendListen: %w", err)
	case err != nil:
		o.Log.Warn("this host lends no GPU: the port for that is taken; say another one as cluster.lendListen", "err", err)
		return nil, nil //nolint:nilnil // it lends nothing
	}
	return l, nil
}

// carriersAt returns where carriers reach this host, which others reach at an address.
func (m *wiring) carriersAt(address string) string {
	return net.JoinHostPort(address, strconv.Itoa(lend.Number(m.port)))
}

// lendAddress returns where carriers reach this host, whose address in the cluster, with a
// port, is given; empty: nowhere.
func (m *wiring) lendAddress(address string) string {
	name, _, err := net.SplitHostPort(address)
	if err != nil {
		return ""
	}
	return m.carriersAt(name)
}

func (m *wiring) close() error {
	var errs []error
	if m.port != nil {
		_ = m.port.Close()
	}
	if m.tracer != nil {
		ctx, cancel := context.WithTimeout(context.Background(), shutdown)
		if err := m.tracer.Shutdown(ctx); err != nil {
			errs = append(errs, fmt.Errorf("tracing: %w", err))
		}
		cancel()
	}
	if m.node != nil {
		errs = append(errs, m.node.Close())
	}
	if m.guests != nil {
		errs = append(errs, m.guests.Close())
	}
	if m.network != nil {
		m.network.Close()
	}
	if m.platform != nil {
		errs = append(errs, m.platform.Close())
	}
	if m.nvml != nil {
		errs = append(errs, m.nvml.Close())
	}
	if m.audit != nil {
		errs = append(errs, m.audit.Close())
	}
	return errors.Join(errs...)
}

// hostName returns the name of this host in the cluster.
func hostName(c config.Cluster) (string, error) {
	if c.Host != "" {
		return c.Host, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("host name: %w; say cluster.host in the configuration", err)
	}
	if name = strings.TrimSpace(name); name == "" || name == "(none)" {
		name = "localhost"
	}
	return name, nil
}

// localPolicy looks up users and groups.
func localPolicy(a config.Access) (p access.LocalPolicy, err error) {
	number := func(what, name, id string, err error) (uint32, error) {
		if err != nil {
			return 0, fmt.Errorf("access: %s %q: %w", what, name, err)
		}
		n, err := strconv.ParseUint(id, 10, 32)
		return uint32(n), err
	}
	for _, name := range a.AdminUsers {
		u, err := user.Lookup(name)
		id := ""
		if u != nil {
			id = u.Uid
		}
		uid, err := number("user", name, id, err)
		if err != nil {
			return p, err
		}
		p.AdminUIDs = append(p.AdminUIDs, uid)
	}
	for _, list := range []struct {
		names []string
		gids  *[]uint32
	}{{a.AdminGroups, &p.AdminGIDs}, {a.OperatorGroups, &p.OperatorGIDs}, {a.ViewerGroups, &p.ViewerGIDs}} {
		for _, name := range list.names {
			g, err := user.LookupGroup(name)
			id := ""
			if g != nil {
				id = g.Gid
			}
			gid, err := number("group", name, id, err)
			if err != nil {
				return p, err
			}
			*list.gids = append(*list.gids, gid)
		}
	}
	if a.Others == "viewer" {
		p.Others = clusterv1.Role_ROLE_VIEWER
	}
	return p, nil
}
