// Package chaos disturbs a running session: swaps, suspensions and resumptions
// in random order, many of which fail, are cancelled or killed at a random step
// or moment, several in a row. Whether that showed is for the session's program
// to say, which carries a model of itself (test/cl/model.c).
//
// The tests in test/e2e run it on processors, bench on real GPUs.
package chaos
