package budget

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// A file has Lines lines. A line is a name, padded with zeros, and behind it a u64: how many
// bytes are taken in that name.
const (
	Lines    = 256
	MaxName  = 40 // bytes of a name
	lineSize = 64
	takenAt  = lineSize - 8
	fileSize = Lines * lineSize
)

var (
	// ErrFull means that the claim has more sessions on a GPU than a file has lines.
	ErrFull = errors.New("too many sessions of one claim")
	// errForm is returned for what is no file of this package.
	errForm = errors.New("not a budget")
)

func read(f *os.File) ([]byte, error) {
	b := make([]byte, fileSize)
	if _, err := io.ReadFull(io.NewSectionReader(f, 0, fileSize), b); err != nil {
		return nil, fmt.Errorf("budget: %w: %w", errForm, err)
	}
	return b, nil
}

func name(b []byte, line int) string {
	return string(bytes.TrimRight(b[line*lineSize:][:MaxName], "\x00"))
}

func taken(b []byte, line int) uint64 {
	return binary.LittleEndian.Uint64(b[line*lineSize+takenAt:])
}

// sum returns what all lines but one take; more than a u64 can have is the largest.
func sum(b []byte, but int) (n uint64) {
	for i := range Lines {
		if i == but {
			continue
		}
		x := taken(b, i)
		if n+x < n {
			return ^uint64(0)
		}
		n += x
	}
	return n
}
