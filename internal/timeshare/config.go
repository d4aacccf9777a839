package timeshare

import (
	"fmt"
	"time"
)

// Policy is how owners share the GPU.
type Policy string

// The policies.
const (
	// FIFO runs commands in the order in which they were submitted. Who has
	// longer commands gets more of the GPU.
	FIFO Policy = "fifo"
	// Credit gives each owner time by weight in every period, charges what its
	// commands took, and lets an owner that has spent its time wait behind the
	// others. It is Xen's credit scheduler as GPUvm applies it to commands
	// (Suzuki et al., "GPUvm: Why Not Virtualizing GPUs at the Hypervisor?",
	// USENIX ATC 2014, and the code published with it).
	Credit Policy = "credit"
	// Band is Credit, but waits a moment for the owner that ran last if it has had
	// less than its share and who would run instead has had more. Source: GPUvm,
	// as above, after the BAND scheduler of Gdev (Kato et al., "Gdev: First-Class
	// GPU Resource Management in the Operating System", USENIX ATC 2012).
	Band Policy = "band"
	// Fair runs the owner that has had the least time in proportion to its
	// weight, and waits a moment for such an owner if that usually comes back
	// soon. It is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996)
	// with measured lengths, and the anticipation of Iyer and Druschel
	// ("Anticipatory scheduling", SOSP 2001).
	Fair Policy = "fair"
)

// Limits of what a [Scheduler] takes.
const (
	// MaxOwners is how many owners may share a GPU.
	MaxOwners = 1024
	// MaxWeight is the largest weight of an owner.
	MaxWeight = 1024
	// MaxTime is the latest time, since the epoch of the user's choice.
	MaxTime = 100 * 365 * 24 * time.Hour

	maxSetting      = time.Hour // the largest duration in a Config
	leastWaitCharge = 10        // percent: were waits free, who is waited for could starve others
)

// Config says how a [Scheduler] works. [DefaultConfig] returns one that can be
// used as it is.
type Config struct {
	Policy Policy

	// Period is the time after which Credit and Band give out new time.
	Period time.Duration

	// Wait is how long Band and Fair leave the GPU idle at most before a command
	// that could run, for an owner that has had less than its share. 0: not at all.
	Wait time.Duration

	// AsPublished makes Band do what GPUvm's code does: wait all of that time, even if
	// who it waits for has come, and give that time to nobody. For comparisons only:
	// with short commands the GPU is idle most of the time.
	AsPublished bool

	// WaitCharge is the part, in percent, of the time for which Fair waited for
	// an owner that this owner has to pay for: 10 to 100. The less, the closer are
	// owners to the same time on the GPU; the more, the less can an owner take from
	// others by making them wait. With 100 nobody that has commands gets less than
	// its share of the time on the clock.
	WaitCharge int

	// MaxLag is how much time on the GPU an owner of Fair can have saved up when
	// it comes back with new commands.
	MaxLag time.Duration

	// Overdue is how long a command may run before [Scheduler.Overrun] reports
	// it. 0: as long as it likes.
	Overdue time.Duration

	// MaxPending is how many commands an owner may have pending.
	MaxPending int
}

// DefaultConfig returns the settings with which a policy does best in the
// simulations of DESIGN.md. Overdue is 0, as what is too long depends on
// what runs.
func DefaultConfig(p Policy) Config {
	c := Config{Policy: p, Period: 30 * time.Millisecond, MaxPending: 4096}
	switch p {
	case Band:
		c.Period = 500 * time.Millisecond
		c.Wait = 500 * time.Microsecond
	case Fair:
		c.Wait = 2 * time.Millisecond
		c.WaitCharge = 50
		c.MaxLag = 100 * time.Millisecond
	}
	return c
}

// check returns an error that wraps [ErrConfig] if c can't be worked with.
func (c Config) check() error {
	switch c.Policy {
	case FIFO, Credit, Band, Fair:
	default:
		return fmt.Errorf("policy %q is none of %s, %s, %s and %s: %w", c.Policy, FIFO, Credit, Band, Fair, ErrConfig)
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"period", c.Period}, {"wait", c.Wait}, {"lag", c.MaxLag}, {"overdue", c.Overdue}} {
		if d.value < 0 || d.value > maxSetting {
			return fmt.Errorf("%s %v is not between 0 and %v: %w", d.name, d.value, maxSetting, ErrConfig)
		}
	}
	if c.Period < time.Millisecond && (c.Policy == Credit || c.Policy == Band) {
		return fmt.Errorf("period %v is less than 1ms: %w", c.Period, ErrConfig)
	}
	if c.Policy == Fair && (c.WaitCharge < leastWaitCharge || c.WaitCharge > 100) {
		return fmt.Errorf("wait charge %d is not between %d and 100 percent: %w", c.WaitCharge, leastWaitCharge, ErrConfig)
	}
	if c.MaxPending < 1 {
		return fmt.Errorf("%d pending commands are not enough: %w", c.MaxPending, ErrConfig)
	}
	return nil
}
