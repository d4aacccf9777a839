// Package durable replaces small files, and reads them. After a crash of the host, the file has the old
// or the new content, and the new one if Replace had returned.
package durable
