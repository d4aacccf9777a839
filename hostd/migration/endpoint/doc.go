// Package endpoint does one host's part of a migration. The driver of the migration calls
// the host that it runs on directly ([Local]), and another one by SiteService ([Remote]).
//
// Each call is one step. The keeper of cards attaches and detaches cards. libvirt moves
// the VM. The VM's gpuguest freezes and thaws the applications, over the guest channel.
// If the VM has no room for a state, this package transfers it (away.go) to the stash of
// this host and of the destination.
//
// Package migrate decides the order of the steps, and what happens when one fails.
package endpoint
