// Package executor is the process that holds a vendor's OpenCL runtime and
// runs the calls of one session.
//
// It reads requests from the session's ring (serve.go), keeps an object graph
// with just what is needed to make every live object again (objects.go,
// graph.go), holds commands back that wait for the application (hold.go),
// moves bulk data (bulk.go), and is frozen, exported, prepared and activated
// by guest/session (control.go, export.go, restore.go; state.go for states that
// stay in the VM, stream.go for those that leave it).
//
// What the shared memory looks like is in guest/opencl/wire; the binding of the
// vendor's library is guest/opencl/cl; who starts executors is guest/session.
package executor
