// Package rundir knows where daemons put their sockets and where clients look
// for them: $XDG_RUNTIME_DIR/gpuctl, /run/gpuctl for root, else a folder of the
// user's own in the temporary folder. Daemons that `gpuctl run` starts for its
// own lifetime live in the sub-folder private, one folder each.
package rundir
