// Package compiled keeps what OpenCL runtimes have compiled, from one session of a program
// to the next. Each session has a home of its own, so that no session runs native code
// that the user of another one has left there. A runtime that caches what it compiles
// finds that home empty, and would compile again at each start of a program. A Store fills
// the home of a new session with what the sessions of the same user and the same program
// have left, and with nothing else.
//
// What executors write is not trusted: files are opened through internal/beneath,
// everything that is neither a file nor a folder is omitted, and sizes are limited. A Store
// belongs to root or to gpuguest's user, and no executor can reach it.
//
// Programs that the engine itself has built on a device are stored by
// guest/opencl/executor.
package compiled
