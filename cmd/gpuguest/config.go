package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/guest/turn"
	"github.com/gpuctl/gpuctl/guest/vm/agent"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/internal/size"
)

const (
	configVersion = 1
	// The applications' OpenCL library has vmDir, too: guest/opencl/icd/shm.c.
	vmDir      = "/run/gpuctl-guest"
	vmConfig   = "/etc/gpuctl/gpuguest.yaml"
	vmProfiles = "/etc/gpuctl/profiles.d"
)

// vmOptions is the content of the configuration file of gpuguest in a VM.
type vmOptions struct {
	Version     int    `yaml:"version"`
	RunDir      string `yaml:"runDir"`
	AppSocket   string `yaml:"appSocket"`
	AppMode     string `yaml:"appMode"`                // octal
	AppGroup    string `yaml:"appGroup"`               // name or number; empty: root's
	Wait        string `yaml:"wait"`                   // forever, no, or a duration
	User        string `yaml:"executorUser,omitempty"` // only read from files of older versions
	Users       string `yaml:"executorUsers"`
	Memory      string `yaml:"executorMemory"` // for example 8GiB; empty: 7/8 of the VM's memory
	CompileAnew bool   `yaml:"compileAnew"`    // do not keep what runtimes compile for the next session
	Profiles    string `yaml:"profiles"`       // folder
	Emulated    bool   `yaml:"emulatedDevices"`
	Channel     string `yaml:"channel"`
	MaxSessions int    `yaml:"maxSessions"`
	// Services are units of systemd that watch GPUs and may be stopped while a card is away.
	Services []string `yaml:"services"`

	Sharing turn.Settings `yaml:"sharing,omitempty"` // how sessions share a GPU
	// Lend is the HOST:PORT at which carriers reach this VM; empty: its cards are its own.
	Lend string `yaml:"lend,omitempty"`
	// RDMA has carriers connect over RDMA where they can, to this VM too.
	RDMA bool `yaml:"rdma,omitempty"`

	mode os.FileMode
	wait time.Duration
}

func defaultVM() vmOptions {
	return vmOptions{
		Version: configVersion, RunDir: vmDir, AppMode: "0666", Wait: "forever", Profiles: vmProfiles, Channel: channel.Name,
		Users: confine.DefaultRange().String(), Services: []string{"nvidia-persistenced.service", "nvidia-dcgm.service", "dcgm-exporter.service"},
	}
}

// loadVM reads the file. If it is missing, loadVM returns the defaults, or an error if
// asked.
func loadVM(path string, asked bool) (vmOptions, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) && !asked {
		o := defaultVM()
		return o, o.check()
	}
	if err != nil {
		return vmOptions{}, fmt.Errorf("configuration: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err != nil {
		return vmOptions{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	o, err := parseVM(data)
	if err != nil {
		return vmOptions{}, fmt.Errorf("%s: %w", path, err)
	}
	return o, nil
}

func parseVM(data []byte) (vmOptions, error) {
	o := defaultVM()
	o.Version = 0
	if len(data) > maxConfig {
		return o, fmt.Errorf("larger than %d bytes", maxConfig)
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if err := dec.Decode(&o); err != nil {
		if errors.Is(err, io.EOF) {
			return o, fmt.Errorf("empty; it needs at least \"version: %d\"", configVersion)
		}
		return o, err
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return o, errors.New("more than one document")
	}
	return o, o.check()
}

var unitPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9:_.@-]{0,200}\.service$`)

var channelPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,126}$`)

func (o *vmOptions) check() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if o.Version != configVersion {
		bad("version: %d, this program knows %d", o.Version, configVersion)
	}
	if o.AppSocket == "" {
		o.AppSocket = filepath.Join(o.RunDir, "app.sock")
	}
	for name, path := range map[string]string{"runDir": o.RunDir, "appSocket": o.AppSocket, "profiles": o.Profiles} {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			bad("%s: %q is not a whole path", name, path)
		}
	}
	mode, err := strconv.ParseUint(o.AppMode, 8, 32)
	if err != nil || mode > 0o777 || mode&0o600 != 0o600 {
		bad("appMode: %q is not an octal mode that lets its owner read and write, as 0660", o.AppMode)
	}
	o.mode = os.FileMode(mode)
	switch o.Wait {
	case "forever":
		o.wait = agent.Forever
	case "no":
		o.wait = 0
	default:
		if o.wait, err = time.ParseDuration(o.Wait); err != nil || o.wait < 0 {
			bad("wait: %q is not forever, no or a time as 30s", o.Wait)
		}
	}
	if !channelPattern.MatchString(o.Channel) {
		bad("channel: %q is no channel's name", o.Channel)
	}
	if _, err := confine.ParseRange(o.Users); err != nil {
		bad("executorUsers: %w", err)
	}
	if o.Memory != "" {
		if _, err := size.Parse(o.Memory); err != nil {
			bad("executorMemory: %w", err)
		}
	}
	if _, err := o.Sharing.Config(); err != nil {
		bad("sharing: %w", err)
	}
	if err := checkLend(o.Lend); err != nil {
		bad("lend: %w", err)
	}
	for _, unit := range o.Services {
		if !unitPattern.MatchString(unit) {
			bad("services: %q is no unit's name, as nvidia-persistenced.service", unit)
		}
	}
	if o.MaxSessions < 0 {
		bad("maxSessions: %d is negative", o.MaxSessions)
	}
	return errors.Join(errs...)
}

// checkLend checks where carriers are to reach the VM. Who lends says so to others, so that
// the port must be known.
func checkLend(at string) error {
	if at == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(at)
	if err != nil {
		return fmt.Errorf("%q is not HOST:PORT: %w", at, err)
	}
	if _, err := netip.ParseAddr(host); host != "" && err != nil {
		return fmt.Errorf("%q: %q is not an IP address; leave it out for all addresses of the VM", at, host)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("%q: port %q is not a number from 1 to 65535", at, port)
	}
	return nil
}
