// Package cardapi serves DeviceService. It calls this host's keeper of cards, or
// forwards a call to the host that it is for. It decides nothing.
package cardapi
