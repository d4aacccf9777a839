// Command mmio shows one GPU in software that two VMs share through the mediator, in
// one process: one computes and checks its results, the other floods the GPU and
// attacks it. Shares and shadow updates are drawn; the exit status says whether the
// honest VM had right results, its share, and its memory for itself.
package main
