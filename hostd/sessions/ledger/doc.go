// Package ledger keeps who holds which GPU. A GPU is held by one claim as a
// whole, or by several that each state how much memory they need, as long as
// the sum fits. Both never hold at once, and no call leaves a GPU with two
// owners.
package ledger
