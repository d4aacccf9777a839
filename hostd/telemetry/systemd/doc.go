// Package systemd notifies systemd of the state of hostd (sd_notify(3)): ready, reloading
// or stopping, and a line of status. While the daemon works, it also notifies the
// watchdog. Without systemd it does nothing.
package systemd
