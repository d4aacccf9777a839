package virt

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Limits of libvirt's protocol (src/remote/remote_protocol.x and
// src/rpc/virnetprotocol.x).
const (
	maxFrame  = 32<<20 + 4
	maxString = 4 << 20
	maxList   = 16384
	headerLen = 28 // including the length
)

// Numbers of the protocol.
const (
	remoteProgram = 0x20008086

	frameCall    = 0
	frameReply   = 1
	frameMessage = 2

	statusOK    = 0
	statusError = 1
)

// Procedures that gpuctl calls or whose events it receives.
const (
	procOpen            = 1
	procGetType         = 3
	procGetVersion      = 4
	procCapabilities    = 7
	procXML             = 14
	procAutostart       = 15
	procLookupName      = 23
	procLookupUUID      = 24
	procResume          = 28
	procSetAutostart    = 29
	procSuspend         = 34
	procHostname        = 59
	procAuthList        = 66
	procAuthPolkit      = 70
	procFreeMemory      = 102
	procIsPersistent    = 151
	procCompareCPU      = 158
	procLibVersion      = 157
	procAttach          = 160
	procDetach          = 161
	procJobInfo         = 163
	procAbort           = 164
	procSnapshotNum     = 187
	procCreate          = 196
	procState           = 212
	procUndefine        = 231
	procDestroy         = 234
	procShutdown        = 258
	procDomains         = 273
	procJobStats        = 298
	procMigrate         = 305
	procMigrateFinish   = 306
	procRegister        = 316
	procLifecycle       = 318
	procDeviceRemoved   = 333
	procDefine          = 350
	procDeviceAdded     = 354
	procIteration       = 359
	procJobCompleted    = 363
	procRemovalFailed   = 367
	procCompareHyperCPU = 393
	procCheckpoints     = 413
	shapeError          = "ii?si?(sui)?s?s?sii?(su)"
	shapeDomain         = "sui"
)

// shape returns the form of a procedure's reply or event:
//
//	i  four bytes        s  string            p  typed parameter
//	h  eight bytes       o  opaque bytes      u  UUID
//	*  list of what follows   ?  what follows or nothing   ( )  group
func shape(proc uint32) (string, bool) {
	switch proc {
	case procOpen, procResume, procSuspend, procAttach, procDetach, procAbort, procUndefine, procDestroy, procShutdown, procSetAutostart:
		return "", true
	case procGetType, procCapabilities, procXML, procHostname:
		return "s", true
	case procGetVersion, procLibVersion, procFreeMemory:
		return "h", true
	case procLookupName, procLookupUUID, procCreate, procDefine:
		return shapeDomain, true
	case procAuthList:
		return "*i", true
	case procAuthPolkit, procRegister, procIsPersistent, procAutostart, procCompareCPU, procCompareHyperCPU, procSnapshotNum:
		return "i", true
	case procCheckpoints:
		return "*(s" + shapeDomain + ")i", true
	case procState:
		return "ii", true
	case procJobInfo:
		return "ihhhhhhhhhhh", true
	case procJobStats:
		return "i*p", true
	case procMigrate:
		return "o", true
	case procMigrateFinish:
		return shapeDomain + "o", true
	case procDomains:
		return "*(" + shapeDomain + ")i", true
	}
	return "", false
}

var errShort = errors.New("message is too short")

// xdr reads XDR (RFC 4506) from b. After an error, all reads return zero.
type xdr struct {
	b   []byte
	err error
}

func (x *xdr) take(n int) []byte {
	if x.err != nil {
		return nil
	}
	if n < 0 || n > len(x.b) {
		x.err = errShort
		return nil
	}
	out := x.b[:n]
	x.b = x.b[n:]
	return out
}

func (x *xdr) uint32() uint32 {
	if b := x.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (x *xdr) uint64() uint64 {
	if b := x.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (x *xdr) bytes() []byte {
	n := x.uint32()
	if x.err == nil && n > maxString {
		x.err = fmt.Errorf("string of %d bytes", n)
	}
	out := x.take(int(n))
	x.take(int(-n & 3))
	return out
}

func (x *xdr) string() string { return string(x.bytes()) }

func (x *xdr) count() int {
	n := x.uint32()
	if x.err == nil && n > maxList {
		x.err = fmt.Errorf("list of %d", n)
	}
	if x.err != nil {
		return 0
	}
	return int(n)
}

func (x *xdr) domain() Domain {
	d := Domain{Name: x.string()}
	copy(d.UUID[:], x.take(16))
	d.ID = int(int32(x.uint32()))
	return d
}

// param reads one typed parameter. Its value is an int64, uint64, float64, bool or
// string. gpuctl does not use floating-point values, which are returned as their bits.
func (x *xdr) param() (name string, value any) {
	name = x.string()
	switch t := x.uint32(); t {
	case 1:
		return name, int64(int32(x.uint32()))
	case 2:
		return name, uint64(x.uint32())
	case 3:
		return name, int64(x.uint64())
	case 4, 5:
		return name, x.uint64()
	case 6:
		return name, x.uint32() != 0
	case 7:
		return name, x.string()
	default:
		if x.err == nil {
			x.err = fmt.Errorf("parameter %.40q of type %d", name, t)
		}
		return name, nil
	}
}

func (x *xdr) params() map[string]any {
	out := map[string]any{}
	for range x.count() {
		name, value := x.param()
		if x.err != nil {
			return nil
		}
		out[name] = value
	}
	return out
}

// follows returns an error unless all of b has the form of shape.
func follows(b []byte, shape string) error {
	x := &xdr{b: b}
	for rest := shape; rest != "" && x.err == nil; {
		rest = x.element(rest)
	}
	if x.err == nil && len(x.b) != 0 {
		return fmt.Errorf("%d bytes too many", len(x.b))
	}
	return x.err
}

// element reads the first element of shape and returns the rest of the shape.
func (x *xdr) element(shape string) string {
	rest := shape[1:]
	switch shape[0] {
	case 'i':
		x.uint32()
	case 'h':
		x.uint64()
	case 's', 'o':
		x.bytes()
	case 'u':
		x.take(16)
	case 'p':
		x.param()
	case '(':
		for rest[0] != ')' {
			rest = x.element(rest)
		}
		rest = rest[1:]
	case '*', '?':
		n := x.count()
		if shape[0] == '?' && n > 1 && x.err == nil {
			x.err = fmt.Errorf("a pointer of value %d", n)
		}
		after := (&xdr{err: errShort}).element(rest) // only to find the end of the element
		for range n {
			if x.err != nil {
				break
			}
			x.element(rest)
		}
		rest = after
	}
	return rest
}
