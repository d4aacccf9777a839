// Package property tests swaps against random programs: it generates valid
// OpenCL call sequences over several threads and queues, runs them undisturbed
// and with swaps, suspensions and injected faults at random places, and
// compares all memory, events and callbacks.
//
// A sequence is a script for test/cl/script.c. The generator keeps a model of
// every object, so that a script is valid and free of races: commands that
// touch the same memory are ordered by events, queues or barriers between
// threads, and nothing blocks on a user event that the thread itself has still
// to set. Scripts that once failed lie in testdata and are run again.
//
// GPUCTL_PROPERTY_SECONDS makes the test run that long; otherwise
// -rapid.checks says how many scripts it tries.
package property
