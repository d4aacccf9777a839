// Package rundir defines where daemons have their sockets and where clients look for
// them: $XDG_RUNTIME_DIR/gpuctl, /run/gpuctl for root, otherwise a folder of the user in
// the temporary folder. A daemon that `gpuctl run` starts for its own lifetime has a
// folder of its own in the sub-folder private.
package rundir
