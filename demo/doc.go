// Command demo shows gpuctl's main job on this machine: a video is encoded
// while the GPU under the encoder is exchanged for a smaller model and for a
// bigger one again, and a second program crosses from one vendor's runtime to
// another's and back. The results must be bit-identical to undisturbed runs;
// the exit status reports whether they were.
package main
