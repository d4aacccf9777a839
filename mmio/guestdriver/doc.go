// Package guestdriver is a small driver for the GPU of mmio/nvc0, as it is written in a
// guest: it knows registers, instance blocks, page tables, rings and
// para-virtual calls, and nothing of a mediator. Tests, the demonstration and the
// benchmarks run it in process.
//
// Not here: anything that a guest could not do by loads and stores. What breaks the rules
// on purpose is in the tests of mmio/mediate.
package guestdriver
