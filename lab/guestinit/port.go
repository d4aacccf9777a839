package main

import (
	"os"
	"path/filepath"
	"strings"
)

// findPort returns the device of the virtio-serial port with that name, whose folder in sysfs
// is below class; empty: there is none.
func findPort(class, name string) string {
	files, _ := filepath.Glob(filepath.Join(class, "*", "name")) // the pattern is right
	for _, file := range files {
		if b, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(b)) == name {
			return filepath.Base(filepath.Dir(file))
		}
	}
	return ""
}
