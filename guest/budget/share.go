package budget

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"time"
)

// Share is an executor's end: what its session has taken of the claim's memory. A nil Share
// has no limit.
type Share struct {
	f     *os.File
	line  int
	limit uint64
}

// Use returns the share with a line of a file. limit is how many bytes all lines may take.
func Use(f *os.File, line int, limit uint64) (*Share, error) {
	if line < 0 || line >= Lines {
		return nil, fmt.Errorf("budget: line %d: %w", line, errForm)
	}
	if _, err := read(f); err != nil {
		return nil, err
	}
	return &Share{f, line, limit}, nil
}

// tries is how often two sessions that take the last memory at once try it.
const tries = 4

// Take changes what the session has taken, if all sessions of the claim stay within the
// limit, and reports whether it has. What is less than before always is.
func (s *Share) Take(bytes uint64) bool {
	if s == nil {
		return true
	}
	for i := range tries {
		if i > 0 { // the other may have withdrawn, too
			time.Sleep(time.Duration(rand.IntN(int(time.Millisecond)))) //nolint:gosec // only so that two don't do the same
		}
		b, err := read(s.f)
		if err != nil {
			return false
		}
		before := taken(b, s.line)
		if err := s.write(bytes); err != nil {
			return false
		}
		if bytes <= before {
			return true
		}
		// First written, then read: of two at once, at least one sees the other.
		if b, err = read(s.f); err != nil {
			return false
		}
		if others := sum(b, s.line); others <= s.limit && bytes <= s.limit-others {
			return true
		}
		_ = s.write(before)
	}
	return false
}

// Reach is Take for an executor that prepares to serve a session: another one may serve it
// with the same line, which is never lowered here.
func (s *Share) Reach(bytes uint64) bool {
	if s == nil {
		return true
	}
	b, err := read(s.f)
	if err != nil {
		return false
	}
	return bytes <= taken(b, s.line) || s.Take(bytes)
}

func (s *Share) write(n uint64) error {
	_, err := s.f.WriteAt(binary.LittleEndian.AppendUint64(nil, n), int64(s.line)*lineSize+takenAt)
	return err
}
