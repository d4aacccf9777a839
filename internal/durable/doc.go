// Package durable replaces small files so that after a crash of the machine
// the old or the new content is there, and the new one once Replace returned.
package durable
