package budget

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/gpuctl/gpuctl/internal/beneath"
)

// Table is gpuguest's end: the files of a folder.
type Table struct {
	dir string
	mu  sync.Mutex
}

// Open returns the table of a folder, which it makes if there is none.
func Open(dir string) (*Table, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("budgets: %w", err)
	}
	return &Table{dir: dir}, nil
}

// Key names the file of a claim and of what executes it.
func Key(claim string, runtime []byte) string {
	h := sha256.New()
	fmt.Fprintf(h, "%d %s ", len(claim), claim)
	h.Write(runtime)
	return hex.EncodeToString(h.Sum(nil)[:20])
}

// Line returns the file with a key and the line in it that has the name; there is one after
// that. The caller closes the file.
func (t *Table) Line(key, who string) (f *os.File, line int, err error) {
	if who == "" || len(who) > MaxName {
		return nil, 0, fmt.Errorf("budget of %.60q: a name has 1 to %d bytes", who, MaxName)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if f, err = beneath.OpenFile(t.dir, key, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, 0, fmt.Errorf("budget of %s: %w", who, err)
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	// Executors could have made it shorter.
	if err := f.Truncate(fileSize); err != nil {
		return nil, 0, fmt.Errorf("budget of %s: %w", who, err)
	}
	b, err := read(f)
	if err != nil {
		return nil, 0, err
	}
	line = -1
	for i := range Lines {
		switch name(b, i) {
		case who:
			return f, i, nil
		case "":
			if line < 0 {
				line = i
			}
		}
	}
	if line < 0 {
		return nil, 0, fmt.Errorf("budget of %s: %w: %d", who, ErrFull, Lines)
	}
	entry := make([]byte, lineSize)
	copy(entry, who)
	if _, err := f.WriteAt(entry, int64(line)*lineSize); err != nil {
		return nil, 0, fmt.Errorf("budget of %s: %w", who, err)
	}
	return f, line, nil
}

// Leave removes the lines with a name from all files but that of the key keep, which may be
// empty. A file without lines is removed. Nothing may run that uses what is removed.
func (t *Table) Leave(who, keep string) error {
	return t.each(func(key, name string) bool { return name != who || key == keep })
}

// Retain removes the lines of all names for which known is false.
func (t *Table) Retain(known func(name string) bool) error {
	return t.each(func(_, name string) bool { return known(name) })
}

func (t *Table) each(stays func(key, name string) bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	all, err := os.ReadDir(t.dir)
	if err != nil {
		return fmt.Errorf("budgets: %w", err)
	}
	for _, x := range all {
		if err := t.sweep(x.Name(), stays); err != nil {
			return err
		}
	}
	return nil
}

func (t *Table) sweep(key string, stays func(key, name string) bool) error {
	f, err := beneath.OpenFile(t.dir, key, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("budgets: %w", err)
	}
	defer f.Close()
	b, err := read(f)
	left := 0
	for i := 0; i < Lines && err == nil; i++ {
		switch n := name(b, i); {
		case n == "":
		case stays(key, n):
			left++
		default:
			_, err = f.WriteAt(make([]byte, lineSize), int64(i)*lineSize)
		}
	}
	if err == nil && left > 0 {
		return nil
	}
	// Without lines, or of no use: then those who have it open go on by themselves.
	if err := os.Remove(filepath.Join(t.dir, key)); err != nil {
		return fmt.Errorf("budgets: %w", err)
	}
	return nil
}
