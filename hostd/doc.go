// Package hostd is the daemon of one host. Run makes its parts, connects them
// and serves. Guest starts gpuguest, or finds the one that runs. The work is in
// the packages below, by subject:
//
//   - sessions: which claim has which GPU, and operations on sessions;
//   - cards: the life of PCI cards, and how VMs get them;
//   - member: this host's membership in a cluster;
//   - migration: VMs that move to other hosts;
//   - inventory: the GPUs that the host has;
//   - network: network cards and their functions;
//   - telemetry: metrics, traces, and what systemd is told;
//   - command and config: the command line and the configuration file.
//
// hostd and gpuguest may be killed at any moment. Each package that writes
// files says what it finds in them when it starts again.
package hostd
