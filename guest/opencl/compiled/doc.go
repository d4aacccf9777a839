// Package compiled keeps what OpenCL runtimes have compiled, from one session
// of a program to the next. Each session has a home of its own, so that none
// runs native code that another one's user has left there; a runtime that
// caches what it compiles finds that home empty, and compiles anew at every
// start of a program. A Store fills the home of a new session with what the
// sessions of the same user and the same program have left, and with nothing
// else.
//
// What executors write is not trusted: files are opened through
// internal/beneath, what is neither a file nor a folder is left out, and sizes
// are bounded. What a Store has is root's, or gpuguest's, and no executor
// reaches it.
//
// The programs that the engine itself has built on a device are guest/opencl/executor's.
package compiled
