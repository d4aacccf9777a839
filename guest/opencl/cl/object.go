package cl

/*
#cgo noescape gxBuildProgram
#cgo nocallback gxBuildProgram
#cgo noescape gxCompileProgram
#cgo nocallback gxCompileProgram
#cgo noescape gxCreateBuffer
#cgo nocallback gxCreateBuffer
#cgo noescape gxCreateCommandQueue
#cgo nocallback gxCreateCommandQueue
#cgo noescape gxCreateContext
#cgo nocallback gxCreateContext
#cgo noescape gxCreateImage
#cgo nocallback gxCreateImage
#cgo noescape gxCreateKernel
#cgo nocallback gxCreateKernel
#cgo noescape gxCreateProgramWithBinary
#cgo nocallback gxCreateProgramWithBinary
#cgo noescape gxCreateProgramWithIL
#cgo nocallback gxCreateProgramWithIL
#cgo noescape gxCreateProgramWithSource
#cgo nocallback gxCreateProgramWithSource
#cgo noescape gxCreateSampler
#cgo nocallback gxCreateSampler
#cgo noescape gxCreateSubBuffer
#cgo nocallback gxCreateSubBuffer
#cgo noescape gxCreateSubDevices
#cgo nocallback gxCreateSubDevices
#cgo noescape gxGetDeviceIDs
#cgo nocallback gxGetDeviceIDs
#cgo noescape gxGetSupportedImageFormats
#cgo nocallback gxGetSupportedImageFormats
#cgo noescape gxLinkProgram
#cgo nocallback gxLinkProgram
#cgo noescape gxReleaseCommandQueue
#cgo nocallback gxReleaseCommandQueue
#cgo noescape gxReleaseContext
#cgo nocallback gxReleaseContext
#cgo noescape gxReleaseDevice
#cgo nocallback gxReleaseDevice
#cgo noescape gxReleaseEvent
#cgo nocallback gxReleaseEvent
#cgo noescape gxReleaseKernel
#cgo nocallback gxReleaseKernel
#cgo noescape gxReleaseMemObject
#cgo nocallback gxReleaseMemObject
#cgo noescape gxReleaseProgram
#cgo nocallback gxReleaseProgram
#cgo noescape gxReleaseSampler
#cgo nocallback gxReleaseSampler
#cgo noescape gxRetainContext
#cgo nocallback gxRetainContext
#cgo noescape gxRetainEvent
#cgo nocallback gxRetainEvent
#cgo noescape gxRetainProgram
#cgo nocallback gxRetainProgram
#cgo noescape gxSetKernelArg
#cgo nocallback gxSetKernelArg
#cgo noescape gxSetProgramSpecializationConstant
#cgo nocallback gxSetProgramSpecializationConstant
#cgo noescape gxWaitForEvents
#cgo nocallback gxWaitForEvents
#include "trampolines.h"
*/
import "C"

import (
	"slices"
	"strings"
	"unsafe"
)

// ImageFormat is a cl_image_format.
type ImageFormat struct {
	ChannelOrder uint32 // Rgba, …
	ChannelType  uint32 // UnormInt8, …
}

// ImageDesc is a cl_image_desc. Sizes are pixels, pitches bytes.
type ImageDesc struct {
	Type                                                  uint32
	Width, Height, Depth, ArraySize, RowPitch, SlicePitch uint64
	NumMipLevels, NumSamples                              uint32
	// MemObject is what the image is made from, 0 for none. A handle is of one
	// process and does not leave it.
	MemObject Mem `cbor:"-"`
}

// The Go structs are passed to C as they are.
var (
	_ [C.sizeof_cl_image_format]byte = [unsafe.Sizeof(ImageFormat{})]byte{}
	_ [C.sizeof_cl_image_desc]byte   = [unsafe.Sizeof(ImageDesc{})]byte{}
)

// handles is a list of handles as C takes it: its length, and NULL if it is empty.
func handles[H ~uintptr](h []H) (C.uint32_t, *C.uintptr_t) {
	if len(h) == 0 {
		return 0, nil
	}
	return C.uint32_t(len(h)), (*C.uintptr_t)(unsafe.Pointer(unsafe.SliceData(h)))
}

// text is a string as C takes it.
func text(s string) *C.char {
	b := make([]byte, len(s)+1)
	copy(b, s)
	return (*C.char)(unsafe.Pointer(&b[0]))
}

// start is where a slice's bytes are; nil for none.
func start[E any](b []E) unsafe.Pointer {
	if len(b) == 0 {
		return nil
	}
	return unsafe.Pointer(unsafe.SliceData(b))
}

// GetDeviceIDs lists a platform's devices of a type; none is DeviceNotFound.
func GetDeviceIDs(p Platform, typ uint64) ([]Device, Status) {
	var n C.uint32_t
	if s := Status(C.gxGetDeviceIDs(C.uintptr_t(p), C.uint64_t(typ), 0, nil, &n)); s != Success || n == 0 {
		return nil, s
	}
	d := make([]Device, n)
	_, list := handles(d)
	return d, Status(C.gxGetDeviceIDs(C.uintptr_t(p), C.uint64_t(typ), n, list, nil))
}

// terminated ends a list of partition properties for certain: some are followed
// by a value, and a runtime reads on until it has met its 0.
func terminated(props []uint64) []uint64 { return append(slices.Clip(props), 0, 0) }

// CountSubDevices says how many devices a partition would have.
func CountSubDevices(d Device, props []uint64) (uint32, Status) {
	var n C.uint32_t
	s := C.gxCreateSubDevices(C.uintptr_t(d), (*C.uint64_t)(start(terminated(props))), 0, nil, &n)
	return uint32(n), Status(s)
}

// CreateSubDevices partitions a device.
func CreateSubDevices(d Device, props []uint64) ([]Device, Status) {
	n, s := CountSubDevices(d, props)
	if s != Success || n == 0 {
		return nil, s
	}
	sub := make([]Device, n)
	_, list := handles(sub)
	return sub, Status(C.gxCreateSubDevices(C.uintptr_t(d), (*C.uint64_t)(start(terminated(props))), C.uint32_t(n), list, nil))
}

// CreateContext makes a context of devices of one platform.
func CreateContext(devs []Device) (Context, Status) {
	if len(devs) == 0 {
		return 0, InvalidValue
	}
	b, s := GetDeviceInfo(devs[0], DevicePlatform)
	if s != Success {
		return 0, s
	}
	n, list := handles(devs)
	var err C.int32_t
	c := C.gxCreateContext(C.uintptr_t(Uint64(b)), n, list, &err)
	return Context(c), Status(err)
}

// CreateCommandQueue makes a queue with the function of OpenCL 1.x.
func CreateCommandQueue(c Context, d Device, props uint64) (Queue, Status) {
	var err C.int32_t
	q := C.gxCreateCommandQueue(C.uintptr_t(c), C.uintptr_t(d), C.uint64_t(props), &err)
	return Queue(q), Status(err)
}

// CreateBuffer makes a buffer.
func CreateBuffer(c Context, flags, size uint64, hostPtr unsafe.Pointer) (Mem, Status) {
	var err C.int32_t
	m := C.gxCreateBuffer(C.uintptr_t(c), C.uint64_t(flags), C.size_t(size), (*C.uint8_t)(hostPtr), &err)
	return Mem(m), Status(err)
}

// CreateSubBuffer makes a buffer of a buffer's part.
func CreateSubBuffer(m Mem, flags, origin, size uint64) (Mem, Status) {
	var err C.int32_t
	sub := C.gxCreateSubBuffer(C.uintptr_t(m), C.uint64_t(flags), C.size_t(origin), C.size_t(size), &err)
	return Mem(sub), Status(err)
}

// CreateImage makes an image.
func CreateImage(c Context, flags uint64, format *ImageFormat, desc *ImageDesc, hostPtr unsafe.Pointer) (Mem, Status) {
	var err C.int32_t
	m := C.gxCreateImage(C.uintptr_t(c), C.uint64_t(flags), (*C.uint8_t)(unsafe.Pointer(format)), (*C.uint8_t)(unsafe.Pointer(desc)), (*C.uint8_t)(hostPtr), &err)
	return Mem(m), Status(err)
}

// GetSupportedImageFormats lists the formats that images of a type can have.
func GetSupportedImageFormats(c Context, flags uint64, imageType uint32) ([]ImageFormat, Status) {
	var n C.uint32_t
	if s := Status(C.gxGetSupportedImageFormats(C.uintptr_t(c), C.uint64_t(flags), C.uint32_t(imageType), 0, nil, &n)); s != Success || n == 0 {
		return nil, s
	}
	f := make([]ImageFormat, n)
	return f, Status(C.gxGetSupportedImageFormats(C.uintptr_t(c), C.uint64_t(flags), C.uint32_t(imageType), n, (*C.uint8_t)(start(f)), nil))
}

// CreateSampler makes a sampler.
func CreateSampler(c Context, normalized bool, addressing, filter uint32) (Sampler, Status) {
	var err C.int32_t
	s := C.gxCreateSampler(C.uintptr_t(c), flag(normalized), C.uint32_t(addressing), C.uint32_t(filter), &err)
	return Sampler(s), Status(err)
}

// CreateProgramWithSource makes a program of OpenCL C.
func CreateProgramWithSource(c Context, src []byte) (Program, Status) {
	var err C.int32_t
	p := C.gxCreateProgramWithSource(C.uintptr_t(c), (*C.char)(start(src)), C.size_t(len(src)), &err)
	return Program(p), Status(err)
}

// CreateProgramWithIL makes a program of SPIR-V or another intermediate language.
func CreateProgramWithIL(c Context, il []byte) (Program, Status) {
	var err C.int32_t
	p := C.gxCreateProgramWithIL(C.uintptr_t(c), (*C.uint8_t)(start(il)), C.size_t(len(il)), &err)
	return Program(p), Status(err)
}

// CreateProgramWithBinary makes a program of a vendor's binaries, one for each
// device. The second result says which of them were accepted.
func CreateProgramWithBinary(c Context, devs []Device, binaries [][]byte) (Program, []Status, Status) {
	if len(devs) == 0 || len(devs) != len(binaries) {
		return 0, nil, InvalidValue
	}
	var all []byte
	lens := make([]C.size_t, len(binaries))
	for i, b := range binaries {
		if len(b) == 0 {
			return 0, nil, InvalidValue
		}
		lens[i] = C.size_t(len(b))
		all = append(all, b...)
	}
	each := make([]Status, len(devs))
	n, list := handles(devs)
	var err C.int32_t
	p := C.gxCreateProgramWithBinary(C.uintptr_t(c), n, list, &lens[0], (*C.uchar)(&all[0]), (*C.int32_t)(start(each)), &err)
	return Program(p), each, Status(err)
}

// BuildProgram compiles and links a program for devices, nil for all of its
// context, and returns when it is done.
func BuildProgram(p Program, devs []Device, options string) Status {
	n, list := handles(devs)
	return Status(C.gxBuildProgram(C.uintptr_t(p), n, list, text(options)))
}

// CompileProgram compiles a program for later linking. Header i is included by names[i].
func CompileProgram(p Program, devs []Device, options string, headers []Program, names []string) Status {
	if len(headers) != len(names) {
		return InvalidValue
	}
	for _, name := range names {
		if strings.IndexByte(name, 0) >= 0 {
			return InvalidValue
		}
	}
	n, list := handles(devs)
	nh, hs := handles(headers)
	return Status(C.gxCompileProgram(C.uintptr_t(p), n, list, text(options), nh, hs, text(strings.Join(names, "\x00"))))
}

// LinkProgram links compiled programs. With LinkProgramFailure there may be a
// program all the same, whose build log says why.
func LinkProgram(c Context, devs []Device, options string, inputs []Program) (Program, Status) {
	n, list := handles(devs)
	ni, in := handles(inputs)
	var err C.int32_t
	p := C.gxLinkProgram(C.uintptr_t(c), n, list, text(options), ni, in, &err)
	return Program(p), Status(err)
}

// SetProgramSpecializationConstant sets a constant of a program made of SPIR-V.
func SetProgramSpecializationConstant(p Program, id uint32, size uint64, value unsafe.Pointer) Status {
	return Status(C.gxSetProgramSpecializationConstant(C.uintptr_t(p), C.uint32_t(id), C.size_t(size), (*C.uint8_t)(value)))
}

// CreateKernel makes a kernel of a built program.
func CreateKernel(p Program, name string) (Kernel, Status) {
	var err C.int32_t
	k := C.gxCreateKernel(C.uintptr_t(p), text(name), &err)
	return Kernel(k), Status(err)
}

// SetKernelArg sets an argument; value is nil for local memory. It does not allocate.
func SetKernelArg(k Kernel, index uint32, size uint64, value unsafe.Pointer) Status {
	return Status(C.gxSetKernelArg(C.uintptr_t(k), C.uint32_t(index), C.size_t(size), (*C.uint8_t)(value)))
}

// WaitForEvents waits until all events, of one platform, are complete.
func WaitForEvents(wait []Event) Status {
	n, list := handles(wait)
	return Status(C.gxWaitForEvents(n, list))
}

// ReleaseDevice drops a reference to a sub-device.
func ReleaseDevice(d Device) Status { return Status(C.gxReleaseDevice(C.uintptr_t(d))) }

// RetainContext adds a reference to a context.
func RetainContext(c Context) Status { return Status(C.gxRetainContext(C.uintptr_t(c))) }

// ReleaseContext drops a reference to a context.
func ReleaseContext(c Context) Status { return Status(C.gxReleaseContext(C.uintptr_t(c))) }

// ReleaseCommandQueue drops a reference to a queue.
func ReleaseCommandQueue(q Queue) Status { return Status(C.gxReleaseCommandQueue(C.uintptr_t(q))) }

// ReleaseMemObject drops a reference to a buffer or image.
func ReleaseMemObject(m Mem) Status { return Status(C.gxReleaseMemObject(C.uintptr_t(m))) }

// ReleaseSampler drops a reference to a sampler.
func ReleaseSampler(s Sampler) Status { return Status(C.gxReleaseSampler(C.uintptr_t(s))) }

// RetainProgram adds a reference to a program.
func RetainProgram(p Program) Status { return Status(C.gxRetainProgram(C.uintptr_t(p))) }

// ReleaseProgram drops a reference to a program.
func ReleaseProgram(p Program) Status { return Status(C.gxReleaseProgram(C.uintptr_t(p))) }

// ReleaseKernel drops a reference to a kernel.
func ReleaseKernel(k Kernel) Status { return Status(C.gxReleaseKernel(C.uintptr_t(k))) }

// RetainEvent adds a reference to an event.
func RetainEvent(e Event) Status { return Status(C.gxRetainEvent(C.uintptr_t(e))) }

// ReleaseEvent drops a reference to an event.
func ReleaseEvent(e Event) Status { return Status(C.gxReleaseEvent(C.uintptr_t(e))) }

func flag(b bool) C.uint32_t {
	if b {
		return 1
	}
	return 0
}
