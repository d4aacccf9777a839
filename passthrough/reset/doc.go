// Package reset brings a card to the state that it has after power-on, before another
// virtual machine gets it, and reports whether that succeeded.
//
// It tries reset methods in an order, from those that affect least to those that affect
// most: function level reset, power management (D3hot and back), secondary bus or slot
// reset, the firmware's _RST, power off and on (D3cold), and a method of the vendor or
// the operator. It ends after the first method after which each function of the card is
// verified. A method is skipped, and the reason recorded, if the card does not have it,
// if the catalogue says that it does not work with the model, or if devices that do not
// belong to the card would be affected.
//
// Verification compares the configuration space before and after: the device answers
// within a minute (PCI Express 5.0, 2.3.1 and 6.6), it is the same device, its BARs and
// command register are unchanged or could be restored, and it reports no new errors. A
// reset that does nothing passes this test. That is a property of models, not of single
// devices, so it belongs in the catalogue.
//
// Everything is done through files of sysfs. The kernel resets the bus of a card with
// several functions only by reset_subordinate of the bridge above (Linux 6.13). Before
// that version, this package removes the functions from the bus, sets the bit in the
// bridge's control register, and rescans the bus. Power is switched off by letting the
// functions sleep or, if a driver keeps them awake, by removing them from the bus so that
// the bridge above sleeps.
//
// The caller must check before that nobody uses the card. Package bind binds drivers.
package reset
