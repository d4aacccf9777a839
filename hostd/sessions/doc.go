// Package sessions decides which claim gets which GPU of this host, and has the
// guest helper move sessions between them.
//
// Host is the state and the rules; it talks to the guest helper through the
// generated GuestService client. Server offers a Host as HostService.
//
// # Guarantees
//
//   - A GPU has one owner, or several claims whose stated memory fits (see
//     package ledger). An operation reserves its target before it begins; the
//     source is given back after the commit, the target after a roll-back. When
//     the outcome is not known, both stay reserved until the guest says where
//     the session is.
//   - hostd may be killed at any moment. gpuguest and its sessions go on; the
//     next hostd on the same folder reads claims and operations in flight from
//     state.json, and takes from the guest where each session runs. The guest
//     is right when they differ.
//   - gpuguest may be killed at any moment. hostd starts it again and repeats
//     the offers of all claims.
//   - A claim ends with ReleaseClaim, or with the process that it was made for,
//     but never before the last session that uses it.
package sessions
