package systemd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
)

// maxStatus is how long a line of status may be, in bytes.
const maxStatus = 512

// socketVariable is where systemd says where it listens.
const socketVariable = "NOTIFY_SOCKET"

// Notifier speaks to systemd. A nil one, and one without a socket, does
// nothing. It is safe for concurrent use.
type Notifier struct {
	log      *slog.Logger
	watchdog time.Duration // 0: nobody watches
}

// New reads what systemd left in the environment. What cannot be understood
// there is logged, and no reason not to start.
func New(log *slog.Logger) *Notifier {
	n := &Notifier{log: log}
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("watchdog is not served", "err", err)
	}
	n.watchdog = interval
	return n
}

// Enabled reports whether somebody listens.
func (n *Notifier) Enabled() bool { return n != nil && os.Getenv(socketVariable) != "" }

// Ready says that the daemon serves, at its start and after a reload.
func (n *Notifier) Ready(status string) { n.send(daemon.SdNotifyReady, line(status)) }

// Reloading says that the configuration is being read anew; Ready ends it.
func (n *Notifier) Reloading() {
	now := &unix.Timespec{}
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, now); err != nil {
		now = &unix.Timespec{}
	}
	n.send(daemon.SdNotifyReloading, fmt.Sprintf("MONOTONIC_USEC=%d", now.Nano()/1000))
}

// Stopping says that the daemon ends.
func (n *Notifier) Stopping(status string) { n.send(daemon.SdNotifyStopping, line(status)) }

// line makes a status of a text: it must not look like a second assignment.
func line(status string) string {
	if status == "" {
		return ""
	}
	status = strings.Join(strings.Fields(status), " ")
	if len(status) > maxStatus {
		status = status[:maxStatus]
	}
	return "STATUS=" + strings.ToValidUTF8(status, "")
}

// send is best effort: a daemon whose systemd does not listen works as well.
func (n *Notifier) send(assignments ...string) {
	if !n.Enabled() {
		return
	}
	var kept []string
	for _, a := range assignments {
		if a != "" {
			kept = append(kept, a)
		}
	}
	if len(kept) == 0 {
		return
	}
	if _, err := daemon.SdNotify(false, strings.Join(kept, "\n")); err != nil {
		n.log.Warn("systemd does not listen", "err", err)
	}
}

// ErrSilent is what the watchdog makes of a health function that does not
// return.
var ErrSilent = errors.New("does not answer")

// Watch pets the watchdog until ctx ends, as long as health says nil. Health
// has to pass where the daemon works: take its locks, ask its loops. It should
// fail for what a restart can cure, and nothing else: systemd restarts hostd
// when nobody has petted for WatchdogSec. One that hangs is a failure; one that
// recovers in time is forgiven.
func (n *Notifier) Watch(ctx context.Context, health func(context.Context) error) {
	if n == nil || n.watchdog <= 0 {
		return
	}
	every := n.watchdog / 3 // one may get lost
	answers := make(chan error, 1)
	asking, well := false, true
	ask := func() {
		asking = true
		go func() {
			ctx, cancel := context.WithTimeout(ctx, n.watchdog)
			defer cancel()
			answers <- health(ctx)
		}()
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	ask()
	for {
		select {
		case <-ctx.Done():
			return
		case err := <-answers:
			asking = false
			if ctx.Err() == nil {
				well = n.judge(err, well)
			}
		case <-tick.C:
			if !asking {
				ask()
			} else {
				well = n.judge(ErrSilent, well)
			}
		}
	}
}

// judge pets, or says once why not.
func (n *Notifier) judge(err error, well bool) bool {
	switch {
	case err == nil:
		if !well {
			n.log.Info("daemon works again")
		}
		n.send(daemon.SdNotifyWatchdog)
		return true
	case well:
		n.log.Error("daemon does not work; the watchdog is not petted", "err", err)
		n.send(line("unhealthy: " + err.Error()))
	}
	return false
}
