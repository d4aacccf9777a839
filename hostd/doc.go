// Package hostd is the daemon of one host. Run makes its parts, connects them and serves.
// Guest starts gpuguest, or uses the one that runs already. The work is in the packages
// below, by subject:
//
//   - sessions: which claim has which GPU, and operations on sessions;
//   - cards: the states of PCI cards, and how VMs get them;
//   - member: this host's membership in a cluster;
//   - migration: live migration of VMs to other hosts;
//   - inventory: the GPUs of the host;
//   - network: network interfaces, and the bandwidth of migrations;
//   - telemetry: metrics, traces, and notifications to systemd;
//   - command and config: the command line and the configuration file.
//
// A part gets what it needs when it is made, and serves nobody before all are made. So what two
// parts need of each other is a third one, made before both: the records of migrations, where
// VMs are, the registry of service VMs. Only the node calls what calls it: see member.Served.
//
// hostd and gpuguest may be killed at any moment. Each package that writes files
// documents what it does with them at the next start.
package hostd
