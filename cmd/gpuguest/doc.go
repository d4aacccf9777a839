// Command gpuguest gives applications their sessions. `gpuguest serve` runs next to the
// applications, in a VM or, in process mode, on the host. It gives each application a
// session, and starts itself as `gpuguest executor` for the session. `gpuguest probe`
// reports the devices of one OpenCL runtime as JSON.
package main
