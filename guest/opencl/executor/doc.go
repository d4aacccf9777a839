// Package executor is the process that loads a vendor's OpenCL runtime and runs the calls
// of one session.
//
// It reads requests from the session's ring (serve.go), keeps an object graph with what is
// needed to create every object again (objects.go, graph.go), parks commands that wait for
// the application (hold.go), moves bulk data (bulk.go), and is frozen, exported, prepared
// and activated by guest/session (control.go, export.go, restore.go; state.go for states
// that stay in the VM, stream.go for those that leave it).
//
// Package guest/opencl/wire describes the shared memory, guest/opencl/cl is the binding to
// the vendor's library, and guest/session starts executors.
package executor
