// Package wide works on one range of bytes with several processors: copies, sums and files that
// one processor alone is too slow for.
package wide
