// Package view converts protobuf messages for programs and people: to JSON with the names
// of the .proto files, enums as words and 64-bit numbers as numbers, and to the dotted
// fields that an expression or --sort-by can use. One converter is used for all messages,
// so new fields need no change here.
package view
