// Package endpoint is a host as the driver of a migration reaches it: on this
// machine ([Local]) or another one ([Remote], by SiteService). It does single
// steps: cards through the keeper, the VM through libvirt, the applications in
// it through its gpuguest over the guest channel. States that a VM has no room
// for pass through here (away.go) into the stash of this host and of the one
// that the VM goes to. In which order, and what when
// one fails, is decided in migrate.
package endpoint
