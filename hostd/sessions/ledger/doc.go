// Package ledger records which claim has which GPU. Either one claim has the whole GPU,
// or several claims share it. Each claim that shares a GPU states how much memory it
// needs, and the sum must fit. No call leaves a GPU with two owners, or with an owner and
// a share.
package ledger
