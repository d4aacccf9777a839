// Package ledger keeps who has which GPU. One claim has a GPU as a whole, or
// several claims share it. Each claim that shares states how much memory it
// needs, and the sum must fit. No call leaves a GPU with two owners, or with an
// owner and a share.
package ledger
