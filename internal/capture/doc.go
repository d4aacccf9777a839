// Package capture records the state of a host for bug reports and tests: the files of
// /sys, /proc and /etc on which gpuctl's decisions depend, and the output of Xen's and
// libvirt's programs, in one archive. Open returns the archive as a file system, which
// packages that read such files (passthrough/pci and others) can use like a real host.
//
// # Content
//
// The archive is a gzip-compressed tar with manifest.json, facts/ (the output of
// commands) and root/ (files and symbolic links, by their path on the host). Only files
// that are named in files.go are read. Files that change when they are read, or that
// contain keys, are never read; nor are vital product data, ROMs or the memory of
// devices. Reading the configuration space of a device wakes it for a moment. Archives of
// the same state are equal byte for byte.
//
// # Secrets
//
// Secrets are never included. From domains' definitions, passwords, authentication,
// metadata, command lines, system information and similar parts are removed. A definition
// that cannot be parsed is omitted. In configuration files and on kernel command lines,
// values whose names sound like a secret are removed. Private keys and passwords in URLs
// are removed everywhere. MAC addresses of interfaces are not read.
//
// With Options.Redact, what identifies the host is removed, too: names of the host and
// domains, serial numbers, and addresses. They are replaced by numbers, so that equal
// values stay equal.
//
// # Hostile archives
//
// Open trusts nothing: sizes, counts, depths and names are limited, and links cannot
// leave the archive. A loop of links is an error when it is followed.
package capture
