// Package cardapi serves DeviceService: what hostd's keeper of cards offers,
// and the way to the keepers of other hosts. It decides nothing.
package cardapi
