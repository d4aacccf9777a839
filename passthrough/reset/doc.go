// Package reset brings a card back to the state in which it came out of power,
// before another virtual machine gets it, and reports whether that worked.
//
// It climbs a ladder from what disturbs least to what disturbs most: function
// level reset, power management (D3hot and back), secondary bus or slot reset,
// the firmware's _RST, power off and on (D3cold), and what the maker or the
// operator provides. The first rung after which every function of the card
// proves to be in order ends it. A rung is left out, and the reason recorded,
// when the card has no such way, when the catalogue says that the model does
// not survive it, or when devices that are not of the card would be hit.
//
// Proof is the configuration space, read before and after: the device answers
// within a minute (PCI Express 5.0, 2.3.1 and 6.6), it is the same device, its
// BARs and command register are what they were or could be written back, and it
// reports no new errors. A reset that does nothing passes this proof: that is
// known of models, not of devices, and is the catalogue's to say.
//
// All of it goes through files of sysfs. The kernel resets the bus of a card of
// several functions only by reset_subordinate of the bridge above (Linux 6.13);
// before, it is done by the bridge's control register with the functions taken
// off the bus, and found again afterwards. Power is switched by letting the
// functions sleep or, where a driver keeps them awake, by taking them off the
// bus so that the bridge above sleeps.
//
// Whether anybody uses the card is for the caller to find out before; who owns
// what, and the binding of drivers, is package bind's.
package reset
