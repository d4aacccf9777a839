package cl

/*
#cgo noescape gxEnqueueBarrierWithWaitList
#cgo nocallback gxEnqueueBarrierWithWaitList
#cgo noescape gxEnqueueCopyBuffer
#cgo nocallback gxEnqueueCopyBuffer
#cgo noescape gxEnqueueCopyBufferRect
#cgo nocallback gxEnqueueCopyBufferRect
#cgo noescape gxEnqueueCopyBufferToImage
#cgo nocallback gxEnqueueCopyBufferToImage
#cgo noescape gxEnqueueCopyImage
#cgo nocallback gxEnqueueCopyImage
#cgo noescape gxEnqueueCopyImageToBuffer
#cgo nocallback gxEnqueueCopyImageToBuffer
#cgo noescape gxEnqueueFillBuffer
#cgo nocallback gxEnqueueFillBuffer
#cgo noescape gxEnqueueFillImage
#cgo nocallback gxEnqueueFillImage
#cgo noescape gxEnqueueMapBuffer
#cgo nocallback gxEnqueueMapBuffer
#cgo noescape gxEnqueueMarkerWithWaitList
#cgo nocallback gxEnqueueMarkerWithWaitList
#cgo noescape gxEnqueueMigrateMemObjects
#cgo nocallback gxEnqueueMigrateMemObjects
#cgo noescape gxEnqueueNDRangeKernel
#cgo nocallback gxEnqueueNDRangeKernel
#cgo noescape gxEnqueueReadBuffer
#cgo nocallback gxEnqueueReadBuffer
#cgo noescape gxEnqueueReadBufferRect
#cgo nocallback gxEnqueueReadBufferRect
#cgo noescape gxEnqueueReadImage
#cgo nocallback gxEnqueueReadImage
#cgo noescape gxEnqueueUnmapMemObject
#cgo nocallback gxEnqueueUnmapMemObject
#cgo noescape gxEnqueueWriteBuffer
#cgo nocallback gxEnqueueWriteBuffer
#cgo noescape gxEnqueueWriteBufferRect
#cgo nocallback gxEnqueueWriteBufferRect
#cgo noescape gxEnqueueWriteImage
#cgo nocallback gxEnqueueWriteImage
#cgo noescape gxFinish
#cgo nocallback gxFinish
#cgo noescape gxFlush
#cgo nocallback gxFlush
#include "trampolines.h"
*/
import "C"

import "unsafe"

// None of these functions allocates, nor lets a pointer escape.

func dims3(v *[3]uint64) *C.size_t { return (*C.size_t)(unsafe.Pointer(v)) }

func out(e *Event) *C.uintptr_t { return (*C.uintptr_t)(unsafe.Pointer(e)) }

// Flush sends a queue's commands to the device.
func Flush(q Queue) Status { return Status(C.gxFlush(C.uintptr_t(q))) }

// Finish waits until a queue is empty.
func Finish(q Queue) Status { return Status(C.gxFinish(C.uintptr_t(q))) }

// EnqueueNDRangeKernel runs a kernel over dims dimensions of off, glob and
// loc.
func EnqueueNDRangeKernel(q Queue, k Kernel, dims uint32, off, glob, loc *[3]uint64, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueNDRangeKernel(C.uintptr_t(q), C.uintptr_t(k), C.uint32_t(dims), dims3(off), dims3(glob), dims3(loc), n, list, out(ev)))
}

// EnqueueReadBuffer copies out of a buffer.
func EnqueueReadBuffer(q Queue, m Mem, blocking bool, off, size uint64, ptr unsafe.Pointer, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueReadBuffer(C.uintptr_t(q), C.uintptr_t(m), flag(blocking), C.size_t(off), C.size_t(size), (*C.uint8_t)(ptr), n, list, out(ev)))
}

// EnqueueWriteBuffer copies into a buffer.
func EnqueueWriteBuffer(q Queue, m Mem, blocking bool, off, size uint64, ptr unsafe.Pointer, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueWriteBuffer(C.uintptr_t(q), C.uintptr_t(m), flag(blocking), C.size_t(off), C.size_t(size), (*C.uint8_t)(ptr), n, list, out(ev)))
}

// EnqueueReadBufferRect copies a box out of a buffer. Origins and the region
// are bytes, rows and slices, pitches bytes or 0.
func EnqueueReadBufferRect(q Queue, m Mem, blocking bool, bufferOrigin, hostOrigin, region *[3]uint64, bufferRow, bufferSlice, hostRow, hostSlice uint64, ptr unsafe.Pointer, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueReadBufferRect(C.uintptr_t(q), C.uintptr_t(m), flag(blocking), dims3(bufferOrigin), dims3(hostOrigin), dims3(region), C.size_t(bufferRow), C.size_t(bufferSlice), C.size_t(hostRow), C.size_t(hostSlice), (*C.uint8_t)(ptr), n, list, out(ev)))
}

// EnqueueWriteBufferRect copies a box into a buffer. Origins and the region
// are bytes, rows and slices, pitches bytes or 0.
func EnqueueWriteBufferRect(q Queue, m Mem, blocking bool, bufferOrigin, hostOrigin, region *[3]uint64, bufferRow, bufferSlice, hostRow, hostSlice uint64, ptr unsafe.Pointer, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueWriteBufferRect(C.uintptr_t(q), C.uintptr_t(m), flag(blocking), dims3(bufferOrigin), dims3(hostOrigin), dims3(region), C.size_t(bufferRow), C.size_t(bufferSlice), C.size_t(hostRow), C.size_t(hostSlice), (*C.uint8_t)(ptr), n, list, out(ev)))
}

// EnqueueCopyBuffer copies from buffer to buffer.
func EnqueueCopyBuffer(q Queue, src, dst Mem, srcOff, dstOff, size uint64, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueCopyBuffer(C.uintptr_t(q), C.uintptr_t(src), C.uintptr_t(dst), C.size_t(srcOff), C.size_t(dstOff), C.size_t(size), n, list, out(ev)))
}

// EnqueueCopyBufferRect copies a box from buffer to buffer.
func EnqueueCopyBufferRect(q Queue, src, dst Mem, srcOrigin, dstOrigin, region *[3]uint64, srcRow, srcSlice, dstRow, dstSlice uint64, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueCopyBufferRect(C.uintptr_t(q), C.uintptr_t(src), C.uintptr_t(dst), dims3(srcOrigin), dims3(dstOrigin), dims3(region), C.size_t(srcRow), C.size_t(srcSlice), C.size_t(dstRow), C.size_t(dstSlice), n, list, out(ev)))
}

// EnqueueFillBuffer repeats a pattern of patternSize bytes over a part of a
// buffer.
func EnqueueFillBuffer(q Queue, m Mem, pattern unsafe.Pointer, patternSize, off, size uint64, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueFillBuffer(C.uintptr_t(q), C.uintptr_t(m), (*C.uint8_t)(pattern), C.size_t(patternSize), C.size_t(off), C.size_t(size), n, list, out(ev)))
}

// EnqueueReadImage copies out of an image. Pitches are those of the memory at
// ptr, 0 for tight.
func EnqueueReadImage(q Queue, m Mem, blocking bool, origin, region *[3]uint64, rowPitch, slicePitch uint64, ptr unsafe.Pointer, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueReadImage(C.uintptr_t(q), C.uintptr_t(m), flag(blocking), dims3(origin), dims3(region), C.size_t(rowPitch), C.size_t(slicePitch), (*C.uint8_t)(ptr), n, list, out(ev)))
}

// EnqueueWriteImage copies into an image. Pitches are those of the memory at
// ptr, 0 for tight.
func EnqueueWriteImage(q Queue, m Mem, blocking bool, origin, region *[3]uint64, rowPitch, slicePitch uint64, ptr unsafe.Pointer, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueWriteImage(C.uintptr_t(q), C.uintptr_t(m), flag(blocking), dims3(origin), dims3(region), C.size_t(rowPitch), C.size_t(slicePitch), (*C.uint8_t)(ptr), n, list, out(ev)))
}

// EnqueueCopyImage copies from image to image.
func EnqueueCopyImage(q Queue, src, dst Mem, srcOrigin, dstOrigin, region *[3]uint64, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueCopyImage(C.uintptr_t(q), C.uintptr_t(src), C.uintptr_t(dst), dims3(srcOrigin), dims3(dstOrigin), dims3(region), n, list, out(ev)))
}

// EnqueueFillImage fills a part of an image with a colour of 16 bytes.
func EnqueueFillImage(q Queue, m Mem, color *[16]byte, origin, region *[3]uint64, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueFillImage(C.uintptr_t(q), C.uintptr_t(m), (*C.uint8_t)(unsafe.Pointer(color)), dims3(origin), dims3(region), n, list, out(ev)))
}

// EnqueueCopyImageToBuffer copies a part of an image into a buffer.
func EnqueueCopyImageToBuffer(q Queue, src, dst Mem, origin, region *[3]uint64, dstOff uint64, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueCopyImageToBuffer(C.uintptr_t(q), C.uintptr_t(src), C.uintptr_t(dst), dims3(origin), dims3(region), C.size_t(dstOff), n, list, out(ev)))
}

// EnqueueCopyBufferToImage copies from a buffer into a part of an image.
func EnqueueCopyBufferToImage(q Queue, src, dst Mem, srcOff uint64, origin, region *[3]uint64, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueCopyBufferToImage(C.uintptr_t(q), C.uintptr_t(src), C.uintptr_t(dst), C.size_t(srcOff), dims3(origin), dims3(region), n, list, out(ev)))
}

// EnqueueUnmapMemObject ends a mapping.
func EnqueueUnmapMemObject(q Queue, m Mem, ptr unsafe.Pointer, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueUnmapMemObject(C.uintptr_t(q), C.uintptr_t(m), (*C.uint8_t)(ptr), n, list, out(ev)))
}

// EnqueueMarkerWithWaitList makes an event of what came before.
func EnqueueMarkerWithWaitList(q Queue, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueMarkerWithWaitList(C.uintptr_t(q), n, list, out(ev)))
}

// EnqueueBarrierWithWaitList holds back what comes after.
func EnqueueBarrierWithWaitList(q Queue, wait []Event, ev *Event) Status {
	n, list := handles(wait)
	return Status(C.gxEnqueueBarrierWithWaitList(C.uintptr_t(q), n, list, out(ev)))
}

// EnqueueMigrateMemObjects moves memory objects to the queue's device, or to
// the host.
func EnqueueMigrateMemObjects(q Queue, mems []Mem, flags uint64, wait []Event, ev *Event) Status {
	nm, ms := handles(mems)
	n, list := handles(wait)
	return Status(C.gxEnqueueMigrateMemObjects(C.uintptr_t(q), nm, ms, C.uint64_t(flags), n, list, out(ev)))
}

// EnqueueMapBuffer maps a part of a buffer.
func EnqueueMapBuffer(q Queue, m Mem, blocking bool, flags, off, size uint64, wait []Event, ev *Event) (unsafe.Pointer, Status) {
	n, list := handles(wait)
	var err C.int32_t
	p := C.gxEnqueueMapBuffer(C.uintptr_t(q), C.uintptr_t(m), flag(blocking), C.uint64_t(flags), C.size_t(off), C.size_t(size), n, list, out(ev), &err)
	return p, Status(err)
}
