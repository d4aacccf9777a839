package turn

import (
	"errors"
	"fmt"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
)

// Settings is the part of a configuration file that says how GPUs are shared. What is left
// out has its default.
type Settings struct {
	Policy     string `yaml:"policy,omitempty"`     // fair (the default), credit, band or fifo
	WaitCharge int    `yaml:"waitCharge,omitempty"` // percent of the time for which the GPU is kept idle for an owner that this owner pays for; default 50, 10 to 100
	Limit      string `yaml:"limit,omitempty"`      // how long a command may keep the GPU while others wait; default 5s
	EndAfter   string `yaml:"endAfter,omitempty"`   // after how long a session is ended that keeps the GPU nevertheless; default 10m, never
}

// DefaultWeight is the weight of an owner that none was chosen for.
const DefaultWeight = 100

// Never is the value of EndAfter with which no session is ended.
const Never = "never"

// Config returns what the settings mean. Its errors wrap [timeshare.ErrConfig].
func (s Settings) Config() (Config, error) {
	c := DefaultConfig()
	if s.Policy != "" {
		c.Policy = timeshare.DefaultConfig(timeshare.Policy(s.Policy))
	}
	if s.WaitCharge != 0 {
		if c.Policy.Policy != timeshare.Fair {
			return c, fmt.Errorf("waitCharge: only the policy %s has one, not %s: %w", timeshare.Fair, c.Policy.Policy, timeshare.ErrConfig)
		}
		c.Policy.WaitCharge = s.WaitCharge
	}
	var errs []error
	for _, d := range []struct {
		name, text string
		to         *time.Duration
	}{{"limit", s.Limit, &c.Limit}, {"endAfter", s.EndAfter, &c.End}} {
		switch v, err := time.ParseDuration(d.text); {
		case d.text == "":
		case d.name == "endAfter" && d.text == Never:
			c.End = 0
		case err != nil || v <= 0:
			errs = append(errs, fmt.Errorf("%s: %q is not a time as 5s: %w", d.name, d.text, timeshare.ErrConfig))
		default:
			*d.to = v
		}
	}
	if err := errors.Join(errs...); err != nil {
		return c, err
	}
	return c, c.Check()
}
