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

// maxStatus is the longest line of status in bytes.
const maxStatus = 512

// socketVariable is the environment variable with the path of systemd's socket.
const socketVariable = "NOTIFY_SOCKET"

// Notifier sends notifications to systemd. A nil one, and one without a socket, does
// nothing. It is safe for concurrent use.
type Notifier struct {
	log      *slog.Logger
	watchdog time.Duration // 0: no watchdog
}

// New reads systemd's environment variables. A value that is invalid is logged and
// ignored.
func New(log *slog.Logger) *Notifier {
	n := &Notifier{log: log}
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("watchdog is not served", "err", err)
	}
	n.watchdog = interval
	return n
}

// Enabled reports whether systemd has given a socket.
func (n *Notifier) Enabled() bool { return n != nil && os.Getenv(socketVariable) != "" }

// Ready notifies that the daemon serves, at its start and after a reload.
func (n *Notifier) Ready(status string) { n.send(daemon.SdNotifyReady, line(status)) }

// Reloading notifies that the configuration is being reloaded. Ready ends that.
func (n *Notifier) Reloading() {
	now := &unix.Timespec{}
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, now); err != nil {
		now = &unix.Timespec{}
	}
	n.send(daemon.SdNotifyReloading, fmt.Sprintf("MONOTONIC_USEC=%d", now.Nano()/1000))
}

// Stopping notifies that the daemon is stopping.
func (n *Notifier) Stopping(status string) { n.send(daemon.SdNotifyStopping, line(status)) }

// line makes a STATUS= line. A text with several lines must not add other assignments.
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

// send ignores errors: the daemon works without systemd as well.
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

// ErrSilent means that the health function has not returned in time.
var ErrSilent = errors.New("does not answer")

// Watch notifies the watchdog until ctx ends, as long as health returns nil. health must
// use what the daemon uses: its locks and its loops. It should fail only for what a
// restart can repair, because systemd restarts hostd if no notification came for
// WatchdogSec. If health does not return, that is a failure. If it recovers in time,
// hostd is not restarted.
func (n *Notifier) Watch(ctx context.Context, health func(context.Context) error) {
	if n == nil || n.watchdog <= 0 {
		return
	}
	every := n.watchdog / 3 // one of them may be late
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

// judge notifies the watchdog, or logs once why it does not. It reports whether the
// daemon is well.
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
