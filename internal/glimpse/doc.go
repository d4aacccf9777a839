// Package glimpse reads what another process can keep from being read.
//
// The command line, the environment and the mappings of a process are read from its memory, under a
// lock that the process can hold for as long as it likes: one thread of it reads memory that is of a
// file whose server, its user's, does not answer, and another one waits to change the mappings. No
// time limit of the caller ends such a read; it ends with the process. A file's attributes are asked
// of its server as well.
package glimpse
