// Package expr evaluates the CEL expressions with which people choose GPUs and sessions.
// An expression uses the fields of one object as variables, and the constants KiB, MiB,
// GiB and TiB. Users write expressions, so their cost is limited (package celenv).
package expr
