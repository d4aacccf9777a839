// Package portable is the program container that applications receive in
// place of a vendor's binary: source or IL, options and metadata, from which
// the program can be built on any device.
//
// A container is, little-endian: the magic "GPUCLBIN", u32 version, u32 zero, u64 length of
// the payload, the SHA-256 of these 24 bytes and the payload, and then the payload. A
// program has exactly one encoding, so that equal programs give equal bytes and
// applications' caches work.
//
// Containers come back from applications, which are hostile: the checksum
// guards against accidents only, and Unmarshal bounds depth, size and counts.
package portable
