// Package query lists the objects of a cluster for which a CEL expression is true.
//
// An expression uses the fields of one object as variables, with or without the kind
// before the name, as in memory and gpu.memory, and the constants KiB, MiB, GiB and TiB.
// GPUs and sessions have the fields that internal/expr gives them. Fields returns those
// of each kind.
//
// CEL parses and checks each expression and defines its meaning. Most expressions are
// then lowered to Go functions over columns of field values. What cannot be lowered is
// evaluated by CEL's interpreter, with a limit on its cost. In an expression of several
// parts joined by &&, the parts that can be lowered run first, and the interpreter
// evaluates only the remaining objects. Errors also come from the interpreter: if a
// lowered expression fails, the interpreter evaluates it again for the message.
//
// A query that compares an indexed field with a constant, or with a list of constants,
// reads only what the index returns. Each other query is a scan. Scans of a View follow
// its trees. Scans of a Cache run over blocks of objects in the order of their names,
// with columns of the fields that queries have used. Of a new view, a Cache reads only
// what has changed. Blocks never change after they are made.
package query
