// Package xenstoretest is a xenstored for tests, inside the test's process. It
// keeps the rules that clients stumble over: permissions of guests,
// transactions that conflict, watches that fire when they are registered,
// lists that are too long for one message, names that are not allowed, and
// connections that break.
package xenstoretest
