package driver

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "call.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

var (
	// errNoLibrary means that a library is not installed.
	errNoLibrary = errors.New("is not installed")
	// errNoFunction means that a library is older than the function.
	errNoFunction = errors.New("the driver has no such function")
)

// library is one of NVIDIA's, loaded. It stays so until the process ends.
type library struct {
	handle unsafe.Pointer
	name   string
	found  map[string]unsafe.Pointer
}

// load loads the first of the libraries that is there.
func load(names ...string) (*library, error) {
	var errs []error
	for _, name := range names {
		var why [512]C.char
		text := C.CString(name)
		h := C.gxLoad(text, &why[0], C.size_t(len(why)))
		C.free(unsafe.Pointer(text))
		if h != nil {
			return &library{handle: h, name: name, found: map[string]unsafe.Pointer{}}, nil
		}
		errs = append(errs, errors.New(C.GoString(&why[0])))
	}
	return nil, fmt.Errorf("%s %w: %w", names[0], errNoLibrary, errors.Join(errs...))
}

func (l *library) find(name string) (unsafe.Pointer, error) {
	if f, ok := l.found[name]; ok {
		return f, nil
	}
	text := C.CString(name)
	defer C.free(unsafe.Pointer(text))
	f := C.gxFind(l.handle, text)
	if f == nil {
		return nil, fmt.Errorf("%s: %w: %s", l.name, errNoFunction, name)
	}
	l.found[name] = f
	return f, nil
}

// call calls a function of up to four integers or pointers, which must be of C's memory or
// pinned.
func (l *library) call(name string, args ...uintptr) (int, error) {
	f, err := l.find(name)
	if err != nil {
		return 0, err
	}
	var a [4]uintptr
	copy(a[:], args)
	return int(C.gxCall(f, C.uintptr_t(a[0]), C.uintptr_t(a[1]), C.uintptr_t(a[2]), C.uintptr_t(a[3]))), nil
}

// callPID calls a function of a pid and a pointer to memory of C's.
func (l *library) callPID(name string, pid int, args *memory) (int, error) {
	f, err := l.find(name)
	if err != nil {
		return 0, err
	}
	return int(C.gxCallPid(f, C.int(pid), args.p)), nil
}

// memory is zeroed memory of C's, so that pointers to it may be stored in other such memory.
type memory struct {
	p unsafe.Pointer
	n int
}

func alloc(n int) *memory { return &memory{C.calloc(1, C.size_t(n)), n} }

func (m *memory) free()         { C.free(m.p) }
func (m *memory) at() uintptr   { return uintptr(m.p) }
func (m *memory) bytes() []byte { return unsafe.Slice((*byte)(m.p), m.n) }

// text returns the string at an offset, of at most n bytes.
func (m *memory) text(offset, n int) string {
	b := m.bytes()[offset : offset+n]
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
