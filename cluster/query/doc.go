// Package query lists the objects of a cluster for which a CEL expression
// holds.
//
// An expression sees the fields of one object as variables, alone or after the
// kind, as in memory and gpu.memory, and the constants KiB, MiB, GiB and TiB:
// GPUs and sessions have the names that internal/expr gives them. Fields says
// what there is of each kind.
//
// CEL parses and checks every expression and defines what it means. Most are
// then lowered to Go functions over columns of field values; what cannot be
// lowered is left to CEL's own interpreter, with a limit on its cost. In an
// expression of several parts joined by && those that can be lowered run first
// and the interpreter sees only the objects that they leave. Errors, too, are
// the interpreter's: where a lowered expression fails, it is asked why.
//
// A query that compares an indexed field with a constant, or looks for it in a
// list of some, reads only what the index has. Every other one is a scan. Scans of a View follow its trees;
// those of a Cache run over blocks of objects in order of their names, with
// the columns of the fields that were ever asked for, and of a new view a
// Cache reads only what has changed. Blocks never change once they are made.
package query
