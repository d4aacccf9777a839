// Package durable replaces small files. After a crash of the host, the file has the old
// or the new content, and the new one if Replace had returned.
package durable
