// Package catalog knows models of GPUs by their PCI ids: name, memory, place in
// the order of models, limits, vGPU types, and ways of resetting that do not
// work with them.
//
// What it knows comes with the program, in data.yaml. Operators extend and
// correct it with files of the same form:
//
//	version: 1
//	models:
//	  - model: NVIDIA A40        # known: what is said here replaces what was
//	    rank: 2000
//	  - model: ACME Render 9
//	    ids: ["1acc:0009", "1acc:000a:1acc:0001"]
//	    memory: 12GiB
//	    rank: 900
//	    limits: {fp64: true}     # as gpuctl.v1.Limits, in JSON's names
//	    resets:
//	      - {method: bus, verdict: hangs, reason: seen on two hosts}
//
// Later files win over earlier ones. Ids that a file gives a model are added to
// those it has, and taken from the model that had them; lists of vGPU types and
// resets are replaced as a whole, limits one by one. An id with the subsystem's
// wins over one without.
//
// Nothing is looked up on the machine: the package reads the files that it is
// given and compares ids. How much memory a device has that the catalogue has
// no figure for, or whose id several models share, is for Memory to say, from
// the driver's word or from the sizes of its BARs.
package catalog
