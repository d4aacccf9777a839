// Package beneath opens files in folders that somebody else may write to, for
// processes that may do more than those. Whoever may write to a folder may put
// a link there, also between a look at a name and its use: the kernel is asked
// to follow none, and to leave the folder by no way (openat2, Linux 5.6). What
// is no regular file is neither waited for nor used.
//
// Packages whose files others can reach open them through this one only, which
// a test of this package sees to. The other packages that root runs say there of
// each function why it need not.
package beneath
