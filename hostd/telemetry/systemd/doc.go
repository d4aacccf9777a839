// Package systemd tells systemd the state of hostd: ready, reloading or stopping,
// and a line of status. As long as the daemon works it also notifies the
// watchdog. Without systemd it does nothing.
package systemd
