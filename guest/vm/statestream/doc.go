// Package statestream is the form that the state of a suspended session has on its way
// out of a VM, through hosts, and back: StateChunks in order, the last of which
// has a mark with the size and the SHA-256 of all before it. A stream without
// the mark was cut off; one whose mark is another's is stale or damaged. Nobody
// who takes a state in may use or keep it before [Check] has seen the mark.
//
// It is a stream and not a file since it never lies in the VM: nothing of it is
// read twice, whoever passes it on has a chunk or two of it, and one that is
// slow to take them holds up the one that makes them.
//
// Here is nothing of what the bytes say, which is guest/opencl/executor's, nor of where
// they are kept, which is hostd/migration/stash's.
package statestream
