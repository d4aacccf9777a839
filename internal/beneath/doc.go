// Package beneath opens files in folders that others can write to, for processes with
// more rights than those. Whoever can write to a folder can put a link there, even
// between a check of a name and its use. So the kernel is asked to follow no links, and
// not to leave the folder (openat2(2), Linux 5.6). Files that are not regular are
// refused, and opening them does not block.
//
// Packages whose files others can change open them only through this package; a test of
// this package checks that. The other packages that root runs state there for each
// function why they need not.
package beneath
