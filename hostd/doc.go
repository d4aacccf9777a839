// Package hostd is the daemon of one host. Run makes its parts, joins them and
// serves; Guest starts gpuguest, or finds the one that runs. What the daemon
// does is in the rooms below, by subject:
//
//   - sessions: which claim has which GPU, and operations on sessions;
//   - cards: the life of PCI cards, and how VMs get them;
//   - member: this host's membership in a cluster;
//   - migration: VMs that move to other hosts;
//   - inventory: the GPUs that the host has;
//   - network: network cards and their functions;
//   - telemetry: metrics, traces, and what systemd is told;
//   - command and config: the command line and the file.
//
// hostd may be killed at any moment, and so may gpuguest: what each of them
// finds when it starts again is said in the rooms that keep it.
package hostd
