package hostd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/guest/lease"
	"github.com/gpuctl/gpuctl/hostd/borrow"
	"github.com/gpuctl/gpuctl/hostd/cards/cardapi"
	"github.com/gpuctl/gpuctl/hostd/cards/platform"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/hostd/inventory/hostinfo"
	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/hostd/lend"
	"github.com/gpuctl/gpuctl/hostd/mediated"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
	"github.com/gpuctl/gpuctl/hostd/migration"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/hostd/migration/stash"
	"github.com/gpuctl/gpuctl/hostd/network"
	"github.com/gpuctl/gpuctl/hostd/network/nics"
	"github.com/gpuctl/gpuctl/hostd/servicevm"
	"github.com/gpuctl/gpuctl/hostd/sessions"
	"github.com/gpuctl/gpuctl/hostd/telemetry/metrics"
	"github.com/gpuctl/gpuctl/hostd/telemetry/trace"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// wiring has the parts of a host other than its sessions, in the order in which they are
// made.
type wiring struct {
	node   *member.Node
	audit  *access.AuditLog
	nvml   *nvml.Client
	cards  *platform.Platform
	guests *endpoint.Guests

	mediated *mediated.Keeper

	lend   *lend.Port     // nil: no GPU is lent
	borrow *borrow.Keeper // of VMs

	serving *servicevm.Keeper

	network *network.Host
	nics    *nics.Manager
	rate    uint64 // limit for sending VMs, bytes per second; 0: not limited

	metrics *metrics.Metrics
	tracer  *trace.Tracer // nil: no traces
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

// join makes the parts of the host in order: metrics, then the node, which is in no
// cluster yet, then what uses the node. At the end it starts the node, which serves all
// of them and takes up its former membership.
func (o Options) join(ctx context.Context, host *sessions.Host) (m *wiring, err error) {
	m = &wiring{nvml: nvml.New(nvml.Config{Log: o.Log})}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	host.NVML = m.nvml
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
	if err := m.observe(ctx, o, host, name); err != nil {
		return m, err
	}
	if err := m.openPort(ctx, o, host); err != nil {
		return m, err
	}
	c := o.Config.Cluster
	m.node = member.New(ctx, member.Config{
		Dir: o.Data, Name: name, Listen: cmp.Or(c.Listen, config.DefaultListen), Advertise: c.Advertise, Version: o.Version,
		Local: func() access.LocalPolicy { return policy }, Audit: m.audit,
		Timing: replica.Fast().Stretched(cmp.Or(c.RaftMultiplier, 1)), Members: replica.Members{MaxVoters: c.Voters, Lost: c.Lost(), Zone: c.Zone},
		Interceptors: []connect.Interceptor{m.metrics.Interceptor()}, Refused: m.metrics.Refused, Logger: o.Log,
	})
	host.Cluster = m.node
	if err := m.open(ctx, o, host, name); err != nil {
		return m, err
	}
	return m, m.node.Start(ctx, member.Served{Host: host, Lender: m.lender(host), LendAddress: m.lendAddress, Services: host.Handle})
}

// open finds out which hypervisor runs, and which cards VMs have.
func (m *wiring) open(ctx context.Context, o Options, host *sessions.Host, name string) (err error) {
	dir := cmp.Or(o.Data, o.Dir)
	m.cards, err = platform.Open(ctx, platform.Options{
		Config: o.Config.Devices, Dev: o.Data == "", Root: sysfs.Dir("/"), PCI: host.PCI, Dir: dir, RunDir: o.Dir, Cluster: m.node, GPUs: host.DetectedGPUs,
		LetGo: m.letGo, Event: host.RecordCardEvent, Log: o.Log,
	})
	if err != nil {
		return err
	}
	host.Cards = m.cards
	if m.network, err = network.Open(sysfs.Dir("/")); err != nil {
		return err
	}
	m.nics = &nics.Manager{Network: m.network, Owners: m.cards.Keeper.Hypervisor.Owners, Peers: m.peers, Event: host.RecordHostEvent, Log: o.Log}
	if err := m.mediate(o, host, dir); err != nil {
		return err
	}
	host.Devices = cardapi.New(mediated.Both{CardKeeper: m.cards.Keeper, Mediated: m.mediated}, m.nics, m.node, o.Log)
	if m.rate, err = o.Config.Devices.Rate(); err != nil {
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
	if o.Config.Devices.MigrationTLS && m.cards.Client != nil && m.cards.Client.Driver() == virt.Xen {
		return errors.New("devices.migrationTLS: libxl sends the memory of VMs unencrypted; leave it out, and use a network of your own for the cluster's addresses")
	}
	uri := o.Config.Devices.MigrateURI
	if uri == "" {
		uri = m.cards.Scheme() + "+tls://{address}/system"
	}
	at := endpoint.Whereabouts{
		Name: name, Client: m.cards.Client, Member: m.knows, Log: o.Log,
		Peer: func(to string) (gpuctlv1connect.SiteServiceClient, error) { return m.node.Site(to) },
	}
	m.guests = endpoint.NewGuests(endpoint.GuestsConfig{
		Channels: at, Cards: host.PCI.Cards, Vchan: m.cards.Vchan, Console: m.cards.Scheme() == "xen", Locks: o.Dir, Log: o.Log,
	})
	host.Site = &endpoint.Local{
		Whereabouts: at, Guests: m.guests, Keeper: m.cards.Keeper, VMs: m.cards.Keeper.VMs, Files: statFile,
		Parts:  m.mediated,
		Unsafe: o.Config.Devices.UnsafeDisks, TLS: o.Config.Devices.MigrationTLS,
		URI: func(to string) (string, string, error) {
			address, err := m.node.Address(to)
			if strings.Contains(address, ":") {
				address = "[" + address + "]"
			}
			return strings.NewReplacer("{host}", to, "{address}", address).Replace(uri), "tcp://" + address, err
		},
		Link: func(_ context.Context, from string) uint64 {
			link := slowest(m.node.View(), from, m.node.HostName())
			if m.rate > 0 && (link == 0 || m.rate < link) {
				return m.rate
			}
			return link
		},
		Locks: func() virt.Locks { return virt.LocksOf(sysfs.Dir("/"), virt.Driver(m.cards.Scheme())) }, Others: m.others,
		Rate: m.rate, Follow: m.follow,
	}
	if o.Data != "" { // hostd --dev migrates no VMs
		if host.Site.Fence, err = endpoint.OpenFence(filepath.Join(o.Data, "migration-tokens.json"), func() string { return m.node.Status().GetClusterId() }); err != nil {
			return err
		}
		host.Site.Stash, err = stash.Open(stash.Config{Dir: filepath.Join(o.Dir, "stash"), Log: o.Log, Limit: func(used uint64) (uint64, error) {
			return o.Config.Devices.StashLimit(used, func() (uint64, error) {
				_, free, err := hostinfo.Load(o.Root)
				return free, err
			})
		}})
		if err != nil {
			return err
		}
	}
	host.Migrations = migration.New(migration.Config{
		Node: m.node, VMs: host.Devices.Everywhere, Ready: host.Ready, Most: o.Config.Devices.Migrations, Log: o.Log,
		Rehearse: host.Site.Rehearse,
	})
	host.Site.Party, host.Site.Borrows, host.Pending = host.Migrations.Party, host.Migrations.Borrows, host.Migrations.Pending
	host.Site.MovedTo = host.Migrations.MovedTo
	if m.lend != nil {
		host.Site.Lender, host.Site.Grants = host, host
	}
	host.VMs = lentVMs{host.Site, host.Migrations}
	m.borrow = borrow.New(borrow.Config{Node: m.node, Site: host.Site, VMs: m.cards.Keeper.VMs, Log: o.Log})
	host.Devices.Remote = m.borrow
	if err := m.serveVMs(o, host, name); err != nil {
		return err
	}
	m.cards.Keeper.Guests, m.cards.Keeper.Pending = m.guests, host.Migrations.Pending
	return nil
}

// serveVMs takes over the service VMs of this host.
func (m *wiring) serveVMs(o Options, host *sessions.Host, name string) (err error) {
	file := ""
	if o.Data != "" {
		file = filepath.Join(o.Data, "service-vms.json")
	}
	m.serving, err = servicevm.New(servicevm.Config{
		File: file, Host: name, Site: agents{host.Site.Whereabouts, m.guests}, VMs: m.cards.Keeper.VMs, Cards: m.cards.Keeper, Claims: host, Loopback: m.loopback, Log: o.Log,
	})
	if err != nil {
		return err
	}
	host.Servers, host.Devices.Service, host.Site.Serves, m.cards.Keeper.Serving = m.serving, m.serving, m.serving.Serves, m.serving
	return nil
}

// loopback reports whether other hosts reach this one at an address of this machine only, as
// in a test of several on one.
func (m *wiring) loopback() bool {
	address, err := m.node.Address(m.node.HostName())
	if err != nil {
		return false
	}
	at, err := netip.ParseAddr(address)
	return err == nil && at.IsLoopback()
}

// agents are the VMs of this host, and the gpuguests in them.
type agents struct {
	endpoint.Whereabouts
	*endpoint.Guests
}

// lentVMs tells where the VMs are that have GPUs of this host.
type lentVMs struct {
	*endpoint.Local
	*migration.Manager
}

// knows reports whether a host is in the cluster, or whether that is unknown.
func (m *wiring) knows(host string) bool {
	v := m.node.View()
	return v == nil || v.Host(host) != nil
}

// others returns the names of the other hosts of the cluster.
func (m *wiring) others() (names []string) {
	v := m.node.View()
	if v == nil {
		return nil
	}
	for h := range v.Hosts() {
		if h.GetName() != m.node.HostName() {
			names = append(names, h.GetName())
		}
	}
	return names
}

// sweep removes what interrupted migrations have left on this host: GPU states, and
// copies of VMs.
func (m *wiring) sweep(ctx context.Context, host *sessions.Host) {
	if host.Site == nil || host.Site.Stash == nil {
		return
	}
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		if err := host.Site.Stash.Sweep(host.Migrations.Ended); err != nil {
			host.Log.Warn("GPU states of former migrations are left", "err", err)
		}
		for uuid, home := range host.Migrations.Away(ctx) {
			look, cancel := context.WithTimeout(ctx, sweepEvery)
			cleared, err := host.Site.Clear(look, uuid, home)
			switch {
			case errors.Is(err, endpoint.ErrTwice):
				host.Log.Error("a VM runs on two hosts", "machine", uuid, "home", home, "err", err)
				host.RecordHostEvent("MachineOnTwoHosts", err.Error())
			case err != nil && cleared:
				host.Log.Warn("a copy of a VM is left", "machine", uuid, "home", home, "err", err)
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

// follow counts what this host sends to another host during a migration, and limits it to
// the configured rate.
func (m *wiring) follow(ctx context.Context, to string) (endpoint.Flow, error) {
	address, err := m.address(ctx, to)
	if err != nil {
		return nil, err
	}
	return m.network.Follow(ctx, address, 8*m.rate)
}

// address returns the address to which VMs for that host are sent.
func (m *wiring) address(ctx context.Context, host string) (netip.Addr, error) {
	name, err := m.node.Address(host)
	if err != nil {
		return netip.Addr{}, err
	}
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	if err != nil {
		return netip.Addr{}, err
	}
	return all[0], nil
}

// peers returns the known addresses of other hosts.
func (m *wiring) peers(ctx context.Context) map[string]netip.Addr {
	out := map[string]netip.Addr{}
	for _, host := range m.node.OtherHosts() {
		if a, err := m.address(ctx, host); err == nil {
			out[host] = a
		}
	}
	return out
}

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

// observe makes metrics and traces. The node counts its calls with them, so they are made
// first. They read the node's state only when they are read.
func (m *wiring) observe(ctx context.Context, o Options, host *sessions.Host, name string) (err error) {
	m.metrics = metrics.New(metrics.NewCounters(), metrics.Sources{
		View:    func() *state.View { return m.node.View() },
		Status:  func() *clusterv1.StatusResponse { return m.node.Status() },
		Health:  func() error { return m.node.Health() },
		Skipped: func() uint64 { return m.node.Skipped() },
		Facts:   func(ctx context.Context) (*clusterv1.HostFacts, error) { return m.node.Facts(ctx) },
		Audit:   m.audit.Counts, Mediated: m.statuses,
		Version: o.Version, Log: o.Log,
	})
	t := o.Config.Tracing
	m.tracer, err = trace.New(ctx, trace.Config{
		Endpoint: t.Endpoint, Insecure: t.Insecure, SampleRatio: t.Sample, Version: o.Version, Host: name, Log: o.Log,
	})
	if err != nil {
		return fmt.Errorf("tracing: %w", err)
	}
	host.Metrics, host.Tracer = m.metrics.Counters, m.tracer
	return nil
}

// openPort opens the port for carriers of other hosts. If the port that is used by default
// is taken, this host lends nothing.
func (m *wiring) openPort(ctx context.Context, o Options, host *sessions.Host) error {
	at := o.Config.Cluster.LendAt()
	if o.Data == "" || at == "" { // hostd --dev has no other hosts
		return nil
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", at)
	switch {
	case err != nil && o.Config.Cluster.LendListen != "":
		return fmt.Errorf("cluster.lendListen: %w", err)
	case err != nil:
		o.Log.Warn("this host lends no GPU: the port for that is taken; say another one as cluster.lendListen", "err", err)
		return nil
	}
	m.lend = lend.New(lend.Config{Listener: l, Expects: host.Expects, Socket: filepath.Join(o.Dir, "guest", lease.SocketName), Log: o.Log})
	host.LendAddress = func() string {
		address, err := m.node.Address(m.node.HostName())
		if err != nil {
			return ""
		}
		return net.JoinHostPort(address, strconv.Itoa(m.lend.Number()))
	}
	return nil
}

// lender returns who lends GPUs; nil: nobody.
func (m *wiring) lender(host *sessions.Host) clusterapi.Lender {
	if m.lend == nil {
		return nil
	}
	return host
}

// lendAddress returns where carriers reach this host, whose address in the cluster is
// given; empty: nowhere.
func (m *wiring) lendAddress(address string) string {
	name, _, err := net.SplitHostPort(address)
	if err != nil || m.lend == nil {
		return ""
	}
	return net.JoinHostPort(name, strconv.Itoa(m.lend.Number()))
}

func (m *wiring) close() error {
	var errs []error
	if m.lend != nil {
		_ = m.lend.Listener.Close()
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
	if m.cards != nil {
		errs = append(errs, m.cards.Close())
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
