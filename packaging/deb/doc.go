// Package deb has no code: its test looks at what build.sh packs.
package deb
