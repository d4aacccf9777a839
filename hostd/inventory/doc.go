// Package inventory finds the GPUs of a machine: every device of every OpenCL
// runtime that is installed, and those that the configuration declares. It reads
// files below an injected root only. A vendor's library may crash or hang, so a
// Prober asks it in another process.
//
// It also knows the order of models. By that order a swap is an upgrade or a
// downgrade.
package inventory
