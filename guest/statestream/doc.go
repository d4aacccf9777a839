// Package statestream is the form of a suspended session's state on its way out
// of a VM, through hosts, and back. A stream is StateChunks in order. The last
// one has a mark: the size and the SHA-256 of all bytes before it. A stream
// without a mark was interrupted. A stream with another state's mark is stale or
// damaged. Nobody may use or keep a state before [Check] has seen its mark.
//
// The state never lies in the VM as a file. Each part of it is read once. Whoever
// passes it on has one or two chunks in memory, and the slowest one sets the
// pace.
//
// guest/opencl/executor knows what the bytes mean. hostd/migration/stash keeps
// them.
package statestream
