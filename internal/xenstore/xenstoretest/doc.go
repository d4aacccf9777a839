// Package xenstoretest is a xenstored for tests, inside the test's process. It enforces
// the rules that are difficult for clients: permissions of guests, transactions that
// conflict, watches that fire when they are registered, lists that are too long for one
// message, invalid names, and connections that are lost.
package xenstoretest
