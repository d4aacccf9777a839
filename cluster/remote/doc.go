// Package remote reaches a cluster from outside: enrolment with a join token,
// for hosts and users alike, and a user's connections with the credentials
// that came of it.
package remote
