// Package holders finds who has the nodes of NVIDIA's driver open, and who belongs together.
//
// A Look is taken of /proc at one time. It has the holders, with the nodes that each has
// open or mapped, and the tree of all processes. Jobs puts holders together that can only be
// moved as one: a parent and its children, the processes of one shell pipeline, the workers
// of one launcher.
//
// It only reads. Whether a holder uses CUDA is the driver's to say (guest/cuda/ask).
package holders
