// Package criu has processes written to a folder, and made again from it, by the program
// criu. It also keeps the folder: who may have made it, and a manifest with the size and
// the SHA-256 of each file. It knows nothing of GPUs: when it is called, the processes have
// let go of theirs.
package criu
