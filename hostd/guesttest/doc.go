// Package guesttest is a guest helper for tests, without GPUs: it serves
// GuestService with its rules. A token that was not offered gets no session, a
// session moves only to a target that honours its usage, one operation runs at
// a time, a suspended session cannot swap and a running one cannot resume, and
// an operation whose caller leaves is rolled back.
//
// Applications connect as a session protocol client does; Connect is one.
package guesttest
