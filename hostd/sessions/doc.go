// Package sessions decides which claim gets which GPU of this host. It has gpuguest move
// sessions between them.
//
// Host has the state and the rules. It calls gpuguest through the generated GuestService
// client. Server offers a Host as HostService. Report joins what a Host knows with what the
// keepers of cards and of mediated GPUs know, for the cluster.
//
// # Guarantees
//
//   - A GPU has one owner, or several claims whose stated memory fits (see
//     package ledger). An operation reserves its target before it begins. The
//     source is given back after the commit, the target after a roll-back. If
//     the outcome is unknown, both stay reserved until gpuguest reports on
//     which GPU the session is.
//   - hostd may be killed at any moment. gpuguest and its sessions go on. The
//     next hostd in the same folder reads the claims and the operations in
//     progress from state.json, and asks gpuguest where each session runs. If
//     the two differ, gpuguest is right.
//   - gpuguest may be killed at any moment. hostd starts it again and repeats
//     the offers of all claims.
//   - A claim ends with ReleaseClaim, or with the process that it was made for,
//     but never before the last session that uses it.
package sessions
