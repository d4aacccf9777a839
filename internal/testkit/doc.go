// Package testkit is what the tests of many packages share: one way to wait for
// what other goroutines and processes do, and one log that they may all write.
//
// Tests wait for events. Where the code under test tells of one (a channel, a
// stream, a process that ends), a test waits for that; else it looks again and
// again with Until, or waits with Parked for who begins to wait. None has a limit of its own that a busy machine could
// reach: what never comes is told shortly before the test's deadline. No test
// sleeps so that something has surely happened meanwhile. Where time itself is
// the subject, a test brings its own clock or runs in a bubble of
// testing/synctest.
//
// Only tests import this package: files of tests, packages whose names end in
// test, and what is below test/ and lab/.
package testkit
