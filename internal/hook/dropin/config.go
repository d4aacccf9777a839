package dropin

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/internal/hook/wire"
)

// What happens to a start if hostd does not answer.
const (
	Allow       = "allow"
	Deny        = "deny"
	DenyManaged = "deny-managed"
)

// ConfigFile is the path of the configuration below the root.
const ConfigFile = "etc/gpuctl/hook.yaml"

const maxConfig = 16 << 10

// Config is the configuration of the hook.
type Config struct {
	OnUnreachable string
	Timeout       time.Duration // for events about GPUs
	NotifyTimeout time.Duration // for other events
	Socket        string        // absolute path; empty: in the run folder
}

// DefaultConfig returns the configuration that is used without a file. The time-out is a
// little longer than hostd's.
func DefaultConfig() Config {
	return Config{OnUnreachable: DenyManaged, Timeout: 31 * time.Second, NotifyTimeout: 5 * time.Second}
}

// LoadConfig reads the file below root. If there is none, it returns the defaults. If it
// is wrong, it returns the defaults and an error.
func LoadConfig(root fs.FS) (Config, error) {
	f, err := root.Open(ConfigFile)
	if errors.Is(err, fs.ErrNotExist) {
		return DefaultConfig(), nil
	} else if err != nil {
		return DefaultConfig(), fmt.Errorf("/%s: %w", ConfigFile, err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err == nil && len(data) > maxConfig {
		err = fmt.Errorf("more than %d bytes", maxConfig)
	}
	c := Config{}
	if err == nil {
		c, err = ParseConfig(string(data))
	}
	if err != nil {
		return DefaultConfig(), fmt.Errorf("/%s: %w", ConfigFile, err)
	}
	return c, nil
}

// ParseConfig parses lines of "key: value". They are YAML; other forms of YAML are not
// supported.
func ParseConfig(text string) (Config, error) {
	c := DefaultConfig()
	seen := map[string]bool{}
	number := 0
	for line := range strings.Lines(text) {
		number++
		fail := func(format string, args ...any) error {
			return fmt.Errorf("line %d: %w", number, fmt.Errorf(format, args...))
		}
		line = strings.TrimSpace(line)
		if i := strings.Index(line, " #"); i >= 0 {
			line = strings.TrimSpace(line[:i])
		}
		if line == "" || line == "---" || line[0] == '#' {
			continue
		}
		key, value, ok := strings.Cut(line, ":")
		if value = strings.TrimSpace(value); !ok || value == "" {
			return Config{}, fail("%.40q is not \"key: value\"", line)
		}
		if seen[key] {
			return Config{}, fail("%s comes twice", key)
		}
		seen[key] = true
		if n := len(value); n >= 2 && (value[0] == '"' || value[0] == '\'') && value[n-1] == value[0] {
			value = value[1 : n-1]
		}
		var err error
		switch key {
		case "on-unreachable":
			if !slices.Contains([]string{Allow, Deny, DenyManaged}, value) {
				return Config{}, fail("on-unreachable: %.40q is not allow, deny or deny-managed", value)
			}
			c.OnUnreachable = value
		case "timeout":
			c.Timeout, err = parseTime(value)
		case "notify-timeout":
			c.NotifyTimeout, err = parseTime(value)
		case "socket":
			if !path.IsAbs(value) {
				return Config{}, fail("socket: %.100q is no absolute path", value)
			}
			c.Socket = value
		default:
			return Config{}, fail("%.40q is not on-unreachable, timeout, notify-timeout or socket", key)
		}
		if err != nil {
			return Config{}, fail("%s: %w", key, err)
		}
	}
	return c, nil
}

func parseTime(value string) (time.Duration, error) {
	d, err := time.ParseDuration(value)
	if err != nil || d < 100*time.Millisecond || d > 10*time.Minute {
		return 0, fmt.Errorf("%.40q is no time from 100ms to 10m", value)
	}
	return d, nil
}

// SocketBelow returns the path of hostd's socket, for a system below root.
func (c Config) SocketBelow(root string) string {
	if c.Socket != "" {
		return c.Socket
	}
	return path.Join(root, "run/gpuctl", wire.SocketName)
}
