// Package remote connects to a cluster from outside: it enrols hosts and users with a
// join token, and connects users with the credentials that enrolment has given them.
package remote
