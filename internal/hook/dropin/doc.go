// Package dropin is what gpuctl's hook does when libvirt calls it: it tells
// hostd and does what hostd says. It never calls libvirt, which waits for it
// and holds the domain's lock. The program is cmd/gpuctl-hook, installed as
// /etc/libvirt/hooks/DRIVER.d/50-gpuctl (libvirt 6.5 and later).
//
// # Exit statuses
//
//	operation                     done  refused  no answer, or none in time
//	prepare, start                0     1        0 or 1: on-unreachable
//	migrate, restore              0     1        0, XML unchanged
//	started                       0     1        0
//	stopped, release              0     0        0
//	reconnect, attach             0     0        0
//	any other                     0     –        –
//
// A failing reconnect would kill a running domain, as would started; of ends
// there is nothing to refuse. After migrate and restore comes prepare, which
// decides, so that silence need not stop them. Printing nothing means to
// libvirt, with both drivers, that the XML stays as it is; libvirt 9.0 hands
// none at all to libxl's migrate.
//
// # Configuration
//
// /etc/gpuctl/hook.yaml, which need not exist, has lines of "key: value":
//
//	on-unreachable: deny-managed  # or allow, or deny
//	timeout: 31s                  # prepare and start of domains with GPUs, migrate, restore
//	notify-timeout: 5s            # everything else
//	socket: /run/gpuctl/hook.sock
//
// deny-managed refuses a start only if the XML names a PCI device, or a
// mediated one, that is a display controller, a processing accelerator or of an
// id that hostd has left in RUNDIR/hook.ids, or shares its slot with one:
// domains without GPUs always start. allow starts domains with GPUs as well, and
// is for hosts where availability counts for more than the certainty that a GPU
// has one owner; devices in libvirt's own care (managed='yes') then work, ours
// are found out by hostd when it is back.
// deny refuses all. Where a refusal is at stake for a domain with a GPU, the
// hook tries for five seconds: hostd may just be starting.
//
// A file that is wrong counts as missing, and the complaint goes to standard
// error. Paths are below the folder that has etc/libvirt/hooks with the
// program in it, if that has etc/gpuctl/hook.yaml, too; otherwise below /.
//
// # What the operator sees
//
// libvirt shows standard error of a hook that fails in the error of the call:
// one line, which names the device, who has it, and what to do.
package dropin
