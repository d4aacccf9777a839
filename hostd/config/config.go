package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/guest/turn"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/timeshare"
)

// Version is the only version of the file that there is.
const Version = 1

// maxSize is the largest file that is read, in bytes.
const maxSize = 1 << 20

// ErrInvalid is wrapped by every error about a file's content.
var ErrInvalid = errors.New("invalid configuration")

// Config is the content of the configuration file.
type Config struct {
	Version       int           `yaml:"version"`
	Discover      bool          `yaml:"discover"`             // use every OpenCL runtime that is installed
	VendorDirs    []string      `yaml:"vendorDirs,omitempty"` // additional folders with .icd files
	VirtualDevice VirtualDevice `yaml:"virtualDevice,omitempty"`
	GPUs          []GPU         `yaml:"gpus,omitempty"`
	Models        []Model       `yaml:"models,omitempty"`
	Cluster       Cluster       `yaml:"cluster,omitempty"`
	Access        Access        `yaml:"access,omitempty"`
	Metrics       Metrics       `yaml:"metrics,omitempty"`
	Tracing       Tracing       `yaml:"tracing,omitempty"`
	Devices       Devices       `yaml:"devices,omitempty"`
	Executors     Executors     `yaml:"executors,omitempty"`
	Sharing       Sharing       `yaml:"sharing,omitempty"`
	MMIO          MMIO          `yaml:"mmio,omitempty"`
}

// Executors configures the processes that load vendors' runtimes: one or two for each
// session.
type Executors struct {
	// Users is a range of user and group ids, FIRST-LAST, that nobody else uses. If hostd
	// is root, the executors of each session get one of them. Empty:
	// confine.DefaultRange.
	Users  string `yaml:"users,omitempty"`
	Memory string `yaml:"memory,omitempty"` // most memory for the executors of one session, such as 8GiB; default 7/8 of the host's memory
	// CompileAnew turns the cache of compiled programs off. Otherwise what a runtime has
	// compiled is kept for the next session of the same user with the same program.
	CompileAnew bool `yaml:"compileAnew,omitempty"`
}

func (e Executors) validate() error {
	var errs []error
	if e.Users != "" {
		if _, err := confine.ParseRange(e.Users); err != nil {
			errs = append(errs, fmt.Errorf("executors.users: %w", err))
		}
	}
	if e.Memory != "" {
		if n, err := size.Parse(e.Memory); err != nil || n == 0 {
			errs = append(errs, fmt.Errorf("executors.memory: %q is not a size", e.Memory))
		}
	}
	return errors.Join(errs...)
}

// Sharing configures how the sessions of several owners share a GPU. It is gpuguest's, and
// holds from its next start on.
type Sharing struct {
	turn.Settings `yaml:",inline"`
	// MostWeight is the largest weight that users other than root and hostd's own may give
	// to their claims. 0: 100, the default of every claim.
	MostWeight uint32 `yaml:"mostWeight,omitempty"`
}

// Most returns the largest weight that users may choose.
func (s Sharing) Most() uint32 {
	if s.MostWeight == 0 {
		return turn.DefaultWeight
	}
	return s.MostWeight
}

func (s Sharing) validate() error {
	_, err := s.Config()
	if err != nil {
		err = fmt.Errorf("sharing.%w", err)
	}
	if s.MostWeight > timeshare.MaxWeight {
		err = errors.Join(err, fmt.Errorf("sharing.mostWeight: %d is more than %d", s.MostWeight, timeshare.MaxWeight))
	}
	return err
}

// Devices configures how PCI cards are given to VMs.
type Devices struct {
	Libvirt       string   `yaml:"libvirt,omitempty"`       // URI; default xen:///system in a control domain of Xen, else qemu:///system
	LibvirtSocket string   `yaml:"libvirtSocket,omitempty"` // default /run/libvirt/libvirt-sock
	MigrateURI    string   `yaml:"migrateURI,omitempty"`    // URI of another host's libvirtd, with {host} or {address}; default xen+tls://{address}/system
	UnsafeDisks   bool     `yaml:"unsafeDisks,omitempty"`   // migrate VMs of qemu although the host caches their disks
	MigrationRate string   `yaml:"migrationRate,omitempty"` // highest rate at which VMs are sent to one host, bytes per second, such as 100MiB; default: not limited
	MigrationTLS  bool     `yaml:"migrationTLS,omitempty"`  // encrypt the memory of VMs that are sent; qemu only
	Migrations    int      `yaml:"migrations,omitempty"`    // most migrations from or to this host at a time; default 2
	Stash         string   `yaml:"stash,omitempty"`         // most memory for GPU states that VMs have no room for, such as 8GiB; 0: none; default a quarter of the free memory
	Park          bool     `yaml:"park,omitempty"`          // leave cards bound to the hypervisor's driver after use, for the next VM
	Catalog       []string `yaml:"catalog,omitempty"`       // files that extend the catalogue of models
}

// minRate is 10 Mbit/s. At a lower rate, a VM usually writes memory faster than it can be
// sent.
const minRate = 10_000_000 / 8

// Rate returns MigrationRate in bytes per second; 0: not limited.
func (d Devices) Rate() (uint64, error) {
	if d.MigrationRate == "" {
		return 0, nil
	}
	return size.Parse(d.MigrationRate)
}

// StashLimit returns how many bytes of GPU states may be kept on this host, including the
// used bytes that are kept now. free returns the memory in bytes that programs can still
// get. It is called only if Stash is empty.
func (d Devices) StashLimit(used uint64, free func() (uint64, error)) (uint64, error) {
	if d.Stash == "" {
		n, err := free()
		return (n + used) / stashShare, err
	}
	return size.Parse(d.Stash)
}

// stashShare is the part of the free memory, 1/stashShare, that GPU states may use if
// Stash is empty.
const stashShare = 4

// Cluster configures this host's membership in a cluster. hostd --dev ignores it.
type Cluster struct {
	Host      string `yaml:"host,omitempty"`      // this host's name; default: the system's host name
	Listen    string `yaml:"listen,omitempty"`    // HOST:PORT to listen on; default DefaultListen
	Advertise string `yaml:"advertise,omitempty"` // HOST:PORT at which other hosts reach this one; default: from listen
	Voters    int    `yaml:"voters,omitempty"`    // most voters: 3, 5 or 7 (the default)
	LostAfter string `yaml:"lostAfter,omitempty"` // a voter that is down for so long is replaced; default 10m
	Zone      string `yaml:"zone,omitempty"`      // label that names a host's failure domain; default zone
	// LendListen is HOST:PORT at which carriers of other hosts reach the GPUs that this
	// host lends to their sessions, or LendNothing. Default: the port after that of
	// Listen, on the same addresses.
	LendListen string `yaml:"lendListen,omitempty"`
	// RDMA has sessions reach GPUs of other hosts over RDMA where they can, and be reached so.
	RDMA bool `yaml:"rdma,omitempty"`
	// RaftMultiplier multiplies Raft's time-outs, for hosts that are slow or far apart: 1
	// (the default) to 10. It must be the same on all hosts.
	RaftMultiplier int `yaml:"raftMultiplier,omitempty"`
}

// DefaultListen is the default address of the hosts' API: all addresses, port 7650.
const DefaultListen = ":7650"

// LendNothing as LendListen means that this host lends no GPU.
const LendNothing = "none"

// LendAt returns HOST:PORT at which carriers are to reach this host; empty: nowhere.
func (c Cluster) LendAt() string {
	switch c.LendListen {
	case LendNothing:
		return ""
	case "":
	default:
		return c.LendListen
	}
	listen := c.Listen
	if listen == "" {
		listen = DefaultListen
	}
	host, port, err := net.SplitHostPort(listen)
	n, numeric := strconv.ParseUint(port, 10, 16)
	if err != nil || numeric != nil || n >= 1<<16-1 {
		return ""
	}
	return net.JoinHostPort(host, strconv.FormatUint(n+1, 10))
}

// Access gives local users their roles, by their groups. Root and hostd's own user are
// administrators.
type Access struct {
	AdminUsers     []string `yaml:"adminUsers,omitempty,flow"`
	AdminGroups    []string `yaml:"adminGroups,omitempty,flow"`
	OperatorGroups []string `yaml:"operatorGroups,omitempty,flow"`
	ViewerGroups   []string `yaml:"viewerGroups,omitempty,flow"`
	Others         string   `yaml:"others,omitempty"` // role of all other users: none (the default) or viewer
}

// Metrics configures the metrics for Prometheus, over HTTP without TLS.
type Metrics struct {
	Listen string `yaml:"listen,omitempty"` // HOST:PORT to listen on; empty: no metrics
}

// Tracing configures traces of long operations, with OpenTelemetry.
type Tracing struct {
	Endpoint string  `yaml:"endpoint,omitempty"` // HOST:PORT of a collector (OTLP over HTTP); empty: no traces
	Insecure bool    `yaml:"insecure,omitempty"` // without TLS
	Sample   float64 `yaml:"sample,omitempty"`   // share of the operations that is traced, above 0 to 1; default 1
}

// VirtualDevice is the default of what applications see as their device.
type VirtualDevice struct {
	Name string `yaml:"name,omitempty"`
	Type string `yaml:"type,omitempty"` // gpu, cpu or accelerator; empty: the type of the first GPU
}

// GPU declares devices of a runtime, with environment variables for that runtime.
type GPU struct {
	ID      string            `yaml:"id"`
	Library string            `yaml:"library,omitempty"` // path of the vendor's ICD library; this or Runtime
	Runtime string            `yaml:"runtime,omitempty"` // name of an installed runtime
	Env     map[string]string `yaml:"env,omitempty"`
	Model   string            `yaml:"model,omitempty"`        // default: the device's name
	Devices []uint32          `yaml:"devices,flow,omitempty"` // indexes of devices; default: all; several become ID-0, ID-1, …
}

// Model gives a model its rank in the order of upgrades and downgrades. A model that is
// not listed has rank 0. Models of equal rank are ordered by the properties of their
// devices.
type Model struct {
	Name string `yaml:"name"`
	Rank int    `yaml:"rank"`
}

// Default returns the configuration of a host that has no file.
func Default() Config { return Config{Version: Version, Discover: true} }

// Load reads the configuration from a file. Errors about its content wrap ErrInvalid.
func Load(path string) (Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return Config{}, fmt.Errorf("configuration: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return Config{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	c, err := Parse(data)
	if err != nil {
		return Config{}, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// Parse reads the content of a file. What is left out has its default value. Errors wrap
// ErrInvalid.
func Parse(data []byte) (Config, error) {
	if len(data) > maxSize {
		return Config{}, fmt.Errorf("%w: larger than %d bytes", ErrInvalid, maxSize)
	}
	c := Default()
	c.Version = 0
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if err := dec.Decode(&c); err != nil {
		if errors.Is(err, io.EOF) {
			return Config{}, fmt.Errorf("%w: empty; it needs at least \"version: %d\"", ErrInvalid, Version)
		}
		return Config{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return Config{}, fmt.Errorf("%w: more than one document", ErrInvalid)
	}
	if err := c.Validate(); err != nil {
		return Config{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return c, nil
}

// Dump returns the configuration as YAML that Parse accepts.
func (c Config) Dump() ([]byte, error) {
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(c); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	return b.Bytes(), nil
}

// Validate returns all errors in the configuration, joined. Each wraps ErrInvalid.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Version != Version {
		bad("version: %d is not known (want %d)", c.Version, Version)
	}
	if !slices.Contains([]string{"", "gpu", "cpu", "accelerator"}, c.VirtualDevice.Type) {
		bad("virtualDevice.type: %q is not gpu, cpu or accelerator", c.VirtualDevice.Type)
	}
	if len(c.VirtualDevice.Name) > 255 || strings.ContainsRune(c.VirtualDevice.Name, 0) {
		bad("virtualDevice.name: longer than 255 bytes, or with a NUL")
	}
	for i, dir := range c.VendorDirs {
		if !strings.HasPrefix(dir, "/") {
			bad("vendorDirs[%d]: %q is not an absolute path", i, dir)
		}
	}
	ids := map[string]bool{}
	for i, g := range c.GPUs {
		where := fmt.Sprintf("gpus[%d]", i)
		if !idPattern().MatchString(g.ID) {
			bad("%s.id: %q (want lower-case letters, digits, '.', '_' and '-', at most 48)", where, g.ID)
		} else {
			where = "gpu " + g.ID
		}
		if ids[g.ID] {
			bad("%s: declared twice", where)
		}
		ids[g.ID] = true
		if (g.Library == "") == (g.Runtime == "") {
			bad("%s: needs either library or runtime", where)
		}
		for name, value := range g.Env {
			if !envPattern().MatchString(name) || strings.ContainsRune(value, 0) {
				bad("%s: env %q is not a variable", where, name)
			}
		}
		if len(g.Model) > 255 {
			bad("%s: model is longer than 255 bytes", where)
		}
		if len(g.Devices) > 64 {
			bad("%s: more than 64 devices", where)
		}
		seen := map[uint32]bool{}
		for _, d := range g.Devices {
			if seen[d] {
				bad("%s: device %d twice", where, d)
			}
			seen[d] = true
		}
	}
	models := map[string]bool{}
	for i, m := range c.Models {
		if m.Name == "" {
			bad("models[%d].name: missing", i)
		}
		if models[m.Name] {
			bad("models[%d]: %q twice", i, m.Name)
		}
		models[m.Name] = true
	}
	if r, err := c.Devices.Rate(); err != nil || c.Devices.MigrationRate != "" && r < minRate {
		bad("devices.migrationRate: %q is not a size of at least %s, to be sent per second", c.Devices.MigrationRate, size.Format(minRate))
	}
	if _, err := c.Devices.StashLimit(0, func() (uint64, error) { return 0, nil }); err != nil {
		bad("devices.stash: %q is not a size, or 0", c.Devices.Stash)
	}
	errs = append(errs, c.Cluster.validate(), c.Access.validate(), c.Executors.validate(), c.Sharing.validate(), c.MMIO.validate(c.GPUs))
	if l := c.Metrics.Listen; l != "" {
		errs = append(errs, address("metrics.listen", l))
	}
	if e := c.Tracing.Endpoint; e != "" {
		errs = append(errs, address("tracing.endpoint", e))
	}
	if s := c.Tracing.Sample; s < 0 || s > 1 {
		bad("tracing.sample: %v is not from 0 to 1", s)
	}
	// PoCL silently ignores a limit that it cannot parse, so it is checked here.
	for _, g := range c.GPUs {
		if v, ok := g.Env["POCL_MEMORY_LIMIT"]; ok {
			if n, err := strconv.ParseUint(v, 10, 32); err != nil || n == 0 {
				bad("gpu %s: POCL_MEMORY_LIMIT %q is not a number of GiB", g.ID, v)
			}
		}
	}
	return errors.Join(errs...)
}

func idPattern() *regexp.Regexp  { return regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,47}$`) }
func envPattern() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`) }

func (c Cluster) validate() error {
	var errs []error
	if c.Host != "" && !hostPattern().MatchString(c.Host) {
		errs = append(errs, fmt.Errorf("cluster.host: %q (want letters, digits, '.', '_' and '-', at most 253)", c.Host))
	}
	if c.Listen != "" {
		errs = append(errs, address("cluster.listen", c.Listen))
	}
	if c.Advertise != "" {
		errs = append(errs, address("cluster.advertise", c.Advertise))
		if host, _, err := net.SplitHostPort(c.Advertise); err == nil && host == "" {
			errs = append(errs, fmt.Errorf("cluster.advertise: %q names no host that others could reach", c.Advertise))
		}
	}
	if c.LendListen != "" && c.LendListen != LendNothing {
		errs = append(errs, address("cluster.lendListen", c.LendListen))
	}
	if !slices.Contains([]int{0, 3, 5, 7}, c.Voters) {
		errs = append(errs, fmt.Errorf("cluster.voters: %d is not 3, 5 or 7", c.Voters))
	}
	if m := c.RaftMultiplier; m < 0 || m > 10 {
		errs = append(errs, fmt.Errorf("cluster.raftMultiplier: %d is not 1 to 10", m))
	}
	if c.LostAfter != "" {
		if d, err := time.ParseDuration(c.LostAfter); err != nil || d < 10*time.Second {
			errs = append(errs, fmt.Errorf("cluster.lostAfter: %q is not a duration of 10s or more", c.LostAfter))
		}
	}
	return errors.Join(errs...)
}

// Lost returns LostAfter as a duration; 0: not set.
func (c Cluster) Lost() time.Duration {
	d, _ := time.ParseDuration(c.LostAfter) // Validate has checked it
	return d
}

func (a Access) validate() error {
	if !slices.Contains([]string{"", "none", "viewer"}, a.Others) {
		return fmt.Errorf("access.others: %q is not none or viewer", a.Others)
	}
	return nil
}

func address(where, s string) error {
	_, port, err := net.SplitHostPort(s)
	if err != nil {
		return fmt.Errorf("%s: %q is not HOST:PORT: %w", where, s, err)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("%s: %q: the port is not a number from 1 to 65535", where, s)
	}
	return nil
}

func hostPattern() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$`) }
