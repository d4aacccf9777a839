// Package statestream is the form in which a suspended session's state leaves a VM,
// passes through hosts, and comes back. A stream is a sequence of StateChunks. The last
// one has a mark: the size and the SHA-256 of all bytes before it. A stream without a
// mark was interrupted. A stream with another state's mark is stale or damaged. Nobody
// may use or keep a state before [Check] has checked its mark.
//
// The state is never a file in the VM. Each part of it is read once. A process that
// passes it on has one or two chunks in memory, and the slowest one sets the pace.
//
// guest/opencl/executor defines the content of the bytes. hostd/migration/stash keeps
// them.
package statestream
