// Package inventory finds the GPUs of a host: all devices of all OpenCL runtimes that are
// installed, and those that the configuration declares. It reads only files below the
// root that it is given. A vendor's library may crash or hang, so a Prober loads it in
// another process.
//
// It also sorts models by rank. By that order, a swap is an upgrade or a downgrade.
package inventory
