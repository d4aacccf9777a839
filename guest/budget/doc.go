// Package budget holds what the sessions of a claim take of a GPU's memory together below
// what the claim may have.
//
// Here live a file for each claim and runtime, its two ends (gpuguest's Table, which says who
// has a line in it, and an executor's Share), and its form.
//
// Not here: what a claim may have (hostd), and what a session takes (package executor).
//
// An executor writes to its session's line only, but could write to others: they are of one
// claim, and so of one owner. gpuguest takes nothing from the file but names that it has
// written, and compares them.
package budget
