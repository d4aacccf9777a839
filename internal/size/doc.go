// Package size reads and writes amounts of memory as people write them.
package size
