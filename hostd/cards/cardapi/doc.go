// Package cardapi serves DeviceService. It calls this host's keepers of cards and of remote GPUs, reads
// its network interfaces, or forwards a call to the host that it is for. It decides nothing.
package cardapi
