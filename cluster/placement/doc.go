// Package placement decides where a claim goes. Place is a function of an Index, which
// follows a view of the inventory, and a Request. It makes no calls and has no memory:
// equal inputs give equal answers.
//
// # What fits
//
// A claim without a memory need gets whole GPUs that no claim has any part of. A claim
// with a need gets that amount of a GPU with an OpenCL runtime. Of a GPU without a
// runtime it gets the smallest slice that suffices, or the card. A claim that names a
// profile gets only slices of that profile. The room of a GPU is derived in the state: it
// excludes what is scheduled, resident, releasing and reserved. What is reserved for the
// claim itself counts as room. All GPUs of a claim are on one host, unless the request
// permits several.
//
// # What is best
//
// Candidates are sorted by the following, in this order:
//
//  1. being on one host
//  2. having all the memory that the claim prefers
//  3. the policy or verb: see below
//  4. health: OK before degraded
//  5. the time that the link needs for the bytes to be moved
//  6. being on the host that asks, or that the claim is on
//  7. NUMA: one node for all GPUs, and near the network card if bytes are moved
//  8. for pack and spread, the lower model
//  9. leaving little unused: GPUs and hosts in use before empty ones
//  10. the ids of the GPUs
//
// Cheapest takes the lowest model (if all have less memory than preferred, the highest of
// them). Best takes the highest model. Pack fills GPUs and hosts that are in use. Spread
// takes the emptiest host. Upgrade takes the highest of the models above that of the
// first GPU that the claim comes from, downgrade the lowest below it. Migrate and resume
// take the nearest: the same GPUs, otherwise the nearest model, the higher one of two.
//
// # How it is fast
//
// An Index has 48 bytes for each GPU, in blocks of hosts that never change after they are
// made. What many GPUs have in common is stored once, as a class: limits, rank and
// runtime are compared once in a request. A decision keeps only the best candidates.
// Reasons are computed only when the caller reads them.
package placement
