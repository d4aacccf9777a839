// Package dropin implements gpuctl's hook, which libvirt calls. The hook sends the event
// to hostd and follows its answer. It never calls libvirt, which waits for the hook and
// holds the domain's lock. The program is cmd/gpuctl-hook, installed as
// /etc/libvirt/hooks/DRIVER.d/50-gpuctl (libvirt 6.5 and later). See
// https://libvirt.org/hooks.html.
//
// # Exit statuses
//
//	operation                     done  refused  no answer, or none in time
//	prepare, start                0     1        0 or 1: on-unreachable
//	migrate, restore              0     1        0, XML unchanged
//	started                       0     1        0, or 1 of a VM in RUNDIR/hook.arrivals
//	stopped, release              0     0        0
//	reconnect, attach             0     0        0
//	any other                     0     –        –
//
// A failure of reconnect or started would kill a running domain. A domain that a migration
// has brought has not run yet when libxl's driver calls started: its source goes on, so it may
// be refused, unless on-unreachable is allow. The end of a domain cannot be refused. After migrate and restore, libvirt calls prepare, which decides, so
// a missing answer need not stop them. If the hook prints nothing, the XML stays as it
// is, with both drivers. libvirt 9.0 passes no XML to the hook for libxl's migrate.
//
// # Configuration
//
// /etc/gpuctl/hook.yaml is optional. It has lines of "key: value":
//
//	on-unreachable: deny-managed  # or allow, or deny
//	timeout: 31s                  # prepare and start of domains with GPUs, migrate, restore
//	notify-timeout: 5s            # everything else
//	socket: /run/gpuctl/hook.sock
//
// deny-managed refuses a start only if the XML has a PCI device or a mediated device that
// is a display controller or a processing accelerator, or has an id in RUNDIR/hook.ids,
// which hostd writes, or is in the same slot as such a device. So domains without GPUs
// always start. allow also starts domains with GPUs. It is for hosts where availability
// is more important than the certainty that a GPU has one owner. Devices that libvirt
// manages (managed='yes') then work; hostd finds the others when it runs again. deny
// refuses all. Before a domain with a GPU is refused, the hook tries for five seconds to
// reach hostd, which may be starting.
//
// A file with errors is ignored, and the errors are printed to standard error. If the
// program is in a folder ROOT/etc/libvirt/hooks and ROOT/etc/gpuctl/hook.yaml exists, all
// paths are below ROOT; otherwise they are below /.
//
// # Messages
//
// libvirt includes the standard error of a failed hook in the error of the call: one
// line, which names the device, its owner, and what to do.
package dropin
