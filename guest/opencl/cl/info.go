package cl

/*
#cgo noescape gxGetDeviceInfo
#cgo nocallback gxGetDeviceInfo
#cgo noescape gxGetEventInfo
#cgo nocallback gxGetEventInfo
#cgo noescape gxGetEventProfilingInfo
#cgo nocallback gxGetEventProfilingInfo
#cgo noescape gxGetImageInfo
#cgo nocallback gxGetImageInfo
#cgo noescape gxGetKernelArgInfo
#cgo nocallback gxGetKernelArgInfo
#cgo noescape gxGetKernelInfo
#cgo nocallback gxGetKernelInfo
#cgo noescape gxGetKernelSubGroupInfo
#cgo nocallback gxGetKernelSubGroupInfo
#cgo noescape gxGetKernelSubGroupInfoKHR
#cgo nocallback gxGetKernelSubGroupInfoKHR
#cgo noescape gxGetKernelWorkGroupInfo
#cgo nocallback gxGetKernelWorkGroupInfo
#cgo noescape gxGetPlatformInfo
#cgo nocallback gxGetPlatformInfo
#cgo noescape gxGetProgramBinaries
#cgo nocallback gxGetProgramBinaries
#cgo noescape gxGetProgramBuildInfo
#cgo nocallback gxGetProgramBuildInfo
#cgo noescape gxGetProgramInfo
#cgo nocallback gxGetProgramInfo
#include "trampolines.h"
*/
import "C"

import (
	"bytes"
	"encoding/binary"
	"unsafe"
)

// Uint32 reads a cl_uint (also a cl_bool or an enumeration) out of an info; 0 when it is shorter.
func Uint32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b)
}

// Uint64 reads a cl_ulong, size_t, bit-field or handle out of an info. A
// shorter one is widened.
func Uint64(b []byte) uint64 {
	if len(b) < 8 {
		return uint64(Uint32(b))
	}
	return binary.NativeEndian.Uint64(b)
}

// CString reads a string out of an info, up to its NUL.
func CString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// maxInfo bounds the size of an info, against a runtime's nonsense.
const maxInfo = 1 << 30

func info(get func(size C.size_t, value *C.uint8_t, ret *C.size_t) C.int32_t) ([]byte, Status) {
	var n C.size_t
	if s := Status(get(0, nil, &n)); s != Success {
		return nil, s
	}
	if n == 0 {
		return nil, Success
	}
	if n > maxInfo {
		return nil, OutOfHostMemory
	}
	b := make([]byte, n)
	if s := Status(get(n, (*C.uint8_t)(&b[0]), &n)); s != Success {
		return nil, s
	}
	return b[:min(uint64(n), uint64(len(b)))], Success
}

// GetPlatformInfo returns a property of a platform.
func GetPlatformInfo(p Platform, param uint32) ([]byte, Status) {
	return info(func(size C.size_t, value *C.uint8_t, ret *C.size_t) C.int32_t {
		return C.gxGetPlatformInfo(C.uintptr_t(p), C.uint32_t(param), size, value, ret)
	})
}

// GetDeviceInfo returns a property of a device.
func GetDeviceInfo(d Device, param uint32) ([]byte, Status) {
	return info(func(size C.size_t, value *C.uint8_t, ret *C.size_t) C.int32_t {
		return C.gxGetDeviceInfo(C.uintptr_t(d), C.uint32_t(param), size, value, ret)
	})
}

// GetImageInfo returns a property of an image.
func GetImageInfo(m Mem, param uint32) ([]byte, Status) {
	return info(func(size C.size_t, value *C.uint8_t, ret *C.size_t) C.int32_t {
		return C.gxGetImageInfo(C.uintptr_t(m), C.uint32_t(param), size, value, ret)
	})
}

// GetProgramInfo returns a property of a program; for ProgramBinaries see GetProgramBinaries.
func GetProgramInfo(p Program, param uint32) ([]byte, Status) {
	return info(func(size C.size_t, value *C.uint8_t, ret *C.size_t) C.int32_t {
		return C.gxGetProgramInfo(C.uintptr_t(p), C.uint32_t(param), size, value, ret)
	})
}

// GetProgramBuildInfo returns a property of a program's build.
func GetProgramBuildInfo(p Program, d Device, param uint32) ([]byte, Status) {
	return info(func(size C.size_t, value *C.uint8_t, ret *C.size_t) C.int32_t {
		return C.gxGetProgramBuildInfo(C.uintptr_t(p), C.uintptr_t(d), C.uint32_t(param), size, value, ret)
	})
}

// GetKernelInfo returns a property of a kernel.
func GetKernelInfo(k Kernel, param uint32) ([]byte, Status) {
	return info(func(size C.size_t, value *C.uint8_t, ret *C.size_t) C.int32_t {
		return C.gxGetKernelInfo(C.uintptr_t(k), C.uint32_t(param), size, value, ret)
	})
}

// GetKernelArgInfo returns a property of a kernel's argument.
func GetKernelArgInfo(k Kernel, index, param uint32) ([]byte, Status) {
	return info(func(size C.size_t, value *C.uint8_t, ret *C.size_t) C.int32_t {
		return C.gxGetKernelArgInfo(C.uintptr_t(k), C.uint32_t(index), C.uint32_t(param), size, value, ret)
	})
}

// GetKernelWorkGroupInfo returns a property of a kernel on a device.
func GetKernelWorkGroupInfo(k Kernel, d Device, param uint32) ([]byte, Status) {
	return info(func(size C.size_t, value *C.uint8_t, ret *C.size_t) C.int32_t {
		return C.gxGetKernelWorkGroupInfo(C.uintptr_t(k), C.uintptr_t(d), C.uint32_t(param), size, value, ret)
	})
}

// GetKernelSubGroupInfo returns a property of a kernel's sub-groups on a
// device. The input is a local size, or a number of sub-groups, as param wants:
// size_t values as they lie in memory.
func GetKernelSubGroupInfo(k Kernel, d Device, param uint32, input []byte) ([]byte, Status) {
	in, n := (*C.uint8_t)(start(input)), C.size_t(len(input))
	b, s := info(func(size C.size_t, value *C.uint8_t, ret *C.size_t) C.int32_t {
		return C.gxGetKernelSubGroupInfo(C.uintptr_t(k), C.uintptr_t(d), C.uint32_t(param), n, in, size, value, ret)
	})
	if s != InvalidOperation {
		return b, s
	}
	return info(func(size C.size_t, value *C.uint8_t, ret *C.size_t) C.int32_t {
		return C.gxGetKernelSubGroupInfoKHR(C.uintptr_t(k), C.uintptr_t(d), C.uint32_t(param), n, in, size, value, ret)
	})
}

// GetProgramBinaries returns the vendor's binaries of a program, one for each
// of its devices, empty for a device that it was not built for.
func GetProgramBinaries(p Program) ([][]byte, Status) {
	b, s := GetProgramInfo(p, ProgramBinarySizes)
	if s != Success || len(b) == 0 {
		return nil, s
	}
	lens := make([]C.size_t, len(b)/8)
	var total uint64
	for i := range lens {
		n := Uint64(b[8*i:])
		if n > maxInfo || total+n > maxInfo {
			return nil, OutOfHostMemory
		}
		lens[i], total = C.size_t(n), total+n
	}
	all := make([]byte, total+1)
	if s := Status(C.gxGetProgramBinaries(C.uintptr_t(p), C.uint32_t(len(lens)), &lens[0], (*C.uchar)(&all[0]))); s != Success {
		return nil, s
	}
	out := make([][]byte, len(lens))
	for i, n := range lens {
		out[i], all = all[:n:n], all[n:]
	}
	return out, Success
}

// EventStatus returns the execution status of an event's command: Complete,
// Running, Submitted, Queued or a negative error. It does not allocate.
func EventStatus(e Event) (int32, Status) {
	var v C.int32_t
	s := C.gxGetEventInfo(C.uintptr_t(e), EventCommandExecutionStatus, 4, (*C.uint8_t)(unsafe.Pointer(&v)), nil)
	return int32(v), Status(s)
}

// EventTime returns a time of an event's command in nanoseconds, param being
// one of ProfilingCommandQueued and so on. It does not allocate.
func EventTime(e Event, param uint32) (uint64, Status) {
	var v C.uint64_t
	s := C.gxGetEventProfilingInfo(C.uintptr_t(e), C.uint32_t(param), 8, (*C.uint8_t)(unsafe.Pointer(&v)), nil)
	return uint64(v), Status(s)
}
