// Package view shows protobuf messages to programs and people: as JSON whose
// names are those of the .proto files, whose enums are words and whose 64-bit
// numbers are numbers, and as the dotted fields that an expression or an order
// can name. One converter serves every message, so that a new field shows up
// without a word about it here.
package view
