// Package cost predicts what a session on a GPU of another host costs: how long it is
// stopped when it moves, and how much slower it computes there.
//
// A Model has the costs of a remoting system: of recording calls, replaying them,
// synchronising memory and calling over a network. Published returns the constants that
// the authors of mrCUDA give for theirs (rCUDA on InfiniBand FDR, NVIDIA K20c). A test
// compares what the model then says with what they have published.
//
// A Link is what is known of the network between two hosts. Hosts measure it
// (Calibration) and keep it in the inventory of the cluster. Every move refines it
// (Link.Learn). As long as nothing was measured, predictions are wide ranges, and say so.
//
// The package is pure: it has no clock, no network and no state of its own. Who measures
// and where the results are kept is in hostd/lease and in cluster/state.
package cost
