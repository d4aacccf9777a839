// Package catalog has GPU models by their PCI ids: name, memory, rank in the order of
// models, limits, vGPU types, and reset methods that do not work with them.
//
// The program contains data.yaml. Operators extend and correct it with files of the same
// form:
//
//	version: 1
//	models:
//	  - model: NVIDIA A40        # exists: these values replace the present ones
//	    rank: 2000
//	  - model: ACME Render 9
//	    ids: ["1acc:0009", "1acc:000a:1acc:0001"]
//	    memory: 12GiB
//	    rank: 900
//	    limits: {fp64: true}     # as gpuctl.v1.Limits, with JSON's names
//	    resets:
//	      - {method: bus, verdict: hangs, reason: seen on two hosts}
//
// Later files override earlier ones. Ids that a file gives to a model are added to its
// present ones, and taken from the model that had them. Lists of vGPU types and resets
// are replaced as a whole, limits one by one. An id with a subsystem takes precedence
// over one without.
//
// The package does not examine the host: it reads only the files that it is given, and
// compares ids. If the catalogue has no memory size for a device, or if several models
// share its id, Memory determines it from the driver's report or from the sizes of the
// BARs.
package catalog
