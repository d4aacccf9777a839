// Package sysfs gives access to a host's kernel: to the files below sys, proc and dev, in
// a root folder, with a way of writing to them that does not block for ever if a driver
// hangs. Its callers know the meaning of the files.
package sysfs
