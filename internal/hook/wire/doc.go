// Package wire is what gpuctl's libvirt hook and hostd say to each other: one
// request and one answer over a unix socket, each in one frame.
//
// A frame is four bytes of magic, the length of its body in four bytes, big
// endian, and the body: fields of one byte of tag, four bytes of length, and
// the value. Who does not know a tag skips its field, so that a hook and a
// hostd of different versions understand each other. Every length is bounded
// before anything is allocated for it.
//
// The package is small on purpose: libvirtd waits while the hook starts, so
// it knows no protobuf, no HTTP and no JSON. What the hook does when nobody
// answers is in internal/hook/dropin; the server is in hostd/cards/libvirthook.
package wire
