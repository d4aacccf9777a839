package capture

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
)

// Format is the version of the archive's layout.
const Format = 1

const (
	manifestName = "manifest.json"
	rootDir      = "root"
	factsDir     = "facts"

	maxFile     = 64 << 10 // largest output of a command, or file of the host, in bytes
	maxFact     = 4 << 20
	maxHostFile = 4 << 20 // after the choice of lines
	maxEntries  = 200_000
	maxTotal    = 64 << 20
	maxPath     = 1024
	maxParts    = 64

	readTime = 5 * time.Second // limit for reading one file
	maxStuck = 8               // after so many files that could not be read in time, no more are read
)

// Runner runs a command on the host and returns its standard output.
type Runner func(ctx context.Context, argv ...string) ([]byte, error)

// Options are the options of Write.
type Options struct {
	Version string            // version of gpuctl
	Redact  bool              // remove what identifies the host
	Run     Runner            // runs the commands for the facts; nil: no facts
	Extra   map[string][]byte // additional facts, by name
}

// Manifest describes an archive.
type Manifest struct {
	Format   int      `json:"format"`
	Version  string   `json:"version"` // version of the gpuctl that made it
	Redacted bool     `json:"redacted"`
	Files    int      `json:"files"`
	Facts    []Fact   `json:"facts"`
	Missing  []string `json:"missing"` // files that exist and could not be read
}

// Fact is the output of a command.
type Fact struct {
	Name    string   `json:"name"` // name of the file in facts/
	Command []string `json:"command,omitempty"`
	Error   string   `json:"error,omitempty"` // if it is set, the file may be missing
}

// Write writes an archive of the host whose files are in root. It fails only if the
// archive cannot be written, or ctx ends. The manifest contains what else went wrong.
func Write(ctx context.Context, w io.Writer, root fs.FS, o Options) (Manifest, error) {
	c := &collector{root: root, files: map[string][]byte{}, links: map[string]string{}, wanted: map[string]bool{}}
	c.host(ctx)
	m := Manifest{Format: Format, Version: o.Version, Redacted: o.Redact, Facts: []Fact{}}
	facts := map[string][]byte{}
	if o.Run != nil {
		m.Facts, facts = ask(ctx, o.Run, c.xen, c.gpus)
	}
	for _, name := range slices.Sorted(maps.Keys(o.Extra)) {
		facts[name] = o.Extra[name]
		m.Facts = append(m.Facts, Fact{Name: name})
	}
	if err := ctx.Err(); err != nil {
		return Manifest{}, fmt.Errorf("capture: %w", err)
	}
	secrets := newScrubber()
	for name, data := range c.files {
		switch {
		case path.Base(name) == "config": // configuration spaces are not text
		case strings.HasSuffix(name, ".yaml"):
			c.files[name] = secrets.yaml(data)
		default:
			c.files[name] = secrets.text(data)
		}
	}
	for name, data := range facts {
		facts[name] = secrets.text(data)
	}
	for i, f := range m.Facts {
		m.Facts[i].Error = string(secrets.text([]byte(f.Error)))
	}
	m.Missing = append([]string{}, c.missing...)
	if o.Redact {
		r := newRedactor(c.files, facts)
		c.files, c.links = r.host(c.files, c.links)
		facts = r.facts(facts)
		for i, f := range m.Facts {
			m.Facts[i].Name, m.Facts[i].Error = r.words(f.Name), r.words(f.Error)
			for j, word := range f.Command {
				m.Facts[i].Command[j] = r.words(word)
			}
		}
		for i, s := range m.Missing {
			m.Missing[i] = r.words(s)
		}
	}
	m.Files = len(c.files) + len(c.links)
	entries := map[string]entry{}
	for name, data := range c.files {
		entries[path.Join(rootDir, name)] = entry{data: data}
	}
	for name, target := range c.links {
		entries[path.Join(rootDir, name)] = entry{link: target}
	}
	for name, data := range facts {
		entries[path.Join(factsDir, name)] = entry{data: data}
	}
	return m, pack(w, m, entries)
}

type entry struct {
	data []byte
	link string // destination of a link, instead of data
}

// pack writes the archive: first the manifest, then the other files sorted by name.
func pack(w io.Writer, m Manifest, entries map[string]entry) error {
	manifest, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	z := gzip.NewWriter(w)
	t := tar.NewWriter(z)
	put := func(name string, e entry) error {
		h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(e.data)), ModTime: time.Unix(0, 0)}
		if e.link != "" {
			h.Typeflag, h.Linkname, h.Mode, h.Size = tar.TypeSymlink, e.link, 0o777, 0
		}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		_, err := t.Write(e.data)
		return err
	}
	err = put(manifestName, entry{data: append(manifest, '\n')})
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		err = errors.Join(err, put(name, entries[name]))
	}
	if err := errors.Join(err, t.Close(), z.Close()); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	return nil
}

// collector reads files of the host. Files that do not exist are ignored. Files that
// exist and cannot be read are listed as missing.
type collector struct {
	root    fs.FS
	files   map[string][]byte
	links   map[string]string
	missing []string
	stuck   int
	total   int
	full    bool

	xen    bool
	gpus   []string        // PCI addresses
	wanted map[string]bool // ids of the vendors whose names are needed
}

func (c *collector) miss(format string, args ...any) {
	if len(c.missing) < 1000 {
		c.missing = append(c.missing, fmt.Sprintf(format, args...))
	}
}

// file adds a whole file.
func (c *collector) file(name string) { c.fileUpTo(name, maxFile, nil) }

// fileUpTo adds a file of at most that many bytes, or only the lines for which keep
// returns true.
func (c *collector) fileUpTo(name string, most int, keep func(line string) bool) []byte {
	if data, ok := c.files[name]; ok {
		return data
	}
	if c.full || c.stuck >= maxStuck || !fs.ValidPath(name) {
		return nil
	}
	type read struct {
		data []byte
		err  error
	}
	got := make(chan read, 1)
	go func() { // reading an attribute of a faulty device may never return
		f, err := c.root.Open(name)
		if err != nil {
			got <- read{err: err}
			return
		}
		defer f.Close()
		if info, err := f.Stat(); err == nil && !info.Mode().IsRegular() {
			got <- read{err: fs.ErrNotExist}
			return
		}
		data, err := io.ReadAll(io.LimitReader(f, int64(most)+1))
		got <- read{data, err}
	}()
	timer := time.NewTimer(readTime)
	defer timer.Stop()
	var r read
	select {
	case r = <-got:
	case <-timer.C:
		if c.stuck++; c.stuck == maxStuck {
			c.miss("%s, and all that follows: too many files do not come", name)
			return nil
		}
		c.miss("%s: does not come within %v", name, readTime)
		return nil
	}
	switch {
	case errors.Is(r.err, fs.ErrNotExist):
		return nil
	case r.err != nil && len(r.data) == 0:
		// Reading many attributes fails if they have no value.
		if errors.Is(r.err, fs.ErrPermission) {
			c.miss("%s: only root can read it", name)
		}
		return nil
	case len(r.data) > most:
		c.miss("%s: has more than %d bytes and is cut off", name, most)
		r.data = r.data[:most]
	}
	if keep != nil {
		var kept bytes.Buffer
		for line := range strings.Lines(string(r.data)) {
			if keep(line) {
				kept.WriteString(line)
			}
		}
		r.data = kept.Bytes()
	}
	if c.total += len(r.data); c.total > maxTotal/2 || len(c.files)+len(c.links) >= maxEntries-1000 {
		c.full = true
		c.miss("%s, and all that follows: the machine is too large", name)
		return nil
	}
	c.files[name] = r.data
	return r.data
}

// link adds a symbolic link, and returns its destination relative to the root; empty: it
// is not a link.
func (c *collector) link(name string) string {
	if c.full || !fs.ValidPath(name) {
		return ""
	}
	target, err := fs.ReadLink(c.root, name)
	if err != nil || target == "" || path.IsAbs(target) {
		return ""
	}
	to := path.Join(path.Dir(name), target)
	if !fs.ValidPath(to) || len(target) > maxPath {
		return ""
	}
	c.links[name] = target
	return to
}

func (c *collector) list(dir string) []fs.DirEntry {
	entries, err := fs.ReadDir(c.root, dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.miss("%s: can't be listed", dir)
	}
	return entries
}
