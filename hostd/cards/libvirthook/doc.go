// Package libvirthook is hostd's side of the hook that libvirt calls when domains
// start, run, end and move (cmd/gpuctl-hook, internal/hook): a server on
// RUNDIR/hook.sock that root alone may call, one request a connection.
//
// What is to be done about an event is the Handler's business. The server sees
// to it that libvirtd, which waits meanwhile, gets an answer in time whatever
// the Handler does: every operation has a deadline. At the deadline, or when
// the hook is gone because libvirtd killed it, the Handler's context ends; it
// gets a moment for its last word, then the answer is "late", and the Handler
// goes on alone. So a Handler takes back what it did when its context ends.
//
// Deadlines (Defaults) are shorter than those of the hook, and the shorter of
// the hook's and ours counts.
//
// A Handler must be idempotent, and must never call libvirt for the domain of
// the event: libvirtd holds that domain's lock until the hook has ended. From
// libvirt come, for one domain and in this order:
//
//	start            prepare, start, started
//	end              stopped, release
//	refused prepare  nothing more; refused start: release
//	incoming         migrate, prepare, start, started
//	failed incoming  stopped and release, sometimes twice
//
// Both drivers send those and reconnect, after a restart of libvirtd; qemu
// also restore and attach.
package libvirthook
