// Package wire is the protocol between gpuctl's libvirt hook and hostd: one request and
// one answer over a Unix socket, each in one frame.
//
// A frame is four bytes of magic, the length of its body in four bytes, big endian, and
// the body: fields with one byte of tag, four bytes of length, and the value. Fields with
// an unknown tag are skipped, so that a hook and a hostd of different versions work
// together. Each length is checked before memory is allocated for it.
//
// The package is small on purpose, because libvirtd waits while the hook starts. So it
// does not use protobuf, HTTP or JSON. What the hook does without an answer is in
// internal/hook/dropin. The server is in hostd/cards/libvirthook.
package wire
