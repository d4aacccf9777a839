// Package steps tells an operator of a change to one VM: what is planned and what is against it,
// then each step while it is done.
//
// It keeps nothing. Changes that outlive hostd, as those of cards, are journalled by hostd/cards.
package steps
