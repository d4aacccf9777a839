// Package size parses and formats amounts of memory.
package size
