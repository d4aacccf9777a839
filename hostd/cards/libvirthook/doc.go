// Package libvirthook is hostd's side of the hook that libvirt calls when domains start,
// run, end and migrate (cmd/gpuctl-hook, internal/hook). It is a server on
// RUNDIR/hook.sock. Only root may call it. Each connection has one request.
//
// The Handler decides what to do about an event. The server makes sure that libvirtd,
// which waits meanwhile, gets an answer in time, whatever the Handler does: each
// operation has a deadline. At the deadline, or when the hook has ended because libvirtd
// killed it, the Handler's context ends. The Handler has a short time to return. If it
// does not, the answer is "late", and the Handler goes on without a caller. So a Handler
// must undo what it did when its context ends.
//
// Deadlines (see Defaults) are shorter than those of the hook. Of the hook's and the
// server's, the shorter one applies.
//
// A Handler must be idempotent, and must never call libvirt for the domain of the event:
// libvirtd holds that domain's lock until the hook has ended. libvirt sends these events
// for one domain, in this order:
//
//	start            prepare, start, started
//	end              stopped, release
//	refused prepare  nothing more; refused start: release
//	incoming         migrate, prepare, start, started
//	failed incoming  stopped and release, sometimes twice
//
// Both drivers send those, and reconnect after a restart of libvirtd. qemu also sends
// restore and attach. See https://libvirt.org/hooks.html.
package libvirthook
