// Package exact has timers that are exact to some 50 µs.
//
// Go's own timers are not shorter than a millisecond in a process that has nothing else to run: its threads wait in epoll_wait,
// whose unit that is. This package's are timerfds (timerfd_create(2)), whose end wakes epoll_wait. Each costs a descriptor and
// a goroutine, so it is for waits shorter than some milliseconds that something hurries for, and not for timeouts.
package exact
