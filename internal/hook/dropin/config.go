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

// What happens to a start when hostd gives no answer.
const (
	Allow       = "allow"
	Deny        = "deny"
	DenyManaged = "deny-managed"
)

// ConfigFile is the configuration's path below the root.
const ConfigFile = "etc/gpuctl/hook.yaml"

const maxConfig = 16 << 10

// Config is what an operator can choose.
type Config struct {
	OnUnreachable string
	Timeout       time.Duration // where GPUs are concerned
	NotifyTimeout time.Duration // where not
	Socket        string        // absolute; empty: the run folder's
}

// DefaultConfig is what holds without a file. The time is a little more than
// hostd takes for itself.
func DefaultConfig() Config {
	return Config{OnUnreachable: DenyManaged, Timeout: 31 * time.Second, NotifyTimeout: 5 * time.Second}
}

// LoadConfig reads the file below root. Without one, and with a wrong one, it
// returns the defaults; the latter with an error.
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

// ParseConfig reads lines of "key: value", which are YAML; nothing else of
// YAML is.
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

// SocketBelow is where hostd listens on the machine whose root is there.
func (c Config) SocketBelow(root string) string {
	if c.Socket != "" {
		return c.Socket
	}
	return path.Join(root, "run/gpuctl", wire.SocketName)
}
