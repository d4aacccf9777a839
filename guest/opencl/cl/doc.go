// Package cl calls a vendor's OpenCL without an ICD loader: it loads the
// vendor's library with dlopen and calls every function through the dispatch
// table that each OpenCL object begins with.
//
// There is one Go function per OpenCL function, with its name less the "cl",
// its order of arguments, and Go types: handles are distinct integer types, a
// wait list is a slice, a nil *Event asks for no event, sizes are bytes in
// uint64, nil stands for an absent offset, size, origin or region. A function
// that the vendor lacks returns InvalidOperation, a zero handle the error that
// OpenCL has for an invalid one. Other handles are trusted: they must come from
// this package and must not have been released.
//
// Constants are named after OpenCL's: CL_DEVICE_MAX_MEM_ALLOC_SIZE is
// DeviceMaxMemAllocSize, each word between underscores capitalised and without
// regard to initialisms. Where the name is taken, "Const" follows it.
//
// Nothing here calls back into Go, and nothing keeps a Go pointer after it
// returned, but OpenCL itself does: the memory of a transfer that does not
// block, and of a USE_HOST_PTR buffer, must not be the Go heap's.
package cl

//go:generate go run ./gen -o consts_gen.go /usr/include/CL/cl.h /usr/include/CL/cl_ext.h
