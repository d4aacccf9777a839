// Package sysfs is the door to a machine's kernel: the files below sys, proc
// and dev, under an injected folder, and one way to write to them that a hung
// driver cannot hang. What the files mean is known by who uses them.
package sysfs
