// Package wire is the session protocol between an application's OpenCL
// library (guest/opencl/icd) and its executor (guest/opencl/executor): request encoding,
// generated from the table in gen/table.go, and the layout of the shared
// memory that carries it. PROTOCOL.md in this folder is its specification.
//
// guest/opencl/executor executes the requests. guest/session starts executors and
// distributes the shared memory.
package wire

//go:generate go run ./gen -go ops_gen.go -c ../icd/wire_gen.h
