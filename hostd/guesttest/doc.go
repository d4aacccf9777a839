// Package guesttest is a fake gpuguest for tests, without GPUs. It serves GuestService
// and enforces its rules: a token that was not offered gets no session; a session moves
// only to a target whose limits are not below its usage; one operation runs at a time; a
// suspended session cannot be swapped, and a running one cannot be resumed; an operation
// whose caller leaves is rolled back.
//
// Applications connect as clients of the session protocol do; see Connect.
package guesttest
