// Package inventory finds the GPUs of a machine: every device of every OpenCL
// runtime that is installed, and those that the configuration declares. It
// looks at files below an injected root only; what a vendor's library offers is
// asked through a Prober, in another process, because such libraries may crash
// or hang.
//
// It also knows the order of models, by which a swap is an upgrade or a
// downgrade.
package inventory
