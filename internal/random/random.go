// Package random makes random parts of names.
package random

import (
	"crypto/rand"
	"encoding/hex"
)

// Hex returns n random bytes as text of twice that length.
func Hex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // crypto/rand never fails
	return hex.EncodeToString(b)
}
