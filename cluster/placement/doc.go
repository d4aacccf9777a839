// Package placement decides where a claim goes. Place is a function of an
// Index, which follows a view of the inventory, and a Request: it asks nobody,
// remembers nothing, and answers the same question always the same.
//
// # What fits
//
// A claim without a memory need gets whole GPUs that nobody holds any of. One
// with a need gets that amount of a GPU that an OpenCL runtime serves; of one
// that none serves it gets the smallest slice that suffices, or the card. A
// claim that names a profile gets such slices only. What a GPU has left is
// derived in the state and counts what is scheduled, resident, releasing and
// reserved; what is reserved for the claim itself is its own. A claim's GPUs
// are on one host, unless the request lets them be apart.
//
// # What is best
//
// Candidates are ordered, in this order, by
//
//  1. being on one host
//  2. having all the memory that the claim prefers
//  3. the policy or verb: see below
//  4. health: OK before degraded
//  5. the time that the link takes for the bytes to move
//  6. being on the host that asks, or that the claim is on
//  7. NUMA: one node for all GPUs, and near the network card if bytes move
//  8. for pack and spread the lower model
//  9. leaving little behind: GPUs and hosts that are in use before empty ones
//  10. the ids of the GPUs
//
// Cheapest takes the lowest model (of those with less memory than preferred
// the highest), best the highest; pack fills GPUs and hosts that are in use,
// spread takes the emptiest host. Upgrade takes the highest of the models above
// that of the first GPU it comes from, downgrade the lowest below, migrate and
// resume what is nearest: the same GPUs, then the nearest model, the higher of
// two.
//
// # How it is fast
//
// An Index holds 48 bytes for each GPU, in blocks of hosts that never change
// once made, and what many GPUs have in common once: models' limits, ranks and
// runtimes are compared once for a request. A decision keeps only the best
// candidates; reasons are found and worded when somebody asks for them.
package placement
