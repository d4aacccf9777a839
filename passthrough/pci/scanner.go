package pci

import (
	"io/fs"
	"sync"
	"sync/atomic"
	"time"
)

// maxAge is how long a scan is believed: not everything that happens to a
// device is told of, such as that it stops answering.
const maxAge = 30 * time.Second

// Scanner scans one machine. Where it hears of changes it remembers the cards
// until the next one: a scan reads all of the configuration space of a card
// and of the bridges above it, which takes seconds in an emulated machine, and
// one operation asks several times. The names of pci.ids are read once.
// A Scanner is safe for concurrent use; its cards are shared and not to be changed.
type Scanner struct {
	root    fs.FS
	hears   atomic.Bool
	changes atomic.Uint64

	mu    sync.Mutex // held during a scan: who waits shares its result
	also  func(*Device) bool
	cards []*Card
	seen  uint64 // changes when the scan began
	at    time.Time
	names map[id]string
	asked map[id]bool // those that names was read for
}

// NewScanner returns a Scanner of the machine whose files root holds.
func NewScanner(root fs.FS) *Scanner { return &Scanner{root: root} }

// Hears reports whether Changed is called from now on whenever a device comes,
// goes or changes drivers. Until then every look is a scan.
func (s *Scanner) Hears(yes bool) {
	s.Changed()
	s.hears.Store(yes)
}

// Also has devices be cards whatever their class, if is says so of their ids.
func (s *Scanner) Also(is func(*Device) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.also = is
	s.Changed()
}

// Class of the device at an address, the upper sixteen bits of its class code;
// false: there is none.
func (s *Scanner) Class(a Address) (uint16, bool) {
	n := (&scan{root: s.root}).node(a)
	if n == nil {
		return 0, false
	}
	return uint16(n.class >> 8), true
}

// Changed makes the next look a scan.
func (s *Scanner) Changed() { s.changes.Add(1) }

// Cards are as Scan finds them, or has found them since the last change.
func (s *Scanner) Cards() ([]*Card, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hears.Load() && s.cards != nil && s.seen == s.changes.Load() && time.Since(s.at) < maxAge {
		return s.cards, nil
	}
	return s.scan()
}

// Scan returns the cards as they are now, by address. A machine without PCI
// has none.
func (s *Scanner) Scan() ([]*Card, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.scan()
}

func (s *Scanner) scan() ([]*Card, error) {
	at, seen := time.Now(), s.changes.Load()
	cards, err := look(s.root, s.also, s.lookUp)
	if err != nil {
		s.cards = nil
		return cards, err
	}
	s.cards, s.at, s.seen = cards, at, seen
	return cards, nil
}

// lookUp reads pci.ids when it is asked for ids that it was not asked for before.
func (s *Scanner) lookUp(want map[id]bool) map[id]string {
	for i := range want {
		if !s.asked[i] {
			s.names, s.asked = readNames(s.root, want), want
			break
		}
	}
	return s.names
}
