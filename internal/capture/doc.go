// Package capture takes a host's picture for bug reports and for tests: the
// files of /sys, /proc and /etc that gpuctl decides by, and what Xen and
// libvirt say, in one archive. Open gives it back as a file system that the
// readers of such files (passthrough/pci and others) take for a machine.
//
// # What is in it
//
// The archive is a gzip'ed tar with manifest.json, facts/ (the output of
// commands) and root/ (files and symbolic links by their place on the host).
// Only files that are named in files.go are read: nothing that a read changes
// or that holds keys; never vital product data, ROMs or the memory of devices.
// Reading the configuration space of a device wakes it for a moment. A
// picture of the same state is the same archive, byte for byte.
//
// # What is not
//
// Secrets never get in: of domains' definitions passwords, authentication,
// metadata, command lines, system information and the like are cut out, and a
// definition that can't be understood is left out whole; in configuration
// files and on kernel command lines the values of what sounds like a secret
// are; so are private keys and passwords in URLs, wherever they are. MAC
// addresses of interfaces are not read.
//
// With Options.Redact also what tells whose machine it is goes: names of host
// and domains, serial numbers, and addresses, which are numbered instead, so
// that the same is still the same.
//
// # Hostile archives
//
// Open trusts nothing: sizes, counts, depths and names are bounded, links can
// lead nowhere but within the archive, and a loop of links is an error when it
// is walked.
package capture
