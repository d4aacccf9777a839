// Command gpuguest is the guest helper. `gpuguest serve` runs beside the
// applications, in a VM or, in process mode, on the host; it gives each of
// them a session and starts itself as `gpuguest executor` for it. `gpuguest
// probe` reports the devices of one OpenCL runtime as JSON.
package main
