// Package expr evaluates the CEL expressions with which people choose GPUs and
// sessions. An expression sees the fields of one object as variables, and the
// constants KiB, MiB, GiB and TiB. Expressions come from users: what they may
// cost is limited (package celenv).
package expr
