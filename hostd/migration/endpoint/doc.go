// Package endpoint does one host's part of a migration. The driver of the
// migration calls a host through it: this one directly ([Local]), another one by
// SiteService ([Remote]).
//
// Each call is one step. The keeper of cards attaches and detaches cards. libvirt
// moves the VM. The VM's gpuguest freezes and thaws the applications, over the
// guest channel. A state that the VM has no room for passes through here
// (away.go) into the stash of this host and of the destination.
//
// Package migrate decides the order of the steps, and what happens when one
// fails.
package endpoint
