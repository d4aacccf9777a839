// Package systemd tells systemd how hostd is: that it is ready, reloads or
// stops, a line of status, and, as long as the daemon works, that it lives.
// Without systemd it does nothing.
package systemd
