package cl

/*
#cgo noescape gxAdmit
#cgo nocallback gxAdmit
#cgo noescape gxOpen
#cgo nocallback gxOpen
#cgo noescape gxPlatforms
#cgo nocallback gxPlatforms
#cgo noescape gxUnbuffer
#cgo nocallback gxUnbuffer
#cgo LDFLAGS: -ldl
#include "trampolines.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

// Handles of OpenCL objects; zero is none.
type (
	Platform uintptr
	Device   uintptr
	Context  uintptr
	Queue    uintptr
	Mem      uintptr
	Sampler  uintptr
	Program  uintptr
	Kernel   uintptr
	Event    uintptr
)

// ErrNotRuntime is returned for a library that cannot be loaded or is no
// OpenCL runtime.
var ErrNotRuntime = errors.New("not an OpenCL runtime")

// Library is a vendor's OpenCL runtime. It stays loaded until the process
// ends: no runtime survives being unloaded.
type Library struct {
	path      string
	platforms []Platform
}

// Load loads the vendor's library at a path, or by the name that the dynamic
// linker finds it under, so that Open has less to do. It looks for no device.
func Load(library string) error {
	_, err := load(library)
	return err
}

func load(library string) (icd unsafe.Pointer, err error) {
	path := C.CString(library)
	defer C.free(unsafe.Pointer(path))
	var why [512]C.char
	if icd = C.gxOpen(path, &why[0], C.size_t(len(why))); icd == nil {
		return nil, fmt.Errorf("%s: %w: %s", library, ErrNotRuntime, C.GoString(&why[0]))
	}
	return icd, nil
}

// Unbuffer has C's standard output keep nothing back, whoever prints: with the
// end of a command all that its kernel printed has been written then.
func Unbuffer() error {
	if C.gxUnbuffer() != 0 {
		return errors.New("standard output can't be unbuffered")
	}
	return nil
}

// Open finds the platforms of a library that it loads as Load does. Opening it
// again gives the same platforms.
func Open(library string) (*Library, error) {
	icd, err := load(library)
	if err != nil {
		return nil, err
	}
	l := &Library{path: library}
	var n C.uint32_t
	if s := Status(C.gxPlatforms(icd, 0, nil, &n)); s != Success || n == 0 {
		if s == PlatformNotFoundKhr || s == Success {
			return l, nil
		}
		return nil, fmt.Errorf("%s: platforms: %w", library, s)
	}
	l.platforms = make([]Platform, n)
	if s := Status(C.gxPlatforms(icd, n, (*C.uintptr_t)(unsafe.Pointer(&l.platforms[0])), nil)); s != Success {
		return nil, fmt.Errorf("%s: platforms: %w", library, s)
	}
	for i, p := range l.platforms {
		b, s := GetPlatformInfo(p, PlatformVersion)
		if s != Success {
			return nil, fmt.Errorf("%s: version of platform %d: %w", library, i, s)
		}
		if s := Status(C.gxAdmit(C.uintptr_t(p), C.int(version(CString(b))))); s != Success {
			return nil, fmt.Errorf("%s: platform %d: %w", library, i, s)
		}
	}
	return l, nil
}

// Platforms are the library's platforms; it may have none.
func (l *Library) Platforms() []Platform { return l.platforms }

// version reads "OpenCL 1.2 vendor's text" as 12; 10 when it cannot.
func version(s string) int {
	var major, minor int
	if n, _ := fmt.Sscanf(s, "OpenCL %d.%d", &major, &minor); n != 2 || major < 1 || minor < 0 || minor > 9 {
		return 10
	}
	return 10*major + minor
}

// Serialize lets one call at a time into this process's runtimes, waits
// included: for a runtime that is not thread-safe, as the specification asks.
// It is to be called before any other thread uses the runtime.
func (l *Library) Serialize() { C.gxSerial = 1 }
