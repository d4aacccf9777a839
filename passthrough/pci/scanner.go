package pci

import (
	"io/fs"
	"sync"
	"sync/atomic"
	"time"
)

// maxAge is how long a scan is valid, because not all changes cause events: for example,
// that a device stops answering.
const maxAge = 30 * time.Second

// Scanner scans one host. If it is told about changes, it keeps the cards until the next
// one: a scan reads the whole configuration space of each card and of the bridges above
// it, which takes seconds in an emulated machine, and one operation needs the cards
// several times. pci.ids is read once. A Scanner is safe for concurrent use. Its cards
// are shared and must not be changed.
type Scanner struct {
	root    fs.FS
	hears   atomic.Bool
	changes atomic.Uint64

	mu    sync.Mutex // held during a scan: waiting callers share its result
	also  func(*Device) bool
	cards []*Card
	seen  uint64 // value of changes when the scan began
	at    time.Time
	names map[id]string
	asked map[id]bool // ids for which names was read
}

// NewScanner returns a Scanner of the host whose files are in root.
func NewScanner(root fs.FS) *Scanner { return &Scanner{root: root} }

// Hears sets whether Changed is called from now on whenever a device appears, disappears
// or changes its driver. Otherwise each call of Cards scans.
func (s *Scanner) Hears(yes bool) {
	s.Changed()
	s.hears.Store(yes)
}

// Also sets a function that decides whether a device is a card whatever its class.
func (s *Scanner) Also(is func(*Device) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.also = is
	s.Changed()
}

// Class returns the class of the device at an address, the upper 16 bits of its class
// code. It returns false if there is no device.
func (s *Scanner) Class(a Address) (uint16, bool) {
	n := (&scan{root: s.root}).node(a)
	if n == nil {
		return 0, false
	}
	return uint16(n.class >> 8), true
}

// Changed makes the next call of Cards scan.
func (s *Scanner) Changed() { s.changes.Add(1) }

// Cards returns the cards of the last scan if nothing has changed since. Otherwise it
// scans.
func (s *Scanner) Cards() ([]*Card, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hears.Load() && s.cards != nil && s.seen == s.changes.Load() && time.Since(s.at) < maxAge {
		return s.cards, nil
	}
	return s.scan()
}

// Scan scans, and returns the cards sorted by address. A host without PCI has none.
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

// lookUp reads pci.ids only if it gets ids that it did not get before.
func (s *Scanner) lookUp(want map[id]bool) map[id]string {
	for i := range want {
		if !s.asked[i] {
			s.names, s.asked = readNames(s.root, want), want
			break
		}
	}
	return s.names
}
